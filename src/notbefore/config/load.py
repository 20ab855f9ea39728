"""YAML, environment and command line -> ``Config``: frozen, complete, every mistake named with file, line and path.

A secret may stand under its key, or be found: ``url_file``, ``url_env``, ``url_credential``. It never prints.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct, field

from notbefore.config.checks import check_otlp, check_sinks, otlp_headers
from notbefore.config.normalize import prepared
from notbefore.config.otel_variables import asked, fold
from notbefore.config.secret import Secret
from notbefore.config.sinks import Links, Otlp, SinkConfig
from notbefore.config.yaml_file import convert, read
from notbefore.core.approval import Policy
from notbefore.core.delivery import Routing
from notbefore.core.duration import Duration
from notbefore.core.routing import Route
from notbefore.errors import ConfigError
from notbefore.web.access import Access

if TYPE_CHECKING:
    from notbefore.web.web_config import WebConfig

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"
_TLS_FILES: Final = ("cert_file", "key_file", "client_ca_file")
ApiVersion = Literal["2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"]


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Imds(_Section, frozen=True):
    """Where the events are asked for, and how often."""

    endpoint: str = "http://169.254.169.254"
    discover: bool = True  # where the usual endpoint is silent, look for another (DHCP option 245)
    api_version: ApiVersion = "2020-07-01"
    interval: Duration = Duration("1s")  # 0.2 s to 1 h

    def __post_init__(self) -> None:
        if not 0.2 <= self.interval.seconds <= 3600:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("imds.interval: expected 200ms to 1h")


class VmName(_Section, frozen=True):
    """Who this VM is, where IMDS cannot say it."""

    name: str | None = None


class Server(_Section, frozen=True):
    """Where /metrics is served, ``host:port``, and who may ask there."""

    listen: str = "127.0.0.1:10169"
    web_config_file: str | None = None  # TLS and passwords, in the form of Prometheus's exporter-toolkit
    insecure: bool = False  # not only this machine may ask, and anybody
    allowed_hosts: tuple[str, ...] = ()  # names under which we may be asked; `*.example.org` for all below it


def default_state_dir() -> Path:
    """Systemd's ``STATE_DIRECTORY``, else the place of the platform for a service's state."""
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData")) / "notbefore"
    return Path("/var/lib/notbefore")


class State(_Section, frozen=True):
    """Where the state is kept."""

    dir: str = field(default_factory=lambda: str(default_state_dir()))


class Log(_Section, frozen=True):
    """The agent's own log, on stderr. ``auto``: for people on a terminal, JSON elsewhere."""

    format: Literal["auto", "json", "text"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Exposition(_Section, frozen=True):
    """What /metrics holds besides: with ``webdevops`` the names of azure-scheduledevents-exporter and -manager."""

    compat: Literal["none", "webdevops"] = "none"


class Config(_Section, frozen=True):
    """All of it."""

    imds: Imds = Imds()
    vm: VmName = VmName()
    server: Server = Server()
    state: State = field(default_factory=State)
    log: Log = Log()
    exposition: Exposition = Exposition()
    sinks: dict[str, SinkConfig] = {}
    routes: tuple[Route, ...] = ()  # without any, changes of events of this VM go to every sink
    links: Links = Links()
    approval: Policy = Policy()
    otlp: Otlp | None = None  # metrics over OTLP; none without it, or the variables that ask for it

    @property
    def routing(self) -> Routing:
        """What decides where a change goes."""
        return Routing(self.routes, {name: sink.settings.terms for name, sink in self.sinks.items()})

    @property
    def hidden(self) -> tuple[str, ...]:
        """The variables of the environment that hold a secret of the section ``otlp``."""
        return tuple(secret.variable for secret in otlp_headers(self.otlp).values() if secret.variable)


def load(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str | None],
    *,
    sending: bool = True,
    trying: bool = False,
) -> Config:
    """Read the configuration; raises ``ConfigError``.

    ``overrides`` are the command line's, by dotted path (``imds.endpoint``); ``None`` is "not given". Who is not
    ``sending`` needs neither the sinks' libraries nor their secrets, and may have none. Who is ``trying`` has each sink
    made, for what only its library can say; the agent does not, which would import it for good.
    """
    values, places = read(path) if path is not None else ({}, {})
    base = path.absolute().parent if path is not None else Path.cwd()
    # the file is read strictly on its own first: only there is 1 no text
    _convert(prepared(values, base), places, strict=True)
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _put(values, keys, text, name)
            places[".".join(keys)] = name
    for dotted, value in overrides.items():
        if value is not None:
            _put(values, dotted.split("."), value, "the command line")
            places[dotted] = "the command line"
    if "otlp" not in values and otlp_trouble(environment) is not None:
        environment = {**environment, "OTEL_SDK_DISABLED": "true"}  # `warnings` says so
    fold(values, places, environment)
    config = _convert(prepared(values, base), places, strict=False)
    if sending:
        check_sinks(config, places, environment, trying=trying)
        check_otlp(config.otlp, places, environment)
    return config


