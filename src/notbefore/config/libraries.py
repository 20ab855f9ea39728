"""Whether the libraries are installed that a configuration needs."""

from typing import Final

from notbefore.config.sinks import OtlpConnection, SinkSettings
from notbefore.errors import ConfigError

MODULES: Final = {  # that the extras of the package install
    "apprise": "apprise",
    "eventhub": "azure.eventhub",
    "fleet": "azure.eventhub.extensions.checkpointstoreblobaio",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
    "otlp-grpc": "opentelemetry.exporter.otlp.proto.grpc",
}


def check_extra(extra: str) -> None:
    """Raise ``ConfigError`` if the library of an extra is not installed; imports at most the packages around it."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where a library is needed

    try:
        found = find_spec(MODULES[extra])
    except ModuleNotFoundError:  # the package around it is not there
        found = None
    if found is None:
        raise ConfigError(f"{MODULES[extra]} is not installed: pip install 'azure-notbefore[{extra}]'")


def check_installed(settings: SinkSettings) -> None:
    """Raise ``ConfigError`` if the library is not installed that a sink, or the export over OTLP, needs."""
    grpc = isinstance(settings, OtlpConnection) and settings.protocol == "grpc"
    if extra := "otlp-grpc" if grpc else settings.EXTRA:
        check_extra(extra)
