"""``OutboxView``: the numbers of the outbox that metrics are computed from."""

from msgspec import Struct

from notbefore.metrics.totals import Histogram


class OutboxView(Struct, frozen=True):
    """The rows in the outbox, and the counts of deliveries."""

    rows: dict[tuple[str, str], int] = {}  # (sink, state)
    oldest: dict[tuple[str, str], float] = {}  # (sink, severity) -> Unix time when the oldest pending change was seen
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Histogram] = {}  # sink -> seconds from when a change was seen to its acceptance
    errors: dict[str, str] = {}  # sink -> the error of its newest delivery that has one

    def oldest_of(self, sink: str) -> float | None:
        """When the oldest change was seen that is pending for the sink, in Unix seconds; ``None`` without one."""
        return min((time for (name, _), time in self.oldest.items() if name == sink), default=None)
