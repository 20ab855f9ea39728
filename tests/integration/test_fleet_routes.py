"""Which sinks a fleet's notifications go to: by the place that the VMs of an event, or of a wave,
have in common.
"""

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
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position
from notbefore.fleet.waves import Grouping, Notification
from notbefore.wording.records import heartbeat_of
from support.fleet_log import EACH, grouped
from support.fleet_records import body, report, vm

WEB, DATA = vm("web_0"), vm("data_0", scale_set="data")
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
    """The sinks that notifications of these records go to."""
    return {one.sink for one in deliveries_of(directory, [records], grouping, after)}


def deliveries_of(
    directory: Path,
    parts: Iterable[Iterable[Record | Heartbeat]],
    grouping: Grouping,
    after: float = 60.0,
) -> list[Delivery]:
    """The deliveries that these records cause.

    Between two parts the hub has none for two times ``after`` seconds.
    """
    directory.mkdir(exist_ok=True)
    path = directory / "fleet.yml"
    hooks = {name: {"webhook": {"url": f"https://example.org/{name}"}} for name in SINKS}
    hub = {"namespace": "a.servicebus.windows.net", "hub": "changes"}
    path.write_text(
        yaml.safe_dump({"fleet": {"hub": hub}, "sinks": hooks, "routes": ROUTES}), encoding="utf-8"
    )
    routing = load(path, {}, {}).routing
    outbox = FleetOutbox(routing, lambda: None, time.time)
    fold, now = Partition("0", replace(grouping, routes=routing.routes)), time.time()
    found: list[Delivery] = []
    for records in parts:
        made: list[Notification] = []
        for record in records:
            number = fold.state.position.sequence + 1
            made += fold.add(body(record), Position(str(number), number, now))
        for later in (1, after, 2 * after):
            made += fold.advance(now + later)
        now += 2 * after
        for one in made:
            outbox.commit("0", one)
        found += outbox.part("0", fold.event_keys()).rows
        outbox.leave("0")
    return found


PAYMENTS, SEARCH = (
    vm(f"db_{number}", "", Team=team) for number, team in enumerate(("payments", "search"))
)


@pytest.mark.parametrize(
    ("who", "sinks"),
    [
        (WEB, {"web", "rest"}),
        (DATA, {"rest"}),
        (ALONE, {"northern", "databases", "other"}),
        (PAYMENTS, {"payments", "rest"}),
        (SEARCH, {"rest"}),
    ],
)
def test_an_event_goes_where_its_vms_are_or_where_their_tags_say(
    who: Vm, sinks: set[str], tmp_path: Path
) -> None:
    assert notified(tmp_path, report(who, "announced")) == sinks


def test_the_tags_of_the_affected_vms_count_whoever_reports_first(tmp_path: Path) -> None:
    first = report(SEARCH, "announced", resources=[PAYMENTS.name])
    assert notified(
        tmp_path / "one", heartbeat_of(PAYMENTS, (), "1", first.time, 300.0), first
    ) == {"payments", "rest"}
    # nothing was heard from the one that it affects
    assert notified(tmp_path / "two", first) == {"rest"}
    both = report(SEARCH, "announced", resources=[PAYMENTS.name, SEARCH.name])
    assert notified(tmp_path / "three", report(PAYMENTS, "announced"), both) == {"payments", "rest"}


def test_who_was_notified_of_a_wave_is_notified_of_its_end_whatever_joins_it(
    tmp_path: Path,
) -> None:
    both = [report(who, "announced", f"E-{who.name}") for who in (WEB, DATA)]
    over = [report(who, "canceled", f"E-{who.name}") for who in (WEB, DATA)]
    grouping = grouped(("event_type",), 0.0, 10.0)
    made = deliveries_of(tmp_path, [both[:1], both[1:], over], grouping)
    found = {(one.kind, one.sink, Record.read(one.record).scale_set) for one in made}
    kinds = ("announced", "canceled")
    assert found == {
        (kind, *to) for kind in kinds for to in (("web", "web"), ("rest", "web"), ("rest", "data"))
    }


def test_silent_vms_are_a_type_that_routes_match(tmp_path: Path) -> None:
    heartbeat = heartbeat_of(WEB, (), "1", datetime.now(UTC), 10.0)
    assert notified(tmp_path, heartbeat, after=100.0) == {"silent"}
