"""Routes: which change goes where, how severe it is, and which VM notifies."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import deliveries
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.record import Vm
from notbefore.core.routing import DurationRange, Match, Route, Routing, Terms, route
from notbefore.core.tracked import Observation, Tracked
from support.azure import LEFT, ME, PEER, STARTED, at, document, item
from support.azure import last_change as change

SINKS = ("oncall", "hub")


def routing(*routes: Route) -> Routing:
    return Routing(routes, dict.fromkeys(SINKS, Terms()))


def sinks(routes: list[Route], one: Change, vm: str | None = ME) -> list[str]:
    return list(route(one, routing(*routes), Vm(name=vm) if vm else None))


def severity(one: Change, *routes: Route) -> str:
    (only,) = deliveries(one, b"{}", Routing(routes, {"hub": Terms()}), Vm(name=ME))
    return only.severity


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"EventType": "Preempt"}, "critical"),
        ({"EventType": "Reboot"}, "critical"),
        ({"EventType": "Freeze", "DurationInSeconds": 10}, "warning"),
        ({"EventType": "Freeze", "DurationInSeconds": -1}, "warning"),
        ({"EventType": "Freeze", "DurationInSeconds": 9}, "info"),
    ],
)
def test_severity_is_by_type_and_notice(fields: dict[str, Any], expected: str) -> None:
    assert severity(change(fields)) == expected


@pytest.mark.parametrize(
    ("minutes", "expected"), [(59, "critical"), (61, "warning"), (7 * 1440, "warning")]
)
def test_what_takes_a_vm_down_is_critical_once_it_is_near(minutes: int, expected: str) -> None:
    far = {"EventType": "Redeploy", "NotBefore": f"{at(60 * minutes):%a, %d %b %Y %H:%M:%S GMT}"}
    assert severity(change(far)) == expected
    assert severity(change(far, far | STARTED)) == "critical"
    assert severity(change(far), Route(sinks=("hub",), severity="info")) == "info"


@pytest.mark.parametrize("hours", [-5, 5, -24 * 365])
def test_how_near_it_is_imds_clock_says_where_that_of_the_vm_is_wrong(hours: int) -> None:
    instant = Instant(at(0) + timedelta(hours=hours), "boot", 5.0, at(0))
    for minutes, expected in ((15, "critical"), (90, "warning")):
        far = item(EventType="Reboot", NotBefore=f"{at(60 * minutes):%a, %d %b %Y %H:%M:%S GMT}")
        (one,) = diff(Tracked(), document(far), Observation(instant, ME)).changes
        assert severity(one) == expected
        reminded = Routing(
            (Route(sinks=("hub",), remind_before=(Duration("5m"),)),), {"hub": Terms()}
        )
        (now, reminder) = deliveries(one, b"{}", reminded, Vm(name=ME))
        assert reminder.due - now.due == 60 * (minutes - 5)


def test_the_first_route_wins_unless_it_goes_on() -> None:
    first, second = Route(sinks=("oncall",)), Route(sinks=("hub", "oncall"))
    assert sinks([first, second], change({})) == ["oncall"]
    assert sinks([msgspec.structs.replace(first, go_on=True), second], change({})) == [
        "oncall",
        "hub",
    ]


def test_a_sink_gets_a_change_once_by_the_first_route() -> None:
    routes = (Route(sinks=("oncall",), go_on=True, severity="critical"), Route(sinks=("oncall",)))
    assert route(change({}), routing(*routes), Vm(name=ME)) == {"oncall": routes[0]}


@pytest.mark.parametrize(
    ("match", "accepted"),
    [
        (Match(change=("announced", "started")), True),
        (Match(change=("finished",)), False),
        (Match(event_type=("Reboot",)), False),
        (Match(scope=("peer",)), False),
        (Match(duration=DurationRange(min=6)), False),
    ],
)
def test_each_matcher_is_asked(match: Match, *, accepted: bool) -> None:
    assert match.accepts(change({}), None) == accepted


HERE = Vm(
    name=ME,
    vm_id="02aab8a4",
    subscription_id="D1-77",
    resource_group="rg-Web",
    location="westeurope",
    zone="2",
    scale_set="WestNO",
    tags={"Env": "prod", "on-call": ""},
)


@pytest.mark.parametrize(
    ("match", "here"),
    [
        (Match(vm=("westno_0",), scale_set=("WESTNO",), zone=("2",)), True),
        (Match(resource_group=("RG-WEB", "other"), subscription=("d1-77",)), True),
        (Match(location=("West Europe",)), True),
        (Match(location=("northeurope",), vm=("web",)), False),
        (Match(scale_set=("other",), subscription=("d1",)), False),
        (Match(tags={"ENV": ("prod", "test"), "on-call": ()}), True),
        (Match(tags={"env": ("Prod",)}), False),
        (Match(tags={"team": ()}), False),
    ],
)
def test_a_route_asks_who_this_vm_is(match: Match, *, here: bool) -> None:
    assert match.is_here(HERE) is match.accepts(change({}), HERE) is here


@pytest.mark.parametrize("vm", [None, Vm(), Vm(name=ME)])
def test_what_is_not_known_of_this_vm_contradicts_no_route(vm: Vm | None) -> None:
    asked = Match(vm=(ME,), zone=("1",), scale_set=("x",), location=("y",), tags={"env": ("prod",)})
    assert asked.accepts(change({}), vm)
    assert Match(vm=("web_1",)).accepts(change({}), vm) is not (vm == Vm(name=ME))


def test_what_is_unknown_matches_no_bound() -> None:
    unknown = change({"DurationInSeconds": -1, "NotBefore": None, "EventSource": None})
    assert not Match(duration=DurationRange(min=0)).accepts(unknown, None)
    assert not Match(event_source=("Platform",)).accepts(unknown, None)


BOTH = {"Resources": [PEER, ME]}


def notifying(announce_by: Any) -> list[str]:
    routes = (Route(sinks=("hub",), announce_by=announce_by),)
    return [
        vm
        for vm in (PEER, ME, "WestNO_7")
        if route(change(BOTH, vm=vm), routing(*routes), Vm(name=vm))
    ]


def test_each_affected_vm_notifies_for_itself_and_all_is_all() -> None:
    assert notifying("affected") == [PEER, ME]
    assert notifying("all") == [PEER, ME, "WestNO_7"]


def test_who_was_notified_of_an_event_is_notified_when_this_vm_leaves_it() -> None:
    assert sinks([], change(*LEFT)) == ["oncall", "hub"]
    assert sinks([], change(*LEFT, {"Resources": [PEER], **STARTED})) == []
    assert sinks([Route(Match(scope=("peer",)), SINKS, announce_by="all")], change(*LEFT)) == [
        "oncall",
        "hub",
    ]
    assert sinks([], change(*LEFT, vm=PEER), vm=PEER) == ["oncall", "hub"]  # whom it still hits


def test_a_vm_that_does_not_know_its_name_speaks() -> None:
    routes = (Route(sinks=("hub",)),)
    assert route(change({}), routing(*routes), None) == {"hub": routes[0]}


def test_route_of_preempts_has_reminders_within_their_notice() -> None:
    preempts = Match(event_type=("Preempt",))

    reminded = Route(sinks=("hub",), match=preempts, remind_before=(Duration("10s"),))

    assert reminded.remind_before == (Duration("10s"),)
    with pytest.raises(ValueError, match="a Preempt has 30 s of notice"):
        Route(sinks=("hub",), match=preempts, remind_before=(Duration("30s"),))


# ---- event hubs, and events of VMs that are gone

HUB = Terms(every_event=True)
PAGER = Terms(keeps_incidents=True)
PREEMPT = {"EventType": "Preempt", "Resources": [PEER]}


def targets(one: Change, *routes: Route, **terms: Terms) -> list[str]:
    return list(route(one, Routing(routes, terms), Vm(name=ME)))


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (Route(sinks=("hub",)), ["hub"]),
        (Route(sinks=("chat", "hub")), ["hub"]),
        (Route(Match(scope=("peer",)), ("hub",)), ["hub"]),
        (Route(Match(scope=("self",)), ("hub",)), []),
        (Route(sinks=("hub",), announce_by="affected"), []),
    ],
)
def test_hub_gets_events_of_other_vms_unless_its_route_says_otherwise(
    way: Route, expected: list[str]
) -> None:
    peers = change({"Resources": [PEER]})

    assert targets(peers, way, chat=Terms(), hub=HUB) == expected


def test_hub_gets_every_event_without_routes() -> None:
    assert targets(change({"Resources": [PEER]}), chat=Terms(), hub=HUB) == ["hub"]
    assert targets(change({}), chat=Terms(), hub=HUB) == ["hub", "chat"]


def test_hub_keeps_reminders_of_an_event_that_left_this_vm() -> None:
    way = Route(sinks=("chat", "hub"), remind_before=(Duration("5m"),))
    left = change(*LEFT)

    made = deliveries(left, b"{}", Routing((way,), {"chat": Terms(), "hub": HUB}), Vm(name=ME))

    assert [(one.sink, one.kind) for one in made] == [
        ("chat", "updated"),
        ("hub", "updated"),
        ("hub", "reminder"),
    ]


@pytest.mark.parametrize("event_type", ["Preempt", "Terminate"])
@pytest.mark.parametrize("steps", [[STARTED, None], [None]])
def test_neighbor_reports_the_end_of_a_vanished_vm_to_sinks_with_incidents(
    event_type: str, steps: list[dict[str, Any] | None]
) -> None:
    event = {**PREEMPT, "EventType": event_type}
    end = change(event, *(step and event | step for step in steps))

    assert targets(end, chat=Terms(), pager=PAGER) == ["pager"]


@pytest.mark.parametrize(
    "steps",
    [
        [PREEMPT],
        [PREEMPT, PREEMPT | STARTED],
        [PREEMPT | {"EventType": "Reboot"}, None],
    ],
)
def test_neighbor_reports_nothing_else_of_other_vms(steps: list[dict[str, Any] | None]) -> None:
    assert targets(change(*steps), chat=Terms(), pager=PAGER) == []


def test_end_of_a_vanished_vm_goes_where_its_own_events_went() -> None:
    other = Route(Match(vm=(ME,)), ("first",))
    own = Route(Match(vm=(PEER,)), ("second",), severity="warning", fallback=("third",))
    routing = Routing((other, own), dict.fromkeys(("first", "second", "third"), PAGER))

    made = deliveries(change(PREEMPT, None), b"{}", routing, Vm(name=ME))

    assert [one.sink for one in made] == ["second", "third"]
    assert {one.severity for one in made} == {"warning"}
    assert {one.fallback for one in made} == {()}


def test_end_of_a_vanished_vm_is_sent_once_when_all_vms_notify() -> None:
    way = Route(sinks=("chat", "pager"), announce_by="all")

    sent = targets(change(PREEMPT, None), way, chat=Terms(), pager=PAGER)

    assert sent == ["chat", "pager"]


def test_affected_vm_reports_the_end_itself() -> None:
    own = {"EventType": "Preempt", "Resources": [ME]}

    assert targets(change(own, None), chat=Terms(), pager=PAGER) == ["chat", "pager"]
