"""YAML, environment and command line -> ``Config``: frozen, complete, every mistake named with file, line and path.

A secret may stand under its key, or be found: ``url_file``, ``url_env``, ``url_credential``. It never prints.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from notbefore.config_file import convert, read
from notbefore.delivery.secret import SOURCES, Secret
from notbefore.delivery.settings import KINDS, Links, Otlp, SinkConfig
from notbefore.delivery.sinks import check_installed, check_otlp_installed, try_out
from notbefore.errors import ConfigError
from notbefore.events.approval import Policy
from notbefore.events.delivery import Routing
from notbefore.events.duration import Duration
from notbefore.events.routing import Route
from notbefore.exposition.access import Access
from notbefore.otel_variables import asked, fold

if TYPE_CHECKING:
    from notbefore.exposition.web_config import WebConfig

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)
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
        return tuple(secret.variable for secret in _otlp_headers(self.otlp).values() if secret.variable)


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
    _convert(_prepared(values, base), places, strict=True)
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
    config = _convert(_prepared(values, base), places, strict=False)
    if sending:
        _check_sinks(config, places, environment, trying=trying)
        _check_otlp(config.otlp, places, environment)
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
        _check_otlp(convert(values["otlp"], Otlp, places, strict=False, above="otlp"), places, environment)
    except ConfigError as error:
        return str(error)
    return None


def load_web_config(path: Path) -> "WebConfig":
    """Read ``server.web_config_file``; raises ``ConfigError``. What it names is found beside it."""
    from notbefore.exposition.web_config import WebConfig  # noqa: PLC0415 - most agents have no such file

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
    ] + [path for path, secret in _otlp_headers(config.otlp).items() if secret.source == "inline"]


def _otlp_headers(otlp: Otlp | None) -> dict[str, Secret]:
    """The headers of the section, by their paths; those of the agent's log as far as they are others."""
    if otlp is None:
        return {}
    logs = otlp.logs.headers if otlp.logs is not None else {}
    return {f"otlp.headers.{name}": secret for name, secret in otlp.headers.items()} | {
        f"otlp.logs.headers.{name}": secret for name, secret in logs.items() if secret != otlp.headers.get(name)
    }


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


