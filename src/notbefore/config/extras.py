"""Checks that the libraries of the package's extras are installed."""

import importlib.util
from typing import Final

from notbefore.config.sinks import OtlpConnection, SinkSettings, Slack
from notbefore.errors import ConfigError

MODULES: Final = {  # extra of the package -> the module that it installs
    "apprise": "apprise",
    "eventhub": "azure.eventhub",
    "fleet": "azure.eventhub.extensions.checkpointstoreblobaio",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
    "otlp-grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "slack": "slack_sdk",
    "web": "bcrypt",
}


def check_extra(extra: str) -> None:
    """Raise ``ConfigError`` if the library of an extra is not installed.

    Imports at most its parent packages.
    """
    module = MODULES[extra]
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        is_installed = False
    if not is_installed:
        raise ConfigError(f"{module} is not installed: pip install 'azure-notbefore[{extra}]'")


def check_installed(settings: SinkSettings) -> None:
    """Raise ``ConfigError`` if the library that a connection needs is not installed."""
    extra = settings.EXTRA
    if isinstance(settings, OtlpConnection) and settings.protocol == "grpc":
        extra = "otlp-grpc"
    if isinstance(settings, Slack) and settings.token is not None:
        extra = "slack"
    if extra:
        check_extra(extra)
