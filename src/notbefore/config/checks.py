"""What the types of a configuration cannot say: libraries that are missing, names that nothing has, programs."""

from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from notbefore.config.model import Config
from notbefore.config.sinks import OTLP_LIBRARY, OtlpConnection, SinkConfig
from notbefore.core.routing import Route
from notbefore.core.text import one_of
from notbefore.errors import ConfigError

Finding = tuple[str, str]  # the path of a key, and what is wrong with it


def installed(module: str) -> bool:
    """Return whether a module is installed; imports at most the packages around it."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where a library is needed

    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def check_installed(config: SinkConfig) -> None:
    """Raise ``ConfigError`` if a library that the sink needs is not installed; imports none of them."""
    settings = config.settings
    if settings.NEEDS is not None:
        module, extra = settings.NEEDS
        if not installed(module):
            raise ConfigError(f"{config.kind} needs {module}: pip install 'azure-notbefore[{extra}]'")
    if isinstance(settings, OtlpConnection) and (text := next(missing_otlp(settings.protocol), "")):
        raise ConfigError(text)


def missing_otlp(protocol: str) -> Iterator[str]:
    """Yield which library is missing that a protocol of OTLP needs, and how to install it."""
    if not installed(OTLP_LIBRARY):
        yield "otlp needs OpenTelemetry's SDK: pip install 'azure-notbefore[otlp]'"
    if protocol == "grpc" and not installed("opentelemetry.exporter.otlp.proto.grpc"):
        yield "protocol grpc needs an exporter of its own: pip install 'azure-notbefore[otlp-grpc]'"


def unknown_sinks(route: Route, sinks: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the names in a route; ``sinks``: all names, also of mistaken sinks."""
    for key, names in (("sinks", route.sinks), ("fallback", route.fallback)):
        for name in names:
            if name not in sinks:
                known = one_of(name, sinks) if sinks else ": write it under `sinks`"
                yield f"{key}: there is no sink {name!r}{known}"


def broken(config: Config) -> Iterator[Finding]:
    """Yield what cannot work: an error in ``check-config``. The agent warns of it, and watches all the same."""
    from shutil import which  # noqa: PLC0415 - only where a configuration is checked

    for name, sink in config.sinks.items():
        if sink.command is not None and which(program := sink.command.command[0]) is None:
            yield f"sinks.{name}.command.command", f"{program} is no program that can be run: install it, or chmod +x"
        if sink.webhook is not None and not sink.webhook.allow_private:
            host = urlsplit(sink.webhook.url.reveal()).hostname or ""
            if _is_private(host):
                text = f"{host} is not a public address: set `allow_private: true` if it is the right one"
                yield f"sinks.{name}.webhook.url", text
    if Path(config.state.dir).is_file():
        yield "state.dir", f"{config.state.dir} is a file: name a directory"


def _is_private(host: str) -> bool:
    """Whether the courier would not connect to it; a name may lead anywhere."""
    from ipaddress import ip_address  # noqa: PLC0415 - only where there are webhooks

    try:
        return host == "localhost" or not ip_address(host).is_global
    except ValueError:
        return False
