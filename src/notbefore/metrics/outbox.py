"""``OutboxView``: what is in the outbox, and what was counted of it, as figures."""

from msgspec import Struct

from notbefore.metrics.totals import Histogram


class OutboxView(Struct, frozen=True):
    """What is in the outbox, and what was counted of it."""

    rows: dict[tuple[str, str], int] = {}  # (sink, state)
    oldest: dict[tuple[str, str], float] = {}  # (sink, severity) -> when the oldest pending one was seen
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Histogram] = {}  # sink -> change seen to accepted by the receiver

    def oldest_of(self, sink: str) -> float | None:
        """When the oldest change was seen that is pending for the sink, in Unix seconds; ``None`` without one."""
        return min((time for (name, _), time in self.oldest.items() if name == sink), default=None)
