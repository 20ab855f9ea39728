"""A Prometheus that scrapes an instance answers every query of the fleet's dashboard."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.record import Vm
from notbefore.wording.records import heartbeat_of
from support.agent import becomes
from support.event_grid import encoded, message, resource_id
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.needs import needs
from support.panels import faults, resolved, series
from support.peers import HttpPeer
from support.scraping import Prometheus

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "dashboards" / "event-hub.json").read_bytes()
)
JOB = "notbefore-fleet"
EVERYTHING = {"job": ".*", "region": ".*", "scale_set": ".*"}
WEB = {**EVERYTHING, "scale_set": "web"}
SETS = ("web", "data", "batch", "cache", "queue", "front")
NUMBERS = {  # of the events that `send_events` sends
    "Events": 8,
    "VMs affected": 14,
    "Started": 1,
    "VMs heard from": 14,
    "Silent VMs": 2,
    "Events in two partitions": 0,
    "Events not reported": 0,
    "VMs without an agent": 2,
    "Contradictions": 1,
    "Unused records": 1,
}
NUMBERS_OF_WEB = NUMBERS | {
    "Events": 1,
    "VMs affected": 2,
    "Started": 1,
    "VMs heard from": 2,
    "Silent VMs": 0,
}


def azure_message(event_id: str, vm_name: str, status: str) -> bytes:
    """Return Azure's message about an event of a VM without an agent."""
    resource = resource_id(name="azure", event_id=event_id)
    at = datetime.now(UTC)
    return encoded(message(status, event_id, at=at, resource=resource, Resources=[vm_name]))


def vm_of(scale_set: str, name: str) -> Vm:
    return replace(vm(name, scale_set=scale_set), zone="1")


def send_events(hub: Hub) -> None:
    """Send an event of two VMs for each scale set, two single events, and a wrong message.

    The event of `web` has started, and a single event has ended. Two VMs are silent. Azure reports
    an event of a VM without an agent, and cancels another one that has started.
    """
    now = datetime.now(UTC)
    records: list[Any] = []
    for scale_set in SETS:
        members = [vm_of(scale_set, f"{scale_set}_{number}") for number in range(2)]
        names = [member.name for member in members]
        for member in members:
            records.append(report(member, "announced", f"E-{scale_set}", resources=names))
            records.append(heartbeat_of(member, (), "1", now, 3600.0))
            if scale_set == "web":
                records.append(report(member, "started", "E-web", resources=names))

    web = vm_of("web", "web_0")
    records.append(report(web, "announced", "E-over"))
    records.append(report(web, "started", "E-over"))
    records.append(report(web, "finished", "E-over", interruption=7.0))
    data = vm_of("data", "data_0")
    records.append(report(data, "announced", "E-freeze", event_type="Freeze"))

    for name in ("gone", "lost"):
        records.append(heartbeat_of(vm_of(name, name), (), "1", now, 1.0))
    records.append(azure_message("E-azure", "azure_0", "Scheduled"))
    records.append(azure_message("E-odd", "azure_1", "Started"))
    records.append(azure_message("E-odd", "azure_1", "Canceled"))
    send(hub, [*records, b"{"])


def value_of(prometheus: Prometheus, title: str, variables: dict[str, str]) -> float | None:
    """Return the single number that a panel shows; ``None`` without one."""
    (panel,) = (
        panel for panel in BOARD["panels"] if panel["title"] == title and panel["type"] == "stat"
    )
    rows = series(prometheus, panel["targets"][0], variables)
    if not rows:
        return None
    value: float = rows[0].values[0]
    return value


def shows(prometheus: Prometheus, numbers: dict[str, int], variables: dict[str, str]) -> None:
    """Wait until the panels show these numbers."""
    becomes(lambda: {title: value_of(prometheus, title, variables) for title in numbers}, numbers)


@pytest.fixture
def prometheus(hub: Hub, hook: HttpPeer, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes an instance; a missing file of the inventory is a counted error."""
    needs("prometheus", "promtool")
    config = write_fleet_config(tmp_path, hub, hook.url, inventory_file="missing.txt")
    with RunningFleet(config, tmp_path / "state") as fleet:
        targets = [{"targets": [f"127.0.0.1:{fleet.port}"]}]
        with Prometheus(tmp_path, targets, job=JOB) as running:
            yield running


@pytest.mark.timeout(300)  # the instance looks for silent VMs each 30 s
@pytest.mark.long
def test_queries_of_the_fleet_dashboard_show_the_records_of_a_hub(
    hub: Hub, prometheus: Prometheus
) -> None:
    send_events(hub)

    shows(prometheus, NUMBERS, EVERYTHING)
    shows(prometheus, NUMBERS_OF_WEB, WEB)
    becomes(lambda: faults(prometheus, BOARD, EVERYTHING), [])
    for variable in BOARD["templating"]["list"][1:]:
        assert values_of(prometheus, variable)


def values_of(prometheus: Prometheus, variable: dict[str, Any]) -> list[str]:
    """Return the values of a variable of the dashboard."""
    query = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
    selector, label = query.rsplit(", ", 1)
    words = {"match[]": resolved(selector, EVERYTHING)}
    values: list[str] = prometheus.ask(f"label/{label}/values", **words)
    return values
