"""``OutboxView``: what is in the outbox, and what was counted of it, as figures."""

from msgspec import Struct

from notbefore.metrics.totals import Histogram


class OutboxView(Struct, frozen=True):
    """What is in the outbox, and what was counted of it."""

    rows: dict[tuple[str, str], int] = {}  # (sink, state)
    oldest: dict[str, float] = {}  # sink -> when the oldest pending change was seen, in Unix seconds
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Histogram] = {}  # sink -> change seen to accepted by the far side
