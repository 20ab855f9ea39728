"""Fleets in fast motion, as Prometheus would have scraped them: series for ``promtool test rules``,
made by the core.

promtool's time begins at 0, which is ``T0`` here: timestamps among the samples are moved by that.
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

JOB = "notbefore"  # that the rules know
INTERVAL = 5  # seconds between two polls of an agent
Items = list[dict[str, Any]]


T = TypeVar("T")
Chapters = Mapping[int, T]  # what holds from each second on


def now(chapters: Chapters[T], second: int) -> T:
    return [one for since, one in chapters.items() if since <= second][-1]


class FleetVm(Story):
    """A VM of the scale set ``web`` and its agent.

    ``story`` is what Azure lists, ``None`` while the VM is down.

    ``polling``, ``figures`` and ``approvals`` are what the agent counts beside that, at each
    second.
    """

    job = JOB

    def __init__(
        self,
        name: str,
        story: Chapters[Items | None],
        *,
        placed: bool = True,
        stood_still: Mapping[int, float] = {},
        polling: Callable[[int], dict[str, Any]] = lambda _: {},
        figures: Callable[[int], dict[str, Any]] = lambda _: {},
        approvals: Callable[[int], dict[Any, int]] = lambda _: {},
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
        place = {"name": name, "subscription_id": "s", "resource_group": "g", "scale_set": "web"}
        self.place = place if placed else {}
        self.asked: int | None = None

    def poll(self, second: int) -> bool:
        """Look at Azure; is the VM up?"""
        items = now(self.story, second)
        if items is None:
            return False
        silence = None if self.asked is None else float(second - self.asked)
        self.sees(
            second,
            *items,
            vm=self.place.get("name"),
            silence=silence,
            gap=self.stood_still.get(second, 0.0),
        )
        self.asked = second
        return True

    def scrape(self, second: int, wanted: frozenset[str]) -> dict[str, float]:
        """Series -> value."""
        polling = PollFigures(
            **{"last_success": at(second).timestamp(), "answering": True, **self.polling(second)}
        )
        figures = Figures(vm=self.place, **self.figures(second))
        totals = replace(self.totals, approvals=self.approvals(second))
        outbox, sinks = (now(self.outbox, second), ("chat",)) if self.outbox else (OutboxView(), ())
        return exposed(
            self.name,
            samples(
                MetricsSnapshot(self.tracked, totals, figures, at(second), outbox, sinks, polling)
            ),
            wanted,
        )


class FleetInstance:
    """An instance of ``notbefore fleet``.

    ``story`` is what it has to show, ``None`` while it is down.
    """

    job = "notbefore-fleet"

    def __init__(
        self, name: str, story: Chapters[Counts | None], outbox: Chapters[OutboxView] | None = None
    ) -> None:
        self.name = name
        self.story = story
        self.outbox = outbox or {0: OutboxView()}

    def poll(self, second: int) -> bool:
        return now(self.story, second) is not None

    def scrape(self, second: int, wanted: frozenset[str]) -> dict[str, float]:
        view = now(self.story, second)
        assert view is not None
        process = MetricsSnapshot(
            Tracked(), Totals(), Figures(), at(second), now(self.outbox, second), ("chat",)
        )
        return exposed(self.name, fleet.fleet_samples(view, process), wanted, self.job)


Target = FleetVm | FleetInstance  # what Prometheus scrapes


def exposed(
    name: str, made: Iterable[Family], wanted: frozenset[str], job: str = JOB
) -> dict[str, float]:
    """Series -> value, of the metrics that are wanted."""
    found: dict[str, float] = {}
    for sample in (sample for family in made for sample in client_metric(family).samples):
        if sample.name in wanted:
            moved = (
                T0.timestamp() if sample.name.endswith(("_timestamp_seconds", "_created")) else 0.0
            )
            found[series(sample.name, {**sample.labels, "instance": name, "job": job})] = (
                sample.value - moved
            )
    return found


def series(name: str, labels: dict[str, str]) -> str:
    quoted = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{quoted}}}"


def input_series(
    vms: Iterable[Target], minutes: int, interval: int, wanted: frozenset[str]
) -> list[dict[str, str]]:
    """What promtool takes as ``input_series``: a scrape each ``interval`` seconds, of the metrics
    that are wanted.
    """
    steps = minutes * 60 // interval + 1
    values: dict[str, list[str]] = {}
    for vm in vms:
        for second in range(0, minutes * 60 + 1, INTERVAL):
            up = vm.poll(second)
            if second % interval:
                continue
            now = {
                series("up", {"instance": vm.name, "job": vm.job}): float(up),
                **(vm.scrape(second, wanted) if up else {}),
            }
            for key, value in now.items():
                values.setdefault(key, ["_"] * steps)[second // interval] = f"{value:.6f}"
    return [{"series": key, "values": " ".join(_ended(row))} for key, row in values.items()]


def _ended(row: list[str]) -> list[str]:
    """A series that a scrape does not hold any more is stale at once."""
    pairs = zip(["_", *row], row, strict=False)
    return ["stale" if value == "_" and before != "_" else value for before, value in pairs]
