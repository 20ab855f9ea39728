"""Checks that the libraries of the package's extras are installed."""

import importlib.util
import sys
from typing import Final

from notbefore.config.sinks import OtlpConnection, Plugin, SinkSettings, Slack
from notbefore.errors import ConfigError

MODULES: Final = {  # extra of the package -> the module that it installs
    "apprise": "apprise",
    "eventhub": "azure.eventhub",
    "fleet": "azure.eventhub.extensions.checkpointstoreblobaio",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
    "otlp-grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "slack": "slack_sdk",
    "web": "bcrypt",
    "windows": "win32evtlog",
}
SINKS: Final = "notbefore.sinks"  # the group of entry points


def check_extra(extra: str) -> None:
    """Raise ``ConfigError`` if the library of an extra is not installed.

    Imports at most its parent packages.
    """
    if extra == "windows" and sys.platform != "win32":
        raise ConfigError("only Windows has an event log")
    module = MODULES[extra]
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        is_installed = False
    if not is_installed:
        raise ConfigError(f"{module} is not installed: pip install 'azure-notbefore[{extra}]'")


def check_plugin(name: str) -> None:
    """Raise ``ConfigError`` if no package has a sink with this name. Imports none of them."""
    from importlib.metadata import entry_points  # only for sinks of other packages

    names = [entry_point.name for entry_point in entry_points(group=SINKS)]
    if name not in names:
        installed = ", ".join(sorted(names)) or "none"
        raise ConfigError(
            f"no installed package has a sink {name!r} (installed: {installed}): install the"
            " package into the environment of notbefore"
        )


def check_installed(settings: SinkSettings) -> None:
    """Raise ``ConfigError`` if the library that a connection needs is not installed."""
    if isinstance(settings, Plugin):
        check_plugin(settings.name)
    extra = settings.EXTRA
    if isinstance(settings, OtlpConnection) and settings.protocol == "grpc":
        extra = "otlp-grpc"
    if isinstance(settings, Slack) and settings.token is not None:
        extra = "slack"
    if extra:
        check_extra(extra)
