"""Every query of the fleet's dashboard, asked of a Prometheus that scrapes an instance."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

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
NUMBERS = {  # what the stories below come to
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


def tell(hub: Hub) -> None:
    """Each scale set has an event of two VMs, that of `web` has started, another one is over.

    Two VMs fall silent. Azure reports an event of a VM without an agent, and one that it cancels
    although it has started.
    """
    now = datetime.now(UTC)
    vms = {
        name: [replace(vm(f"{name}_{n}", scale_set=name), zone="1") for n in range(2)]
        for name in SETS
    }
    names = {name: [vm.name for vm in members] for name, members in vms.items()}
    records: list[Any] = []
    for name, members in vms.items():
        records += [report(vm, "announced", f"E-{name}", resources=names[name]) for vm in members]
        records += [heartbeat_of(vm, (), "1", now, 3600.0) for vm in members]
    records += [report(one, "started", "E-web", resources=names["web"]) for one in vms["web"]]
    records += [report(vms["web"][0], step, "E-over") for step in ("announced", "started")]
    records.append(report(vms["web"][0], "finished", "E-over", interruption=7.0))
    records.append(report(vms["data"][0], "announced", "E-freeze", event_type="Freeze"))
    quiet = [replace(vm(name, scale_set=name), zone="1") for name in ("gone", "lost")]
    records += [heartbeat_of(one, (), "1", now, 1.0) for one in quiet]
    records.append(azure_message("E-azure", "azure_0", "Scheduled"))
    records += [azure_message("E-odd", "azure_1", status) for status in ("Started", "Canceled")]
    send(hub, [*records, b"{"])


def azure_message(event_id: str, vm_name: str, status: str) -> bytes:
    """Return Azure's message about an event of a VM without an agent."""
    scale_set = resource_id(name="azure", event_id=event_id)
    return encoded(
        message(status, event_id, at=datetime.now(UTC), resource=scale_set, Resources=[vm_name])
    )


def shown(
    prometheus: Prometheus, title: str, variables: dict[str, str] = EVERYTHING
) -> float | None:
    (panel,) = (
        panel for panel in BOARD["panels"] if (panel["title"], panel["type"]) == (title, "stat")
    )
    found = series(prometheus, panel["targets"][0], variables)
    return found[0].values[0] if found else None


@pytest.mark.timeout(300)  # the fold looks each 30 s for what is silent
@pytest.mark.long
def test_queries_of_the_fleet_dashboard_show_the_records_of_the_hub(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    needs("prometheus", "promtool")
    # an error that is counted
    config = write_fleet_config(tmp_path, hub, hook.url, inventory_file="missing.txt")
    with RunningFleet(config, tmp_path / "state") as fleet:
        targets = [{"targets": [f"127.0.0.1:{fleet.port}"]}]
        with Prometheus(tmp_path, targets, job=JOB) as prometheus:
            tell(hub)
            becomes(lambda: {title: shown(prometheus, title) for title in NUMBERS}, NUMBERS)

            check(prometheus)
            of_web = NUMBERS | {
                "Events": 1,
                "VMs affected": 2,
                "Started": 1,
                "VMs heard from": 2,
                "Silent VMs": 0,
            }

            becomes(lambda: {title: shown(prometheus, title, WEB) for title in NUMBERS}, of_web)


def check(prometheus: Prometheus) -> None:
    """Each panel, annotation and variable has what it shows."""
    # a scrape that is answered late finds nothing
    becomes(lambda: faults(prometheus, BOARD, EVERYTHING), [])
    for variable in BOARD["templating"]["list"][1:]:
        query, label = (
            variable["query"]["query"]
            .removeprefix("label_values(")
            .removesuffix(")")
            .rsplit(", ", 1)
        )
        assert prometheus.ask(f"label/{label}/values", **{"match[]": resolved(query, EVERYTHING)})
