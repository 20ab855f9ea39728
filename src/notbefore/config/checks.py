"""What the types of a configuration cannot say: libraries that are missing, names that nothing has, programs."""

import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from notbefore.config.model import Config
from notbefore.config.sinks import OTLP_LIBRARY, OtlpConnection, SinkConfig
from notbefore.core.routing import Route
from notbefore.core.text import one_of
from notbefore.errors import ConfigError

_PROCESS: Final = "process_"  # the names of the families that `prometheus_client` adds begin so


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
    if config.kind == "windows_event_log" and sys.platform != "win32":
        raise ConfigError("only Windows has this log")
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


def unknown_names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the path of each other name that nothing has, and what to do."""
    if config.exposition.families.exclude:
        from notbefore.metrics.families import METRICS, is_named  # noqa: PLC0415 - only where there are any

        for name in config.exposition.families.exclude:
            if not (name.startswith(_PROCESS) or any(is_named(metric.name, (name,)) for metric in METRICS)):
                yield "exposition.families.exclude", f"no metric is called {name!r} (see docs/metrics.md)"


def command_problem(program: str) -> str:
    """Return why a program cannot be run, and what to do about it; empty if it can be."""
    from shutil import which  # noqa: PLC0415 - only where there are commands

    path = Path(program)
    if path.is_dir():
        return f"{program} is a directory: name the program in it"
    if which(program) is None and not path.exists():
        return f"{program} is not there: install it, or correct the path"
    if which(program) is None:
        return f"{program} is not executable: chmod +x {program}"
    return _unknown_format(path) if sys.platform == "linux" else ""


def _unknown_format(path: Path) -> str:
    """Return why the kernel would not start an executable file; empty if it would, or if it cannot be read."""
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError:
        return ""
    if not first.startswith(b"#!"):
        return "" if first.startswith(b"\x7fELF") else f"{path} does not begin with `#!` and the path of an interpreter"
    interpreter = re.split(r"[ \t]", first[2:].decode("utf-8", "replace").strip(" \t\n"))[0]
    return "" if Path(interpreter).is_file() else f"{path} names an interpreter that is not there: {interpreter!r}"


def webhook_problem(sink: SinkConfig) -> str:
    """Return why the courier would not connect to a webhook; empty if it would, or if it leads to a name."""
    from ipaddress import ip_address  # noqa: PLC0415 - only where there are webhooks

    if sink.webhook is None or sink.webhook.allow_private:
        return ""
    host = urlsplit(sink.webhook.url.reveal()).hostname or ""
    try:
        private = host == "localhost" or not ip_address(host).is_global
    except ValueError:
        return ""
    return f"{host} is not a public address: set `allow_private: true` if it is the right one" if private else ""
