"""Metrics and records over OTLP."""

from typing import Final

NO_REASON: Final = "OpenTelemetry's exporter failed and does not say why"
