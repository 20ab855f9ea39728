"""The agent's own figures: how its polling, its store and its configuration fare. They begin anew with each start."""

from datetime import datetime
from typing import Final, get_args

from msgspec import Struct, field

from notbefore.core.document import FlawReason
from notbefore.errors import DOCUMENT_REASONS, IMDS_REASONS
from notbefore.metrics.totals import Histogram

COURIER_STARTS: Final = ("due", "crashed", "hung", "reload")  # why a courier was started
POLL_RESULTS: Final = ("changed", "unchanged", *IMDS_REASONS)
POLL_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 120.0)


OTLP_RESULTS: Final = ("success", "rejected", "failure")


def _zeros(names: tuple[str, ...]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


class Figures(Struct):
    """Mutable; the agent owns one. Times are Unix seconds, durations seconds."""

    version: str = ""
    python: str = ""
    api_version: str = ""
    polls: dict[str, int] = field(default_factory=lambda: _zeros(POLL_RESULTS))
    poll_duration: Histogram = field(default_factory=lambda: Histogram.empty(POLL_BOUNDS))
    last_successful_poll: float | None = None
    beat_lag: float = 0.0  # of the last beat, or of the one that is overdue
    documents_rejected: dict[str, int] = field(default_factory=lambda: _zeros(tuple(DOCUMENT_REASONS)))
    flaws: dict[str, int] = field(default_factory=lambda: _zeros(get_args(FlawReason)))
    store_degraded: bool = False
    store_damaged: int = 0  # files set aside
    config_reloads: dict[str, int] = field(default_factory=lambda: _zeros(("success", "failure")))
    config_refused: bool = False  # the last reload failed, and the configuration before it is in use
    config_loaded: float | None = None
    courier_running: bool = False
    courier_starts: dict[str, int] = field(default_factory=lambda: _zeros(COURIER_STARTS))
    otlp_exports: dict[tuple[str, str], int] = field(default_factory=dict)  # (signal, result)
    vm: dict[str, str] = field(default_factory=dict)  # label -> value; empty until the identity is known
    since: datetime | None = None  # when this process began to count
