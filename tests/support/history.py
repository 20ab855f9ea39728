"""Metrics of agents in past hours, made by the core from the simulator's scenarios.

The clock, the polls and the interruptions are invented. ``openmetrics`` renders the samples with
timestamps, for ``promtool tsdb create-blocks-from openmetrics``. ``Present`` serves the metrics of
the same agents now, for a Prometheus to scrape.
"""

import http.server
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from notbefore.core.clock import Instant
from notbefore.core.lifecycle import diff
from notbefore.core.outbox_rows import LATENCY_BOUNDS
from notbefore.core.tracked import Observation, Tracked
from notbefore.metrics.families import Family
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import (
    ConfigFigures,
    Figures,
    Histogram,
    OutboxView,
    PollFigures,
    Totals,
)
from notbefore.simulator.state import Play
from notbefore.web.exposition import client_metric, render
from support.azure import document
from support.fast_motion import series
from support.peers import Answer, HttpPeer

SINKS = ("oncall", "hub")


@dataclass
class PastVm:
    """A VM and its agent, from ``begins`` to ``ends`` in Unix seconds."""

    name: str
    plays: Sequence[Play]  # the events of its scale set
    begins: float
    ends: float
    location: str = "westeurope"
    resource_group: str = "fleet"
    deaf_from: float = float("inf")  # when IMDS stops answering
    degraded: bool = False  # whether its store is degraded
    gone: bool = False  # whether it no longer exists, and serves no metrics
    interruption: float = 4.0  # seconds for which each of its events stops it
    tracked: Tracked = field(default_factory=Tracked)
    totals: Totals = field(default_factory=Totals)
    polling: PollFigures = field(default_factory=PollFigures)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    latency: dict[str, Histogram] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        return f"{self.name.lower().replace('_', '-')}:10169"

    def look(self, now: float, step: float) -> Iterator[Family]:
        """Poll for ``step`` seconds, and return the metrics that the agent then serves."""
        if now < self.deaf_from:
            self._poll(now, step)
        else:
            self._count_polls("timeout", round(step))
            self.polling = replace(self.polling, answering=False)
        vm = {
            "name": self.name,
            "location": self.location,
            "resource_group": self.resource_group,
            "scale_set": self.name.rpartition("_")[0],
            "zone": "1",
        }
        figures = Figures(
            "0.1.0",
            "3.11.2",
            "2020-07-01",
            config=ConfigFigures(loaded=self.begins),
            store_degraded=self.degraded,
            vm=vm,
        )
        snapshot = MetricsSnapshot(
            tracked=self.tracked,
            totals=self.totals,
            figures=figures,
            now=datetime.fromtimestamp(now, UTC),
            outbox=OutboxView({("hub", "dead"): 1}, {}, self.counts, self.latency),
            sinks=SINKS,
            polling=self.polling,
        )
        return samples(snapshot)

    def _count_polls(self, result: str, count: int) -> None:
        self.polling.results[result] = self.polling.results.get(result, 0) + count

    def _poll(self, now: float, step: float) -> None:
        """Let IMDS answer each second, and let the last answer list the events of ``now``."""
        items: list[dict[str, Any]] = []
        for play in self.plays:
            if play.begun <= now:
                item = play.item(now)
                if item is not None:
                    items.append(item)
        gap = self.interruption if self.tracked.interrupting else 0.0
        moment = datetime.fromtimestamp(now, UTC)
        observation = Observation(Instant(moment, date=moment), self.name, gap=gap)
        difference = diff(self.tracked, document(*items), observation)

        self.tracked = difference.tracked
        for change in difference.changes:
            self.totals = self.totals.plus(change)
            if change.scope == "self":
                for sink in SINKS:
                    self._deliver(sink)

        # three polls also count in the histogram of durations
        self._count_polls("unchanged", round(step) - 3)
        for seconds in (0.002, 0.004):
            self.polling = self.polling.plus("unchanged", 0.001, seconds)
        result = "changed" if difference.changes else "unchanged"
        self.polling = self.polling.plus(result, 0.001, 0.02)
        self.polling = replace(self.polling, last_success=now, answering=True)

    def _deliver(self, sink: str) -> None:
        """Count a delivery; some fail first and take longer."""
        is_slow = sum(self.counts.values()) % 7 == 0
        results = ["accepted", "delivered"]
        seconds = 0.3  # from the change to the delivery
        if is_slow:
            results.append("failed")
            seconds = 8.0
        for result in results:
            self.counts[sink, result] = self.counts.get((sink, result), 0) + 1
        latency = self.latency.get(sink, Histogram.empty(LATENCY_BOUNDS))
        self.latency[sink] = latency.plus(seconds)


def openmetrics(vms: Iterable[PastVm], step: float) -> bytes:
    """Return the samples of these VMs, from their beginnings to their ends."""
    lines: list[str] = []
    for vm in vms:
        target = {"instance": vm.instance, "job": "notbefore"}
        now = vm.begins
        while now <= vm.ends:
            lines.append(f"{series('up', target)} 1 {now}")
            for family in vm.look(now, step):
                for sample in client_metric(family).samples:
                    name = series(sample.name, {**sample.labels, **target})
                    lines.append(f"{name} {sample.value} {now}")
            now += step
    return "\n".join((*lines, "# EOF\n")).encode()


class Present(HttpPeer):
    """Serves the present metrics of VMs, each under ``/NAME``."""

    def __init__(self, vms: Iterable[PastVm]) -> None:
        super().__init__()
        self._by_path = {f"/{vm.name}": vm for vm in vms}
        self.targets: list[dict[str, Any]] = [
            {
                "targets": [f"127.0.0.1:{self.port}"],
                "labels": {"__metrics_path__": path, "instance": vm.instance},
            }
            for path, vm in self._by_path.items()
        ]

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:  # noqa: ARG002 - it has one answer
        vm = self._by_path[handler.path]
        body, kind = render(vm.look(time.time(), 1.0), handler.headers.get("Accept", ""))
        super().answer(handler, Answer(200, (("Content-Type", kind),), body))
