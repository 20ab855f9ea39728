"""``MetricsExport``: one export of the agent's metrics after another.

Imported only if OTLP is configured.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime

from notbefore import __version__
from notbefore.config.model import Otlp
from notbefore.config.otel import prefers_deltas
from notbefore.core.record import Vm
from notbefore.metrics.families import Family
from notbefore.otlp.deltas import Deltas
from notbefore.otlp.partial_success import PartialSuccess
from notbefore.otlp.sender import Sender
from notbefore.otlp.signals import agent_resource, metrics_data


class MetricsExport:
    """Use it in one thread. ``began``: when exports began, in Unix nanoseconds."""

    def __init__(self, config: Otlp, began: int) -> None:
        self._config = config
        self._sender = Sender(config, "metrics")
        self._deltas: Deltas | None = None
        if prefers_deltas(os.environ):
            self._deltas = Deltas(began)

    def send(self, families: Iterable[Family], vm: Vm | None) -> PartialSuccess:
        """Export the present values; raises ``SendError`` or ``ConfigError`` as ``Sender`` does."""
        resource = agent_resource(vm, __version__, self._config.resource)
        data = metrics_data(families, resource, __version__, datetime.now(UTC))
        if self._deltas is None:
            return self._sender.send(data)

        partial = self._sender.send(self._deltas.since_accepted(data))
        self._deltas.accepted()
        return partial

    def close(self) -> None:
        """Close the connection."""
        self._sender.close()
