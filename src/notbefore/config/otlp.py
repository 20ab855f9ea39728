"""Where OTLP goes, and how: the section ``otlp``, and what the sink ``otlp_logs`` has of it."""

from typing import Final, Literal

from msgspec import Struct

from notbefore.config.forms import Headers, check_address_form, check_header_names
from notbefore.config.secret import Secret
from notbefore.core.duration import Duration

OtlpProtocol = Literal["http/protobuf", "grpc"]
OtlpCompression = Literal["gzip", "none"]
OTLP_LIBRARY: Final = "opentelemetry.exporter.otlp.proto.http"  # the module that the extra `otlp` installs


class OtlpConnection(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where OTLP goes and how; ``OtlpLogs``, which is a sink's settings, has fields of the same names."""

    endpoint: str | None = None  # of all signals: /v1/metrics and /v1/logs are added
    metrics_endpoint: str | None = None  # of one signal, taken as it stands
    logs_endpoint: str | None = None
    protocol: OtlpProtocol = "http/protobuf"
    headers: Headers = {}
    compression: OtlpCompression = "gzip"
    timeout: Duration = Duration("10s")  # for one export
    ca_file: str | None = None
    cert_file: str | None = None  # the client's certificate
    key_file: str | None = None
    resource: dict[str, str] = {}  # attributes beside what IMDS says

    @classmethod
    def of(cls, settings: Struct) -> "OtlpConnection":
        """What a struct with these fields says of them."""
        return cls(**{name: getattr(settings, name) for name in cls.__struct_fields__ if hasattr(settings, name)})

    def __post_init__(self) -> None:
        for name in ("endpoint", "metrics_endpoint", "logs_endpoint"):
            url = getattr(self, name)
            if url is not None:
                check_address_form(url, name)
        check_header_names(self.headers)
        binary = [name for name in self.headers if name.lower().endswith("-bin")]
        if binary and self.protocol == "grpc":  # gRPC would take its value for base64
            raise ValueError(f"headers: {binary[0]!r}: over gRPC no header that ends in -bin can be sent")
        if self.key_file and not self.cert_file:
            raise ValueError("expected `cert_file` beside `key_file`")
        if not 0.1 <= self.timeout.seconds <= 300:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("timeout: expected 100ms to 5m")


class Otlp(OtlpConnection, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section ``otlp``: metrics, and the agent's own log if that is wanted. The records are a sink's."""

    interval: Duration = Duration("60s")  # between two exports of the metrics
    metrics: bool = True
    agent_log: Literal["none", "error", "warning", "info"] = "none"  # from which level up it is sent
    logs: OtlpConnection | None = None  # of `agent_log`, where it goes another way than the metrics

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.interval.seconds <= 3600:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("interval: expected 1s to 1h")


def otlp_headers(otlp: Otlp | None) -> dict[str, Secret]:
    """The headers of the section, by their paths; those of the agent's log as far as they are others."""
    if otlp is None:
        return {}
    logs = otlp.logs.headers if otlp.logs is not None else {}
    return {f"otlp.headers.{name}": secret for name, secret in otlp.headers.items()} | {
        f"otlp.logs.headers.{name}": secret for name, secret in logs.items() if secret != otlp.headers.get(name)
    }
