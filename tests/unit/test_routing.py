"""Routes: which change goes where, how severe it is, and which VM notifies."""

from datetime import timedelta
from typing import Any

import pytest

from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery, deliveries
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.record import Vm
from notbefore.core.routing import DurationRange, Match, Route, Routing, Terms, route_by_sink
from notbefore.core.tracked import Observation, Tracked
from support.azure import LEFT, ME, PEER, STARTED, at, document, item, last_change


def not_before_at(minutes: int) -> str:
    """Return a NotBefore as Azure writes it."""
    return f"{at(60 * minutes):%a, %d %b %Y %H:%M:%S GMT}"


def sinks(routes: list[Route], change: Change, vm: str | None = ME) -> list[str]:
    """Return which of the sinks "oncall" and "hub" get a change from a VM."""
    routing = Routing(tuple(routes), {"oncall": Terms(), "hub": Terms()})
    return list(route_by_sink(change, routing, Vm(name=vm) if vm else None))


def hub_deliveries(change: Change, *routes: Route) -> tuple[Delivery, ...]:
    return deliveries(change, b"{}", Routing(routes, {"hub": Terms()}), Vm(name=ME))


def severity(change: Change, *routes: Route) -> str:
    (delivery,) = hub_deliveries(change, *routes)
    return delivery.severity


# ---- severity


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
def test_severity_follows_type_and_duration(fields: dict[str, Any], expected: str) -> None:
    assert severity(last_change(fields)) == expected


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(59, "critical"), (61, "warning"), (7 * 1440, "warning")],
)
def test_redeploy_is_critical_within_an_hour_of_not_before(minutes: int, expected: str) -> None:
    redeploy = {"EventType": "Redeploy", "NotBefore": not_before_at(minutes)}

    assert severity(last_change(redeploy)) == expected


@pytest.mark.parametrize("minutes", [59, 61, 7 * 1440])
def test_redeploy_is_critical_once_started(minutes: int) -> None:
    redeploy = {"EventType": "Redeploy", "NotBefore": not_before_at(minutes)}

    assert severity(last_change(redeploy, redeploy | STARTED)) == "critical"


@pytest.mark.parametrize("minutes", [59, 61, 7 * 1440])
def test_route_sets_severity(minutes: int) -> None:
    redeploy = {"EventType": "Redeploy", "NotBefore": not_before_at(minutes)}

    assert severity(last_change(redeploy), Route(sinks=("hub",), severity="info")) == "info"


def announced_by_wrong_clock(minutes: int, hours: int) -> Change:
    """Return the announcement of a reboot in some minutes.

    The wall clock of the VM is wrong by some hours; the clock of IMDS is right.
    """
    reboot = item(EventType="Reboot", NotBefore=not_before_at(minutes))
    instant = Instant(at(0) + timedelta(hours=hours), "boot", 5.0, at(0))
    (announced,) = diff(Tracked(), document(reboot), Observation(instant, ME)).changes
    return announced


WRONG_BY_HOURS = pytest.mark.parametrize("hours", [-5, 5, -24 * 365])


@WRONG_BY_HOURS
@pytest.mark.parametrize(("minutes", "expected"), [(15, "critical"), (90, "warning")])
def test_severity_uses_the_clock_of_imds(minutes: int, expected: str, hours: int) -> None:
    announced = announced_by_wrong_clock(minutes, hours)

    assert severity(announced) == expected


@WRONG_BY_HOURS
@pytest.mark.parametrize("minutes", [15, 90])
def test_reminder_uses_the_clock_of_imds(minutes: int, hours: int) -> None:
    announced = announced_by_wrong_clock(minutes, hours)
    reminded = Route(sinks=("hub",), remind_before=(Duration("5m"),))

    immediate, reminder = hub_deliveries(announced, reminded)

    assert reminder.due - immediate.due == 60 * (minutes - 5)


# ---- the route that applies


def test_first_route_wins() -> None:
    first = Route(sinks=("oncall",))
    second = Route(sinks=("hub", "oncall"))

    assert sinks([first, second], last_change({})) == ["oncall"]


def test_next_route_applies_when_first_continues() -> None:
    first = Route(sinks=("oncall",), continues=True)
    second = Route(sinks=("hub", "oncall"))

    assert sinks([first, second], last_change({})) == ["oncall", "hub"]


def test_sink_gets_a_change_once_by_the_first_route() -> None:
    first = Route(sinks=("oncall",), continues=True, severity="critical")
    second = Route(sinks=("oncall",))
    routing = Routing((first, second), {"oncall": Terms(), "hub": Terms()})

    assert route_by_sink(last_change({}), routing, Vm(name=ME)) == {"oncall": first}


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
def test_match_compares_fields_of_the_change(match: Match, *, accepted: bool) -> None:
    assert match.accepts(last_change({}), None) == accepted


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
    ("match", "is_here"),
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
def test_match_compares_properties_of_this_vm(match: Match, *, is_here: bool) -> None:
    assert match.is_here(HERE) is is_here
    assert match.accepts(last_change({}), HERE) is is_here


