"""Which libraries a configuration needs, and which of them are not installed."""

from collections.abc import Iterator

from notbefore.config.sinks import OTLP_LIBRARY, OtlpConnection, SinkConfig
from notbefore.errors import ConfigError


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
