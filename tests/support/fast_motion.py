"""Fleets in fast motion, as series for ``promtool test rules``.

The core computes the samples. promtool's time begins at 0, which is ``T0`` here, so samples that
are timestamps are moved by ``T0``.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from notbefore.core.tracked import Tracked
from notbefore.metrics import fleet
from notbefore.metrics.families import Family
from notbefore.metrics.fleet import Counts
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import Figures, OutboxView, PollFigures, Totals
from notbefore.web.exposition import client_metric
from support.azure import T0, Story, at

JOB = "notbefore"  # the job that the rules expect
INTERVAL = 5  # seconds between two polls of an agent
MISSING = "_"  # promtool's word for a scrape without the series
Items = list[dict[str, Any]]  # events as Azure lists them

T = TypeVar("T")
Chapters = Mapping[int, T]  # second -> the value from then on, in order


def current(chapters: Chapters[T], second: int) -> T:
    """Return the value that holds at a second."""
    values = [value for since, value in chapters.items() if since <= second]
    return values[-1]


def no_figures(_second: int) -> dict[str, Any]:
    return {}


def no_approvals(_second: int) -> dict[Any, int]:
    return {}


class FleetVm(Story):
    """A VM of the scale set ``web`` and its agent.

    ``story``: the events that Azure lists; ``None`` while the VM is down. ``stood_still``: at which
    seconds the VM was paused, and for how long. ``polling``, ``figures`` and ``approvals`` return
    further counts of the agent at a second. ``placed=False``: IMDS does not identify the VM.
    """

    job = JOB

    def __init__(
        self,
        name: str,
        story: Chapters[Items | None],
        *,
        placed: bool = True,
        stood_still: Mapping[int, float] = {},
        polling: Callable[[int], dict[str, Any]] = no_figures,
        figures: Callable[[int], dict[str, Any]] = no_figures,
        approvals: Callable[[int], dict[Any, int]] = no_approvals,
        outbox: Chapters[OutboxView] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.story = story
        self.stood_still = stood_still
        self.outbox = outbox
        self.polling = polling
        self.figures = figures
        self.approvals = approvals
        self.place: dict[str, str] = {}
        if placed:
            self.place = {
                "name": name,
                "subscription_id": "s",
                "resource_group": "g",
                "scale_set": "web",
            }
        self.last_poll: int | None = None

    def poll(self, second: int) -> bool:
        """Let the agent poll, and return whether the VM is up."""
        items = current(self.story, second)
        if items is None:
            return False
        silence = None
        if self.last_poll is not None:
            silence = float(second - self.last_poll)
        self.sees(
            second,
            *items,
            vm=self.place.get("name"),
            silence=silence,
            gap=self.stood_still.get(second, 0.0),
        )
        self.last_poll = second
        return True

    def scrape(self, second: int, wanted: frozenset[str]) -> dict[str, float]:
        """Return the value of each series of the wanted metrics."""
        outbox = OutboxView()
        sinks: tuple[str, ...] = ()
        if self.outbox is not None:
            outbox = current(self.outbox, second)
            sinks = ("chat",)
        poll_figures = {"last_success": at(second).timestamp(), "answering": True}
        snapshot = MetricsSnapshot(
            tracked=self.tracked,
            totals=replace(self.totals, approvals=self.approvals(second)),
            figures=Figures(vm=self.place, **self.figures(second)),
            now=at(second),
            outbox=outbox,
            sinks=sinks,
            polling=PollFigures(**{**poll_figures, **self.polling(second)}),
        )
        return exposed(self.name, samples(snapshot), wanted)


class FleetInstance:
    """An instance of ``notbefore fleet``; ``story``: its counts, ``None`` while it is down."""

    job = "notbefore-fleet"

    def __init__(
        self, name: str, story: Chapters[Counts | None], outbox: Chapters[OutboxView] | None = None
    ) -> None:
        self.name = name
        self.story = story
        self.outbox = outbox or {0: OutboxView()}

    def poll(self, second: int) -> bool:
        """Return whether the instance is up."""
        return current(self.story, second) is not None

    def scrape(self, second: int, wanted: frozenset[str]) -> dict[str, float]:
        """Return the value of each series of the wanted metrics."""
        counts = current(self.story, second)
        assert counts is not None
        process = MetricsSnapshot(
            tracked=Tracked(),
            totals=Totals(),
            figures=Figures(),
            now=at(second),
            outbox=current(self.outbox, second),
            sinks=("chat",),
        )
        return exposed(self.name, fleet.fleet_samples(counts, process), wanted, self.job)


Target = FleetVm | FleetInstance  # a target of Prometheus


def exposed(
    instance: str, families: Iterable[Family], wanted: frozenset[str], job: str = JOB
) -> dict[str, float]:
    """Return the value of each series of the wanted metrics."""
    values: dict[str, float] = {}
    for family in families:
        for sample in client_metric(family).samples:
            if sample.name not in wanted:
                continue
            value = sample.value
            if sample.name.endswith(("_timestamp_seconds", "_created")):
                value -= T0.timestamp()
            labels = {**sample.labels, "instance": instance, "job": job}
            values[series(sample.name, labels)] = value
    return values


def series(name: str, labels: dict[str, str]) -> str:
    """Return a series as Prometheus writes it."""
    quoted = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{quoted}}}"


def input_series(
    targets: Iterable[Target], minutes: int, interval: int, wanted: frozenset[str]
) -> list[dict[str, str]]:
    """Return the ``input_series`` of promtool: the wanted metrics of each scrape."""
    scrapes = minutes * 60 // interval + 1
    rows: dict[str, list[str]] = {}  # series -> the value of each scrape, or MISSING
    for target in targets:
        for second in range(0, minutes * 60 + 1, INTERVAL):
            up = target.poll(second)
            if second % interval:
                continue
            values = {series("up", {"instance": target.name, "job": target.job}): float(up)}
            if up:
                values.update(target.scrape(second, wanted))
            for key, value in values.items():
                row = rows.setdefault(key, [MISSING] * scrapes)
                row[second // interval] = f"{value:.6f}"
    return [{"series": key, "values": " ".join(_with_ends(row))} for key, row in rows.items()]


def _with_ends(row: list[str]) -> list[str]:
    """Mark a series as stale at the first scrape that lacks it, as Prometheus does."""
    marked: list[str] = []
    previous = MISSING
    for value in row:
        is_end = value == MISSING and previous != MISSING
        marked.append("stale" if is_end else value)
        previous = value
    return marked
