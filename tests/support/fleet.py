"""A fleet to look at: agents of the past and real ones, and a Prometheus that knows both."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec

from notbefore.simulator.server import Simulator
from notbefore.simulator.state import SCENARIOS, Play
from support.agent import RunningAgent, eventually, free_port
from support.azure import ID, body, item
from support.history import PastVm, Present, openmetrics
from support.peers import HttpPeer, Say
from support.scraping import Prometheus

LIVE = ("WestNO_0", "WestNO_1")
STOPPED = "WestNO_2"
SILENT = "db-c"  # in the scrape still, and not answering: for hours, and ever
NEVER = "db-d"
LOST = "DB-LOST"  # the event that SILENT was told of last, and that its neighbour sees started
# of another job, beside agents that are well
EXPORTERS = {
    "eastus-0:10169": False,
    "db-a:10169": True,
}
HOUR = 3600.0


def past(now: float, hours: float, step: float) -> list[PastVm]:
    """A scale set of three, one VM of it gone and one deaf.

    Two VMs alone in another region, and one silent by now.
    """
    begins = now - hours * HOUR
    ends = now - now % step
    begins -= begins % step
    names = sorted(SCENARIOS)
    scale_set = ("EastUS_0", "EastUS_1", "EastUS_2")
    alone = ("db-a", "db-b")

    def plays(vms: tuple[str, ...], apart: float, last: float) -> list[Play]:
        starts = range(round(ends - last), round(begins), -round(apart))
        return [
            Play(
                scenario=SCENARIOS[names[number % len(names)]],
                event_id=f"{vms[0]}-{number}".upper(),
                resources=(vms[number % len(vms)],),
                begun=start - start % step,
                cancel=number % 5 == 3,
            )
            for number, start in enumerate(starts)
        ]

    long = msgspec.structs.replace(SCENARIOS["user-reboot"], notice=HOUR, started=6 * HOUR)
    lost = Play(scenario=long, event_id=LOST, resources=(SILENT,), begun=begins - HOUR + 5 * step)
    shared = plays(scale_set, 15 * 60, 240)
    return [
        PastVm(scale_set[0], shared, begins, ends, "eastus", "web"),
        PastVm(scale_set[1], shared, begins, ends - 900, "eastus", "web", gone=True),
        PastVm(
            scale_set[2], shared, begins, ends, "eastus", "web", deaf_from=ends - 600, degraded=True
        ),
        *(
            PastVm(
                name,
                [*plays((name,), 35 * 60, 420), lost],
                begins,
                ends,
                "westeurope",
                "data",
                interruption=9.0,
            )
            for name in alone
        ),
        PastVm(SILENT, [lost], begins - HOUR, begins - HOUR / 2, "westeurope", "data", gone=True),
    ]


@contextmanager
def watched_fleet(
    directory: Path, *, hours: float = 2.0, step: float = 60.0
) -> Iterator[Prometheus]:
    """A Prometheus after some seconds of real events: one is over, two are scheduled, one has
    started.
    """
    with ExitStack() as stack:
        vms = past(time.time(), hours, step)
        history = openmetrics(vms, step)
        present = stack.enter_context(Present(vm for vm in vms if not vm.gone))
        answering, refusing = (stack.enter_context(HttpPeer()) for _ in range(2))
        refusing.default = Say(503)
        sinks = {"oncall": answering.url, "hub": refusing.url}
        hooks = {
            name: {"webhook": {"url": url, "allow_private": True}} for name, url in sinks.items()
        }
        # a rehearsal
        approval = {
            "enabled": True,
            "rules": [{"name": "users", "match": {"event_source": "User"}}],
        }
        simulator = stack.enter_context(Simulator((*LIVE, STOPPED)))
        words = ({"sinks": hooks, "approval": approval}, "--allow-approval")
        agents = [
            stack.enter_context(RunningAgent(simulator.endpoint_of(vm), directory / vm, *words))
            for vm in LIVE
        ]
        stopped = stack.enter_context(
            RunningAgent(simulator.endpoint_of(STOPPED), directory / STOPPED)
        )
        deaf = stack.enter_context(
            RunningAgent(f"http://127.0.0.1:{free_port()}", directory / "deaf").at_once()
        )
        targets = [f"127.0.0.1:{agent.port}" for agent in (*agents, stopped, deaf)]
        refused = [
            {"targets": [f"127.0.0.1:{free_port()}"], "labels": {"instance": f"{vm}:10169"}}
            for vm in (SILENT, NEVER)
        ]
        scraped: list[dict[str, Any]] = [{"targets": targets}, *present.targets, *refused]
        prometheus = stack.enter_context(Prometheus(directory, scraped, history, EXPORTERS))
        eventually(lambda: prometheus.value('count(up{instance=~"127.+"} == 1)') == len(targets))
        eventually(
            lambda: (
                prometheus.value('count(notbefore_vm_info{instance=~"127.+"})') == len(targets) - 1
            ),
            patience=60,
        )
        _play(simulator, agents, stopped, prometheus)
        yield prometheus


def _play(
    simulator: Simulator, agents: list[RunningAgent], stopped: RunningAgent, prometheus: Prometheus
) -> None:
    """Let things happen, and wait until they have been scraped."""
    stopped.stop()
    soon = formatdate(time.time() + 900, usegmt=True)
    simulator.set_document(
        body(item("flawed", Resources=["WestNO_7"], NotBefore=soon, DurationInSeconds="soon"))
    )
    eventually(lambda: prometheus.value("sum(notbefore_event_flaws_total)"))
    simulator.fault("garbage", times=2)
    # step by step, and not in fast motion: however slow the machine is, no step is missed
    simulator.set_document(body(item(NotBefore=soon)))
    _told(agents, "announced")
    simulator.set_document(body(item(EventStatus="Started", NotBefore="")))
    _told(agents, "started")
    polls = agents[0].metric_sum("notbefore_polls_total")
    # it measures from the next one on
    eventually(lambda: agents[0].metric_sum("notbefore_polls_total") > polls)
    agents[0].process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # this is the interruption
    agents[0].process.send_signal(signal.SIGCONT)
    simulator.set_document(body())
    _told(agents, "finished")
    simulator.start("user-reboot")
    simulator.start("hardware-failure")
    simulator.start("memory-preserving-update", resources=LIVE)
    for expr, least in {
        'count(azure_scheduled_event_status{instance=~"127.+"})': 6.0,
        'sum(increase(notbefore_deliveries_total{instance=~"127.+", result="delivered"}[5m]))': 1.0,
        'sum(increase(notbefore_deliveries_total{instance=~"127.+", result="failed"}[5m]))': 1.0,
        'sum(azure_scheduled_event_measured_interruption_seconds_count{instance=~"127.+"})': 1.0,
        'sum(azure_scheduled_event_approvals_total{result="dry_run"})': 1.0,
        'count(up{instance=~"127.+"} == 0)': 1.0,
        # who stood still has found its disk slow
        'count(notbefore_store_degraded{instance=~"127.+"} == 0)': 3.0,
        'count(up{job="node"})': float(len(EXPORTERS)),
    }.items():
        eventually(lambda: (prometheus.value(expr) or 0.0) >= least)


def _told(agents: list[RunningAgent], kind: str) -> None:
    def told() -> bool:
        changes = [
            record["azure.scheduled_event.change"]
            for agent in agents
            for record in agent.records
            if record["azure.scheduled_event.id"] == ID
        ]
        return changes.count(kind) == len(agents)

    eventually(told)