UNKNOWN_VMS = pytest.mark.parametrize(
    "vm",
    [
        pytest.param(None, id="no VM"),
        pytest.param(Vm(), id="no name"),
        pytest.param(Vm(name=ME), id="name alone"),
    ],
)


@UNKNOWN_VMS
def test_match_accepts_unknown_properties_of_this_vm(vm: Vm | None) -> None:
    match = Match(
        vm=(ME,),
        zone=("1",),
        scale_set=("x",),
        location=("y",),
        tags={"env": ("prod",)},
    )

    assert match.accepts(last_change({}), vm)


def test_match_refuses_another_vm() -> None:
    assert not Match(vm=("web_1",)).accepts(last_change({}), Vm(name=ME))


@pytest.mark.parametrize("vm", [None, Vm()], ids=["no VM", "no name"])
def test_match_accepts_a_vm_without_a_name(vm: Vm | None) -> None:
    assert Match(vm=("web_1",)).accepts(last_change({}), vm)


@pytest.mark.parametrize(
    "match",
    [Match(duration=DurationRange(min=0)), Match(event_source=("Platform",))],
    ids=["duration", "source"],
)
def test_match_refuses_unknown_field_of_the_event(match: Match) -> None:
    unknown = last_change({"DurationInSeconds": -1, "NotBefore": None, "EventSource": None})

    assert not match.accepts(unknown, None)


# ---- the VMs that notify


@pytest.mark.parametrize(
    ("announce_by", "expected"),
    [
        ("affected", [PEER, ME]),
        ("all", [PEER, ME, "WestNO_7"]),
    ],
)
def test_route_is_used_by_affected_or_all_vms(announce_by: Any, expected: list[str]) -> None:
    of_both = {"Resources": [PEER, ME]}
    routes = [Route(sinks=("hub",), announce_by=announce_by)]

    notifying = [
        vm for vm in (PEER, ME, "WestNO_7") if sinks(routes, last_change(of_both, vm=vm), vm=vm)
    ]

    assert notifying == expected


def test_vm_notifies_that_an_event_has_left_it() -> None:
    assert sinks([], last_change(*LEFT)) == ["oncall", "hub"]


def test_vm_notifies_nothing_once_an_event_has_left_it() -> None:
    started = {"Resources": [PEER], **STARTED}

    assert sinks([], last_change(*LEFT, started)) == []


def test_all_vms_notify_that_an_event_has_left_when_route_says_all() -> None:
    to_all = Route(Match(scope=("peer",)), ("oncall", "hub"), announce_by="all")

    assert sinks([to_all], last_change(*LEFT)) == ["oncall", "hub"]


def test_affected_vm_notifies_that_an_event_has_left_another() -> None:
    assert sinks([], last_change(*LEFT, vm=PEER), vm=PEER) == ["oncall", "hub"]


def test_vm_notifies_when_its_name_is_unknown() -> None:
    to_hub = Route(sinks=("hub",))
    routing = Routing((to_hub,), {"oncall": Terms(), "hub": Terms()})

    assert route_by_sink(last_change({}), routing, None) == {"hub": to_hub}


PREEMPTS = Match(event_type=("Preempt",))


def test_route_of_preempts_accepts_reminder_within_their_notice() -> None:
    reminded = Route(sinks=("hub",), match=PREEMPTS, remind_before=(Duration("10s"),))

    assert reminded.remind_before == (Duration("10s"),)


def test_route_of_preempts_refuses_reminder_before_their_notice() -> None:
    with pytest.raises(ValueError, match="a Preempt has 30 s of notice"):
        Route(sinks=("hub",), match=PREEMPTS, remind_before=(Duration("30s"),))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"remind_before": tuple(Duration(f"{minute}m") for minute in range(1, 14))},
            "remind_before: expected 12 or less, got 13",
        ),
        ({"fallback_after": Duration("5m")}, "fallback_after: expected `fallback`"),
    ],
)
def test_route_refuses_settings_without_use(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Route(sinks=("hub",), **settings)


def test_range_of_durations_has_an_end() -> None:
    with pytest.raises(ValueError, match="expected min or max"):
        DurationRange()


def test_range_of_durations_refuses_ends_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match="expected min to be no more than max, got 9 and 5"):
        DurationRange(min=9, max=5)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [(None, False), (4, False), (5, True), (9, True), (10, False)],
)
def test_range_of_durations_includes_its_ends(duration: int | None, *, expected: bool) -> None:
    assert DurationRange(min=5, max=9).holds(duration) is expected


