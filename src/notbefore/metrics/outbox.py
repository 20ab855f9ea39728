"""``OutboxView``: the numbers of the outbox that metrics are computed from."""

from msgspec import Struct

from notbefore.core.outbox import LATENCY_BOUNDS, Outbox
from notbefore.metrics.totals import Histogram


class OutboxView(Struct, frozen=True):
    """The rows in the outbox, and the counts of deliveries."""

    rows: dict[tuple[str, str], int] = {}  # (sink, state)
    oldest: dict[tuple[str, str], float] = {}  # (sink, severity) -> Unix time when the oldest pending change was seen
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Histogram] = {}  # sink -> seconds from when a change was seen to its acceptance
    errors: dict[str, str] = {}  # sink -> the error of its newest delivery that has one


def view_of(outbox: Outbox, now: float, wall: float) -> OutboxView:
    """The numbers of an outbox. ``now``: on its clock, in seconds; ``wall``: the same moment as a Unix time."""
    rows: dict[tuple[str, str], int] = {}
    oldest: dict[tuple[str, str], float] = {}
    errors: dict[str, str] = {}
    for row in outbox.rows.chosen():
        key = row.sink, row.state
        rows[key] = rows.get(key, 0) + 1
        if row.error:
            errors[row.sink] = row.error
        if row.state == "pending":
            waits = row.sink, row.severity
            oldest[waits] = min(oldest.get(waits, wall), row.created - now + wall)
    ledger = outbox.rows.ledger
    latency = {sink: Histogram(LATENCY_BOUNDS, *found) for sink, found in ledger.latency.items()}
    return OutboxView(rows, oldest, ledger.counts, latency, errors)
