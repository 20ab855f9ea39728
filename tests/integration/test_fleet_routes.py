"""A fleet routes its notifications by the place that the VMs of an event or a wave share."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from notbefore.config.load import load
from notbefore.core.delivery import Delivery
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.core.routing import Routing
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position
from notbefore.fleet.waves import Grouping
from notbefore.wording.records import heartbeat_of
from support.fleet_log import EACH, grouped
from support.fleet_records import body, report, vm

WEB = vm("web_0")
DATA = vm("data_0", scale_set="data")
ALONE = replace(
    vm("db", scale_set="", region="northeurope"),
    resource_group="databases",
    subscription_id="other",
)
SINKS = ("rest", "web", "northern", "databases", "other", "silent", "payments")
ROUTES = [
    {"match": {"event_type": "Silent"}, "sinks": ["silent"]},
    {"match": {"scale_set": "WEB"}, "sinks": ["web"], "continue": True},
    {"match": {"location": "North Europe"}, "sinks": ["northern"], "continue": True},
    {"match": {"resource_group": "databases"}, "sinks": ["databases"], "continue": True},
    {"match": {"tags": {"TEAM": "payments"}}, "sinks": ["payments"], "continue": True},
    {"match": {"subscription": "other"}, "sinks": ["other"]},
    {"match": {}, "sinks": ["rest"]},
]


def notified(
    directory: Path, *records: Record | Heartbeat, grouping: Grouping = EACH, after: float = 60.0
) -> set[str]:
    """Return the sinks that notifications of these records go to."""
    return {delivery.sink for delivery in deliveries_of(directory, [records], grouping, after)}


def routing_of(directory: Path) -> Routing:
    """Load a configuration with ``ROUTES``."""
    directory.mkdir(exist_ok=True)
    path = directory / "fleet.yml"
    hub = {"namespace": "a.servicebus.windows.net", "hub": "changes"}
    values = {
        "fleet": {"hub": hub},
        "sinks": {name: {"webhook": {"url": f"https://example.org/{name}"}} for name in SINKS},
        "routes": ROUTES,
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load(path, {}, {}).routing


def deliveries_of(
    directory: Path,
    parts: Iterable[Iterable[Record | Heartbeat]],
    grouping: Grouping,
    after: float = 60.0,
) -> list[Delivery]:
    """Return the deliveries that these records cause.

    After each part the hub has no records for two times ``after`` seconds.
    """
    routing = routing_of(directory)
    outbox = FleetOutbox(routing, wake_no_one, time.time)
    fold = Partition("0", replace(grouping, routes=routing.routes))
    now = time.time()
    deliveries: list[Delivery] = []
    for records in parts:
        for record in records:
            number = fold.state.position.sequence + 1
            for notification in fold.add(body(record), Position(str(number), number, now)):
                outbox.commit("0", notification)
        for later in (1, after, 2 * after):
            for notification in fold.advance(now + later):
                outbox.commit("0", notification)
        now += 2 * after
        deliveries += outbox.part("0", fold.event_keys()).rows
        outbox.leave("0")
    return deliveries


def wake_no_one() -> None:
    """Stand for the courier, which these tests do not start."""


PAYMENTS = vm("db_0", "", Team="payments")
SEARCH = vm("db_1", "", Team="search")


@pytest.mark.parametrize(
    ("sender", "sinks"),
    [
        pytest.param(WEB, {"web", "rest"}, id="scale-set"),
        pytest.param(DATA, {"rest"}, id="no-route-of-its-own"),
        pytest.param(ALONE, {"northern", "databases", "other"}, id="place"),
        pytest.param(PAYMENTS, {"payments", "rest"}, id="tag"),
        pytest.param(SEARCH, {"rest"}, id="tag-without-route"),
    ],
)
def test_event_is_routed_by_place_and_tags_of_its_vm(
    sender: Vm, sinks: set[str], tmp_path: Path
) -> None:
    assert notified(tmp_path, report(sender, "announced")) == sinks


def test_tags_of_the_affected_vm_count_when_it_has_sent_a_heartbeat(tmp_path: Path) -> None:
    by_peer = report(SEARCH, "announced", resources=[PAYMENTS.name])
    heartbeat = heartbeat_of(PAYMENTS, (), "1", by_peer.time, 300.0)

    assert notified(tmp_path, heartbeat, by_peer) == {"payments", "rest"}


def test_no_tags_count_when_only_a_peer_has_reported(tmp_path: Path) -> None:
    by_peer = report(SEARCH, "announced", resources=[PAYMENTS.name])

    assert notified(tmp_path, by_peer) == {"rest"}


def test_tags_of_each_affected_vm_count(tmp_path: Path) -> None:
    first = report(PAYMENTS, "announced")
    second = report(SEARCH, "announced", resources=[PAYMENTS.name, SEARCH.name])

    assert notified(tmp_path, first, second) == {"payments", "rest"}


def test_receivers_of_a_wave_get_its_end_when_other_vms_join(
    tmp_path: Path,
) -> None:
    parts = [
        [report(WEB, "announced", "E-web")],
        [report(DATA, "announced", "E-data")],
        [report(WEB, "canceled", "E-web"), report(DATA, "canceled", "E-data")],
    ]
    grouping = grouped(("event_type",), 0.0, 10.0)

    notifications = {
        (delivery.kind, delivery.sink, Record.read(delivery.record).scale_set)
        for delivery in deliveries_of(tmp_path, parts, grouping)
    }

    assert notifications == {
        ("announced", "web", "web"),
        ("announced", "rest", "web"),
        ("announced", "rest", "data"),
        ("canceled", "web", "web"),
        ("canceled", "rest", "web"),
        ("canceled", "rest", "data"),
    }


def test_route_matches_silent_vms_as_an_event_type(tmp_path: Path) -> None:
    heartbeat = heartbeat_of(WEB, (), "1", datetime.now(UTC), 10.0)

    assert notified(tmp_path, heartbeat, after=100.0) == {"silent"}