# ---- event hubs, and events of VMs that have vanished

HUB = Terms(every_event=True)
PAGER = Terms(keeps_incidents=True)
PREEMPT = {"EventType": "Preempt", "Resources": [PEER]}


def targets(change: Change, *routes: Route, **terms: Terms) -> list[str]:
    """Return which of the sinks in ``terms`` get a change from this VM."""
    return list(route_by_sink(change, Routing(routes, terms), Vm(name=ME)))


@pytest.mark.parametrize(
    ("hub_route", "expected"),
    [
        (Route(sinks=("hub",)), ["hub"]),
        (Route(sinks=("chat", "hub")), ["hub"]),
        (Route(Match(scope=("peer",)), ("hub",)), ["hub"]),
        (Route(Match(scope=("self",)), ("hub",)), []),
        (Route(sinks=("hub",), announce_by="affected"), []),
    ],
)
def test_hub_gets_events_of_other_vms_unless_its_route_excludes_them(
    hub_route: Route,
    expected: list[str],
) -> None:
    of_peer = last_change({"Resources": [PEER]})

    assert targets(of_peer, hub_route, chat=Terms(), hub=HUB) == expected


@pytest.mark.parametrize(("affected", "expected"), [(PEER, ["hub"]), (ME, ["hub", "chat"])])
def test_hub_gets_every_event_without_routes(affected: str, expected: list[str]) -> None:
    announced = last_change({"Resources": [affected]})

    assert targets(announced, chat=Terms(), hub=HUB) == expected


def test_hub_keeps_reminders_of_an_event_that_left_this_vm() -> None:
    reminded = Route(sinks=("chat", "hub"), remind_before=(Duration("5m"),))
    routing = Routing((reminded,), {"chat": Terms(), "hub": HUB})

    sent = deliveries(last_change(*LEFT), b"{}", routing, Vm(name=ME))

    assert [(delivery.sink, delivery.kind) for delivery in sent] == [
        ("chat", "updated"),
        ("hub", "updated"),
        ("hub", "reminder"),
    ]


@pytest.mark.parametrize("event_type", ["Preempt", "Terminate"])
@pytest.mark.parametrize("last_looks", [[STARTED], []], ids=["started", "scheduled"])
def test_neighbor_sends_end_of_vanished_vm_to_sinks_with_incidents(
    event_type: str, last_looks: list[dict[str, Any]]
) -> None:
    event = {**PREEMPT, "EventType": event_type}
    looks = [event, *[event | fields for fields in last_looks]]
    end = last_change(*looks, None)

    assert targets(end, chat=Terms(), pager=PAGER) == ["pager"]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([PREEMPT], id="announced"),
        pytest.param([PREEMPT, PREEMPT | STARTED], id="started"),
        pytest.param([PREEMPT | {"EventType": "Reboot"}, None], id="end of a reboot"),
    ],
)
def test_neighbor_reports_nothing_else_of_other_vms(looks: list[dict[str, Any] | None]) -> None:
    assert targets(last_change(*looks), chat=Terms(), pager=PAGER) == []


def test_end_of_a_vanished_vm_uses_the_routes_of_that_vm() -> None:
    of_me = Route(Match(vm=(ME,)), ("first",))
    of_peer = Route(Match(vm=(PEER,)), ("second",), severity="warning", fallback=("third",))
    terms = {"first": PAGER, "second": PAGER, "third": PAGER}
    routing = Routing((of_me, of_peer), terms)

    sent = deliveries(last_change(PREEMPT, None), b"{}", routing, Vm(name=ME))

    assert [delivery.sink for delivery in sent] == ["second", "third"]
    assert {delivery.severity for delivery in sent} == {"warning"}
    assert {delivery.fallback for delivery in sent} == {()}


def test_end_of_a_vanished_vm_needs_a_route_that_matches_the_end() -> None:
    of_starts = Route(Match(change=("announced", "started")), ("pager",))

    assert targets(last_change(PREEMPT, None), of_starts, pager=PAGER) == []


def test_end_of_a_vanished_vm_is_sent_once_when_all_vms_notify() -> None:
    to_all = Route(sinks=("chat", "pager"), announce_by="all")

    sent = targets(last_change(PREEMPT, None), to_all, chat=Terms(), pager=PAGER)

    assert sent == ["chat", "pager"]


def test_affected_vm_reports_the_end_itself() -> None:
    preempt = {"EventType": "Preempt", "Resources": [ME]}

    assert targets(last_change(preempt, None), chat=Terms(), pager=PAGER) == ["chat", "pager"]