def otlp_trouble(environment: Mapping[str, str]) -> str | None:
    """Why the variables, where they alone ask for OTLP, cannot be used.

    They are often set for a whole machine, with other programs in mind: that is no reason not to watch.
    """
    if not asked(environment):
        return None
    try:
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        fold(values, places, environment)
        check_otlp(convert(values["otlp"], Otlp, places, strict=False, above="otlp"), places, environment)
    except ConfigError as error:
        return str(error)
    return None


def load_web_config(path: Path) -> "WebConfig":
    """Read ``server.web_config_file``; raises ``ConfigError``. What it names is found beside it."""
    from notbefore.web.web_config import WebConfig  # noqa: PLC0415 - most agents have no such file

    values, places = read(path)
    tls = values.get("tls_server_config")
    if isinstance(tls, dict):
        found = {
            key: str(path.absolute().parent / value)
            for key, value in tls.items()
            if key in _TLS_FILES and isinstance(value, str)
        }
        values["tls_server_config"] = {**tls, **found}
    return convert(values, WebConfig, places, strict=True)


def access(server: Server) -> Access:
    """Who may ask; raises ``ConfigError``."""
    return Access(server.web_config_file, load_web_config, insecure=server.insecure, allowed_hosts=server.allowed_hosts)


def plain_secrets(config: Config) -> list[str]:
    """The keys under which a secret stands as plain text."""
    return [
        f"sinks.{name}.{sink.kind}.{key}"
        for name, sink in config.sinks.items()
        for key, secret in sink.secrets.items()
        if secret.source == "inline"
    ] + [path for path, secret in otlp_headers(config.otlp).items() if secret.source == "inline"]


def warnings(config: Config, path: Path | None) -> list[str]:
    """What is not wrong, but ought to be known."""
    trouble = otlp_trouble(os.environ) if config.otlp is None else None
    found = [f"OTEL_* variables ask for OTLP, and cannot be used: nothing is sent ({trouble})"] if trouble else []
    found += [f"no route leads to sink {name}: nothing is sent there" for name in _unused(config)]
    plain = plain_secrets(config)
    if plain and path is not None and path.stat().st_mode & stat.S_IROTH:
        found.append(
            f"{path} can be read by everybody, and holds secrets ({', '.join(plain)}): chmod o-r, or use *_file"
        )
    return found


def _unused(config: Config) -> list[str]:
    led = {name for route in config.routes for name in route.sinks}
    heartbeats = {name for name, sink in config.sinks.items() if sink.event_hub and sink.event_hub.heartbeat}
    return [name for name in config.sinks if name not in led | heartbeats] if config.routes else []


def dump(config: Config) -> str:
    """The configuration in use as YAML, for ``check-config``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    values = msgspec.to_builtins(config, enc_hook=_encode)
    for name, sink in values["sinks"].items():
        values["sinks"][name] = {kind: settings for kind, settings in sink.items() if settings is not None}
    if config.otlp is None:
        del values["otlp"]  # empty, it would be wrong
    return yaml.safe_dump(values, sort_keys=False)


def files(config: Config) -> list[str]:
    """What is read besides the configuration itself: secrets, certificates, keys."""
    web = config.server.web_config_file
    return [*_files(msgspec.to_builtins(config, enc_hook=_encode)), *(load_web_config(Path(web)).files if web else ())]


def _files(values: object) -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, str) and (key == "file" or key.endswith("_file")):
            yield value
        else:
            yield from _files(value)


def _encode(value: object) -> object:
    return value.shown() if isinstance(value, Secret) else str(value)


def _put(values: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    for key in keys[:-1]:
        section = values.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{origin}: {key} is not a section")
        values = section
    values[keys[-1]] = text


def _convert(values: dict[str, Any], places: dict[str, str], *, strict: bool) -> Config:
    if isinstance(values.get("sinks"), dict):
        for name, sink in values["sinks"].items():  # one by one: the errors of a mapping do not name its key
            convert(sink, SinkConfig, places, strict=strict, above=f"sinks.{name}")
    return convert(values, Config, places, strict=strict)
