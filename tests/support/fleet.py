"""A fleet for the dashboards: a Prometheus with series of past agents, and with real agents."""

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
from support.peers import Answer, HttpPeer
from support.scraping import Prometheus

LIVE = ("WestNO_0", "WestNO_1")  # VMs whose agents run
STOPPED = "WestNO_2"  # a VM whose agent has stopped
SILENT = "db-c"  # a target that has not answered for hours
NEVER = "db-d"  # a target that has never answered
LOST = "DB-LOST"  # the last event that SILENT reported; its neighbors have seen it start
# another job on the machines of healthy agents: instance -> whether the exporter answers
EXPORTERS = {
    "eastus-0:10169": False,
    "db-a:10169": True,
}
HOUR = 3600.0


def past(now: float, hours: float, step: float) -> list[PastVm]:
    """Return past agents: a scale set of three VMs, and three single VMs in another region.

    In the scale set, one VM is gone, and one no longer reaches IMDS. One single VM is silent.
    """
    begins = now - hours * HOUR
    ends = now - now % step
    begins -= begins % step
    web = ("EastUS_0", "EastUS_1", "EastUS_2")
    in_web = _plays(web, begins, ends - 240, every=15 * 60, step=step)
    long = msgspec.structs.replace(SCENARIOS["user-reboot"], notice=HOUR, started=6 * HOUR)
    lost = Play(scenario=long, event_id=LOST, resources=(SILENT,), begun=begins - HOUR + 5 * step)

    vms = [
        PastVm(web[0], in_web, begins, ends, "eastus", "web"),
        PastVm(web[1], in_web, begins, ends - 900, "eastus", "web", gone=True),
        PastVm(web[2], in_web, begins, ends, "eastus", "web", deaf_from=ends - 600, degraded=True),
    ]
    for name in ("db-a", "db-b"):
        plays = [*_plays((name,), begins, ends - 420, every=35 * 60, step=step), lost]
        vms.append(PastVm(name, plays, begins, ends, "westeurope", "data", interruption=9.0))
    silent_since = begins - HOUR / 2
    vms.append(PastVm(SILENT, [lost], begins - HOUR, silent_since, "westeurope", "data", gone=True))
    return vms


def _plays(
    vms: tuple[str, ...], begins: float, last: float, *, every: float, step: float
) -> list[Play]:
    """Return plays of all scenarios, one each ``every`` seconds, on these VMs in turn."""
    scenarios = sorted(SCENARIOS)
    plays: list[Play] = []
    for number, start in enumerate(range(round(last), round(begins), -round(every))):
        play = Play(
            scenario=SCENARIOS[scenarios[number % len(scenarios)]],
            event_id=f"{vms[0]}-{number}".upper(),
            resources=(vms[number % len(vms)],),
            begun=start - start % step,
            cancel=number % 5 == 3,
        )
        plays.append(play)
    return plays


@contextmanager
def watched_fleet(
    directory: Path, *, hours: float = 2.0, step: float = 60.0
) -> Iterator[Prometheus]:
    """Run real agents and a Prometheus that scrapes them and has the series of past agents.

    Yield it when one real event has ended, two are scheduled and one has started.
    """
    with ExitStack() as stack:
        vms = past(time.time(), hours, step)
        history = openmetrics(vms, step)
        present = stack.enter_context(Present(vm for vm in vms if not vm.gone))
        simulator = stack.enter_context(Simulator((*LIVE, STOPPED)))
        agents = _start_agents(stack, simulator, directory)
        stopped = stack.enter_context(
            RunningAgent(simulator.endpoint_of(STOPPED), directory / STOPPED)
        )
        without_imds = stack.enter_context(
            RunningAgent(f"http://127.0.0.1:{free_port()}", directory / "deaf").without_waiting()
        )
        targets = [f"127.0.0.1:{agent.port}" for agent in (*agents, stopped, without_imds)]
        refusing = [
            {"targets": [f"127.0.0.1:{free_port()}"], "labels": {"instance": f"{vm}:10169"}}
            for vm in (SILENT, NEVER)
        ]
        scraped: list[dict[str, Any]] = [{"targets": targets}, *present.targets, *refusing]
        prometheus = stack.enter_context(Prometheus(directory, scraped, history, EXPORTERS))
        eventually(lambda: prometheus.value('count(up{instance=~"127.+"} == 1)') == len(targets))
        vms_with_name = 'count(notbefore_vm_info{instance=~"127.+"})'
        eventually(lambda: prometheus.value(vms_with_name) == len(targets) - 1)
        stopped.stop()
        _play_events(simulator, agents, prometheus)
        _wait_for_series(prometheus)
        yield prometheus