def _prepared(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """The values in the one form that the structs take: secrets as mappings, matchers as lists, files absolute."""
    values = dict(values)
    if isinstance(values.get("sinks"), dict):
        values["sinks"] = {name: _prepared_sink(sink, base) for name, sink in values["sinks"].items()}
    if isinstance(values.get("otlp"), dict):
        values["otlp"] = _prepared_keys((), values["otlp"], base)
        if isinstance(values["otlp"].get("logs"), dict):
            values["otlp"]["logs"] = _prepared_keys((), values["otlp"]["logs"], base)
    if isinstance(values.get("routes"), list):
        values["routes"] = [_prepared_route(route) for route in values["routes"]]
    approval = values.get("approval")
    if isinstance(approval, dict) and isinstance(approval.get("rules"), list):
        values["approval"] = {**approval, "rules": [_prepared_route(rule) for rule in approval["rules"]]}
    if isinstance(values.get("server"), dict):
        values["server"] = _prepared_server(values["server"], base)
    return values


def _prepared_server(server: dict[str, Any], base: Path) -> dict[str, Any]:
    server = dict(server)
    if isinstance(server.get("web_config_file"), str):
        server["web_config_file"] = str(base / server["web_config_file"])
    if isinstance(server.get("allowed_hosts"), str):  # of the environment
        server["allowed_hosts"] = [name.strip() for name in server["allowed_hosts"].split(",")]
    return server


def _prepared_sink(sink: Any, base: Path) -> Any:
    if not isinstance(sink, dict):
        return sink
    return {kind: _prepared_settings(kind, settings, base) for kind, settings in sink.items()}


def _prepared_settings(kind: str, settings: Any, base: Path) -> Any:
    if not isinstance(settings, dict) or kind not in KINDS:
        return settings
    return _prepared_keys(KINDS[kind].SECRETS, settings, base)


def _prepared_keys(secrets: tuple[str, ...], settings: dict[str, Any], base: Path) -> dict[str, Any]:
    prepared: dict[str, Any] = {}
    for key, value in settings.items():
        name, _, source = str(key).rpartition("_")
        if name in secrets and source in SOURCES:
            prepared[name] = _found_at(base, {source: value})
        elif str(key).endswith("_file") and isinstance(value, str):
            prepared[key] = str(base / value)
        elif key == "headers" and isinstance(value, dict):
            prepared[key] = {header: _found_at(base, secret) for header, secret in value.items()}
        else:
            prepared[key] = value if key not in secrets else _found_at(base, value)
    return prepared


def _found_at(base: Path, secret: Any) -> Any:
    if isinstance(secret, dict) and isinstance(secret.get("file"), str):
        return {**secret, "file": str(base / secret["file"])}
    return secret


def _prepared_route(route: Any) -> Any:
    if not isinstance(route, dict) or not isinstance(route.get("match"), dict):
        return route
    lists = ("change", "event_type", "event_status", "event_source", "scope")
    match = {
        key: [value] if key in lists and not isinstance(value, list) else value for key, value in route["match"].items()
    }
    return {**route, "match": match}


def _check_sinks(config: Config, places: dict[str, str], environment: Mapping[str, str], *, trying: bool) -> None:
    """What can be known before the first message: libraries, secrets, names in routes."""
    for name, sink in config.sinks.items():
        dotted = f"sinks.{name}.{sink.kind}"
        place = places.get(dotted, places.get("", "the configuration"))
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{place}: sinks.{name}: expected a name of letters, digits, - and _")
        try:
            check_installed(sink)
            for key, secret in sink.secrets.items():
                _check_secret(sink, key, secret.reveal(environment))
            _check_files(sink.settings)
            if trying:
                try_out(name, sink, config.links)
        except ConfigError as error:
            raise ConfigError(f"{place}: {dotted}: {error}") from None
    for number, route in enumerate(config.routes):
        for name in route.sinks:
            if name not in config.sinks:
                place = places.get(f"routes[{number}].sinks", places.get("", "the configuration"))
                known = ", ".join(config.sinks) or "none"
                raise ConfigError(f"{place}: routes[{number}].sinks: there is no sink {name!r} (known: {known})")


def _check_otlp(otlp: Otlp | None, places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Libraries and secrets of the section."""
    if otlp is None:
        return
    try:
        where = "otlp"
        check_otlp_installed(otlp.protocol)
        for where, secret in _otlp_headers(otlp).items():
            _check_header(where.partition(".headers.")[2], secret.reveal(environment))
        where = "otlp"
        _check_files(otlp)
        if otlp.logs is not None:
            where = "otlp.logs"
            check_otlp_installed(otlp.logs.protocol)
            _check_files(otlp.logs)
    except ConfigError as error:
        place = places.get(where) or places.get("otlp.endpoint") or places.get("", "the configuration")
        raise ConfigError(f"{place}: {where}: {error}") from None


def _check_files(settings: Struct) -> None:
    """The certificates and keys that are named are there."""
    for key in settings.__struct_fields__:
        path = getattr(settings, key)
        if not key.endswith("_file") or path is None:
            continue
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


def _check_secret(sink: SinkConfig, key: str, value: str) -> None:
    """What can be said of a secret without telling it."""
    if key == "token" or key.startswith("headers."):
        _check_header(key, value)
    elif key == "connection_string":
        _check_connection_string(value, sink.event_hub.hub if sink.event_hub else None)
    elif key == "url":
        _check_url(sink, value)


def _check_header(key: str, value: str) -> None:
    wrong = next((place for place, letter in enumerate(value, start=1) if not " " <= letter <= "\xff"), None)
    if wrong is not None or value != value.strip():
        where = f"its character {wrong}" if wrong else "the space around it"
        raise ConfigError(f"{key}: expected one line of plain letters, as a header takes them: see {where}")


def _check_connection_string(value: str, hub: str | None) -> None:
    parts = {name.strip().lower() for name, equals, text in (part.partition("=") for part in value.split(";")) if text}
    signed = {"sharedaccesskeyname", "sharedaccesskey"} <= parts or "sharedaccesssignature" in parts
    if "endpoint" not in parts or not signed:
        raise ConfigError(
            "connection_string: expected Endpoint=sb://NAMESPACE/;SharedAccessKeyName=NAME;SharedAccessKey=KEY;EntityPath=HUB"
        )
    if "entitypath" not in parts and not hub:
        raise ConfigError("connection_string: it names no hub: expected `hub`, or EntityPath=HUB in it")


def _check_url(sink: SinkConfig, value: str) -> None:
    try:
        url = urlsplit(value)
        _ = url.port
    except ValueError:
        raise ConfigError("url: this is no address: what is special in a password is written as %XX") from None
    if sink.kind in ("webhook", "slack") and (url.scheme not in ("http", "https") or not url.hostname):
        raise ConfigError("url: expected http://HOST or https://HOST")
    if sink.kind == "email" and url.scheme not in ("mailto", "mailtos"):
        raise ConfigError("url: expected mailto://USER:PASSWORD@HOST or mailtos://USER:PASSWORD@HOST")
    if sink.kind == "webhook" and url.username is not None:
        raise ConfigError("url: user and password do not belong in the address: give them as `headers`")


def _convert(values: dict[str, Any], places: dict[str, str], *, strict: bool) -> Config:
    if isinstance(values.get("sinks"), dict):
        for name, sink in values["sinks"].items():  # one by one: the errors of a mapping do not name its key
            convert(sink, SinkConfig, places, strict=strict, above=f"sinks.{name}")
    return convert(values, Config, places, strict=strict)
