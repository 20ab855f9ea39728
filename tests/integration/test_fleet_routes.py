"""Which sinks a fleet's notifications go to: by the place that the VMs of an event, or of a wave, have in common."""

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from notbefore.config.load import load
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Item, Partition
from notbefore.fleet.waves import Grouping
from notbefore.store.state import Store
from support.fleet_records import body, report, vm

WEB, DATA = vm("web_0"), vm("data_0", scale_set="data")
ALONE = replace(vm("db", scale_set="", region="northeurope"), resource_group="databases", subscription_id="other")
EACH = Grouping()
SINKS = ("rest", "web", "northern", "databases", "other", "silent")
ROUTES = [
    {"match": {"event_type": "Silent"}, "sinks": ["silent"]},
    {"match": {"scale_set": "WEB"}, "sinks": ["web"], "continue": True},
    {"match": {"location": "North Europe"}, "sinks": ["northern"], "continue": True},
    {"match": {"resource_group": "databases"}, "sinks": ["databases"], "continue": True},
    {"match": {"subscription": "other"}, "sinks": ["other"]},
    {"match": {}, "sinks": ["rest"]},
]


def notified(directory: Path, *records: Record | Heartbeat, grouping: Grouping = EACH, after: float = 60.0) -> set[str]:
    """The sinks that notifications of these records go to."""
    path = directory / "fleet.yml"
    hooks = {name: {"webhook": {"url": f"https://example.org/{name}"}} for name in SINKS}
    hub = {"namespace": "a.servicebus.windows.net", "hub": "changes"}
    path.write_text(yaml.safe_dump({"fleet": {"hub": hub}, "sinks": hooks, "routes": ROUTES}), encoding="utf-8")
    store = Store(directory / "state")
    try:
        outbox = FleetOutbox(store, load(path, {}, {}).routing, lambda _: None, lambda: None)
        fold, now = Partition("0", grouping, 3600.0, outbox.set_aside), time.time()
        made = [
            one
            for number, record in enumerate(records)
            for one in fold.add(Item(body(record), number, str(number), now))
        ]
        made += [*fold.advance(now + 1), *fold.advance(now + after), *fold.advance(now + 2 * after)]
        return {delivery.sink for delivery in outbox.commit(made)}
    finally:
        store.close()


@pytest.mark.parametrize(
    ("who", "sinks"),
    [(WEB, {"web", "rest"}), (DATA, {"rest"}), (ALONE, {"northern", "databases", "other"})],
    ids=["a scale set", "another one", "a VM alone"],
)
def test_an_event_goes_where_its_vms_are(who: Vm, sinks: set[str], tmp_path: Path) -> None:
    assert notified(tmp_path, report(who, "announced")) == sinks


def test_a_wave_goes_by_what_its_vms_have_in_common(tmp_path: Path) -> None:
    both = [report(who, "announced", f"E-{who.name}") for who in (WEB, DATA)]
    together = Grouping(("event_type",), 10.0, 300.0)
    assert notified(tmp_path, *both, grouping=together) == {"rest"}
    assert notified(tmp_path, *both, grouping=replace(together, group_by=("scale_set",))) == {"web", "rest"}


def test_silent_vms_are_a_type_that_routes_match(tmp_path: Path) -> None:
    heartbeat = Heartbeat.of(WEB, (), "1", datetime.now(UTC), 10.0)
    assert notified(tmp_path, heartbeat, after=100.0) == {"silent"}