def _start_agents(stack: ExitStack, simulator: Simulator, directory: Path) -> list[RunningAgent]:
    """Start an agent for each live VM, with a sink that accepts, a sink that fails, and a dry run
    of approval.
    """
    accepting = stack.enter_context(HttpPeer())
    failing = stack.enter_context(HttpPeer())
    failing.default = Answer(503)
    config = {
        "sinks": {
            "oncall": {"webhook": {"url": accepting.url, "allow_private": True}},
            "hub": {"webhook": {"url": failing.url, "allow_private": True}},
        },
        "approval": {
            "enabled": True,
            "rules": [{"name": "users", "match": {"event_source": "User"}}],
        },
    }
    agents: list[RunningAgent] = []
    for vm in LIVE:
        agent = RunningAgent(simulator.endpoint_of(vm), directory / vm, config, "--allow-approval")
        agents.append(stack.enter_context(agent))
    return agents


def _play_events(simulator: Simulator, agents: list[RunningAgent], prometheus: Prometheus) -> None:
    """Play a flawed event, a bad answer, an event with an interruption, and three more events."""
    soon = formatdate(time.time() + 900, usegmt=True)
    simulator.set_document(
        body(item("flawed", Resources=["WestNO_7"], NotBefore=soon, DurationInSeconds="soon"))
    )
    eventually(lambda: prometheus.value("sum(notbefore_event_flaws_total)"))
    simulator.fault("garbage", times=2)

    # step by step: agents on a slow machine would miss steps of a scenario in fast motion
    simulator.set_document(body(item(NotBefore=soon)))
    _wait_for_change(agents, "announced")
    simulator.set_document(body(item(EventStatus="Started", NotBefore="")))
    _wait_for_change(agents, "started")

    polls = agents[0].metric_sum("notbefore_polls_total")
    # the agent measures interruptions from the next poll on
    eventually(lambda: agents[0].metric_sum("notbefore_polls_total") > polls)
    agents[0].process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # this is the interruption
    agents[0].process.send_signal(signal.SIGCONT)
    simulator.set_document(body())
    _wait_for_change(agents, "finished")

    simulator.start("user-reboot")
    simulator.start("hardware-failure")
    simulator.start("memory-preserving-update", resources=LIVE)


def _wait_for_series(prometheus: Prometheus) -> None:
    """Wait until Prometheus has scraped what happened."""
    minimum_of = {
        'count(azure_scheduled_event_status{instance=~"127.+"})': 6.0,
        'sum(increase(notbefore_deliveries_total{instance=~"127.+", result="delivered"}[5m]))': 1.0,
        'sum(increase(notbefore_deliveries_total{instance=~"127.+", result="failed"}[5m]))': 1.0,
        'sum(azure_scheduled_event_measured_interruption_seconds_count{instance=~"127.+"})': 1.0,
        'sum(azure_scheduled_event_approvals_total{result="dry_run"})': 1.0,
        'count(up{instance=~"127.+"} == 0)': 1.0,
        # the interrupted agent may have taken its disk for slow
        'count(notbefore_store_degraded{instance=~"127.+"} == 0)': 3.0,
        'count(up{job="node"})': float(len(EXPORTERS)),
    }
    for expression, minimum in minimum_of.items():
        eventually(lambda: (prometheus.value(expression) or 0.0) >= minimum)


def _wait_for_change(agents: list[RunningAgent], kind: str) -> None:
    """Wait until each agent has reported this change of the event ``ID``."""

    def all_reported() -> bool:
        changes: list[str] = []
        for agent in agents:
            for record in agent.records:
                if record["azure.scheduled_event.id"] == ID:
                    changes.append(record["azure.scheduled_event.change"])
        return changes.count(kind) == len(agents)

    eventually(all_reported)
