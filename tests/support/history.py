"""What agents would have reported of past hours: the simulator's scenarios played through the core,
on a past clock.

The samples are those of ``samples()``, as an agent serves them; the clock, the polls and the
interruptions are made up. Rendered as OpenMetrics with timestamps, for ``promtool tsdb
create-blocks-from openmetrics``. A ``Present`` serves those that have not ended on from there, for
a Prometheus to scrape.
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
    """A VM of the past and its agent, from ``begins`` to ``ends`` in Unix seconds.

    ``group``: its events.
    """

    name: str
    group: Sequence[Play]
    begins: float
    ends: float
    location: str = "westeurope"
    resource_group: str = "fleet"
    deaf_from: float = float("inf")  # IMDS does not answer any more
    degraded: bool = False
    gone: bool = False  # it no longer exists, and serves no metrics
    interruption: float = 4.0  # seconds that each of its events stops it
    tracked: Tracked = field(default_factory=Tracked)
    totals: Totals = field(default_factory=Totals)
    polling: PollFigures = field(default_factory=PollFigures)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    latency: dict[str, Histogram] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        return f"{self.name.lower().replace('_', '-')}:10169"

    def look(self, now: float, step: float) -> Iterator[Family]:
        """Poll once, and tell what /metrics would."""
        if now < self.deaf_from:
            self._poll(now, step)
        else:
            self.polling.results["timeout"] = self.polling.results.get("timeout", 0) + round(step)
            self.polling = replace(self.polling, answering=False)
        place = {
            "name": self.name,
            "location": self.location,
            "resource_group": self.resource_group,
        }
        vm = {**place, "scale_set": self.name.rpartition("_")[0], "zone": "1"}
        config = ConfigFigures(loaded=self.begins)
        figures = Figures(
            "0.1.0", "3.11.2", "2020-07-01", config=config, store_degraded=self.degraded, vm=vm
        )
        outbox = OutboxView({("hub", "dead"): 1}, {}, self.counts, self.latency)
        moment = datetime.fromtimestamp(now, UTC)
        return samples(
            MetricsSnapshot(self.tracked, self.totals, figures, moment, outbox, SINKS, self.polling)
        )

    def _poll(self, now: float, step: float) -> None:
        items = [
            item
            for play in self.group
            if play.begun <= now and (item := play.item(now)) is not None
        ]
        gap = self.interruption if self.tracked.interrupting else 0.0
        moment = datetime.fromtimestamp(now, UTC)
        done = diff(
            self.tracked,
            document(*items),
            Observation(Instant(moment, date=moment), self.name, gap=gap),
        )
        self.tracked = done.tracked
        for change in done.changes:
            self.totals = self.totals.plus(change)
            for sink in SINKS if change.scope == "self" else ():
                self._deliver(sink)
        self.polling.results["unchanged"] = (
            self.polling.results.get("unchanged", 0) + round(step) - 3
        )
        for seconds in (0.002, 0.004):
            self.polling = self.polling.plus("unchanged", 0.001, seconds)
        self.polling = self.polling.plus("changed" if done.changes else "unchanged", 0.001, 0.02)
        self.polling = replace(self.polling, last_success=now, answering=True)

    def _deliver(self, sink: str) -> None:
        number = sum(self.counts.values())
        for result in (
            ("accepted", "delivered") if number % 7 else ("accepted", "failed", "delivered")
        ):
            self.counts[sink, result] = self.counts.get((sink, result), 0) + 1
        known = self.latency.get(sink, Histogram.empty(LATENCY_BOUNDS))
        self.latency[sink] = known.plus(0.3 if number % 7 else 8.0)


def openmetrics(vms: Iterable[PastVm], step: float) -> bytes:
    """The whole past of these VMs."""
    lines: list[str] = []
    for vm in vms:
        now = vm.begins
        target = {"instance": vm.instance, "job": "notbefore"}
        while now <= vm.ends:
            lines.append(f"{series('up', target)} 1 {now}")
            samples = (
                sample for family in vm.look(now, step) for sample in client_metric(family).samples
            )
            lines += [
                f"{series(sample.name, {**sample.labels, **target})} {sample.value} {now}"
                for sample in samples
            ]
            now += step
    return "\n".join((*lines, "# EOF\n")).encode()


class Present(HttpPeer):
    """Serves the metrics of VMs whose past is over, each under ``/NAME``."""

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
