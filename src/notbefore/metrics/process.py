"""Figures of the agent process: polling, store, courier, configuration, which begin again at each start; the outbox."""

from collections import Counter
from datetime import datetime
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from notbefore.core.outbox import LATENCY_BOUNDS, Outbox
from notbefore.metrics.totals import Histogram, increased

# of a poll in seconds: what IMDS usually takes, and what is slow for a poll each second
POLL_BOUNDS: Final = (0.01, 0.1, 1.0, 5.0)
OTLP_RESULTS: Final = ("success", "rejected", "failure")


class PollFigures(Struct, frozen=True):
    """The polls of IMDS: their results, durations and delays."""

    api_version: str = ""
    results: dict[str, int] = field(default_factory=Counter)  # `changed`, `unchanged`, or one of ``IMDS_REASONS``
    duration: Histogram = Histogram.empty(POLL_BOUNDS)
    last_success: float | None = None  # Unix seconds
    answering: bool = False  # the last valid answer is at most three intervals old
    delay: float = 0.0  # seconds by which the last poll was late, or the next one is overdue
    documents_rejected: dict[str, int] = field(default_factory=Counter)
    flaws: dict[str, int] = field(default_factory=Counter)

    def plus(self, result: str, delay: float, duration: float) -> "PollFigures":
        """With one poll more; ``delay`` and ``duration`` in seconds."""
        return replace(
            self, results=increased(self.results, result), duration=self.duration.plus(duration), delay=delay
        )


class CourierFigures(Struct, frozen=True):
    """The couriers: whether one runs, and how often one was started."""

    running: bool = False
    starts: dict[str, int] = field(default_factory=Counter)  # by reason: due, crashed, hung, reload, upgrade


class ConfigFigures(Struct, frozen=True):
    """How the configuration was read."""

    loaded: float | None = None  # Unix seconds at which the one in use was read
    refused: bool = False  # the last reload failed, and the configuration before it is in use
    reloads: dict[str, int] = field(default_factory=Counter)  # `success`, `failure`


class Figures(Struct, frozen=True):
    """All of them at one moment."""

    version: str = ""
    python: str = ""
    polling: PollFigures = field(default_factory=PollFigures)
    courier: CourierFigures = field(default_factory=CourierFigures)
    config: ConfigFigures = field(default_factory=ConfigFigures)
    store_degraded: bool = False
    store_damaged: int = 0  # files and rows set aside
    otlp_exports: dict[tuple[str, str], int] = {}  # (signal, result)
    unforeseen: int = 0  # errors
    package_replaced: str = ""  # by which version, in words; empty while the one on disk is the one that runs
    auth_failures: int | None = None  # of the listener; None where no password is needed
    vm: dict[str, str] = {}  # label -> value; empty until the identity is known
    since: datetime | None = None  # when this process began to count


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
