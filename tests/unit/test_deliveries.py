"""Which deliveries a change causes, under which ids, and for how long they are worth sending."""

from typing import Any

import msgspec
import pytest

from notbefore.core.change import Approval, Change
from notbefore.core.delivery import (
    REMINDER_GRACE,
    SETTLING,
    Delivery,
    Targets,
    deliveries,
    delivery_id,
    heartbeat_delivery,
    targets_of,
)
from notbefore.core.duration import Duration
from notbefore.core.record import Vm
from notbefore.core.routing import Match, Route, Routing, Terms
from notbefore.wording.records import record_of
from support.azure import LEFT, ME, PEER, STARTED, at
from support.azure import last_change as change

VM = Vm(name=ME)


def made(one: Change, *routes: Route, vm: str = ME, **terms: Any) -> tuple[Delivery, ...]:
    return deliveries(
        one,
        b"{}",
        Routing(routes, {"chat": Terms(**terms), "hub": Terms(expire_on_end=False)}),
        Vm(name=vm),
    )


def test_without_routes_each_sink_gets_one() -> None:
    chat, hub = made(change({}))
    assert (chat.sink, chat.kind, chat.severity, chat.record) == (
        "chat",
        "announced",
        "info",
        b"{}",
    )
    assert chat.due == chat.created == change({}).time.timestamp()
    assert (chat.expires_with_event, hub.expires_with_event) == (True, False)
    assert chat.expires == chat.created + 86_400


def test_an_id_is_the_same_on_every_vm_and_another_for_each_sink_and_step() -> None:
    both = {"Resources": [ME, PEER]}
    here, there = (made(change(both, vm=vm), vm=vm) for vm in (ME, PEER))
    assert [one.delivery_id for one in here] == [one.delivery_id for one in there]
    started = made(change(both, both | STARTED))
    assert len({one.delivery_id for one in (*here, *started)}) == 4


def test_a_sink_of_states_gets_no_approvals() -> None:
    approved = msgspec.structs.replace(
        change({}), kind="approved", approval=Approval("users", "rule")
    )
    (hub,) = made(approved, approvals=False)
    assert (hub.sink, hub.others) == ("hub", ())
    assert (
        made(approved, Route(sinks=("hub",), fallback=("chat",)), approvals=False)[0].fallback == ()
    )
    assert [one.expires_with_event for one in made(approved)] == [False, False]


@pytest.mark.parametrize(
    ("looks", "expires_with_event"),
    [
        (({},), True),
        (({}, {"Description": "x"}), True),
        (({}, STARTED), False),
        (({}, None), False),
    ],
)
def test_what_leads_up_to_an_event_expires_when_it_ends(
    looks: tuple[dict[str, Any] | None, ...], *, expires_with_event: bool
) -> None:
    assert made(change(*looks))[0].expires_with_event == expires_with_event


@pytest.mark.parametrize("looks", [({"NotBefore": None},), ({}, STARTED), ({}, None), LEFT])
def test_there_is_no_reminder_of_what_has_no_time_ahead(
    looks: tuple[dict[str, Any] | None, ...],
) -> None:
    assert len(made(change(*looks), Route(sinks=("chat",), remind_before=(Duration("5m"),)))) == 1


def test_a_reminder_is_as_severe_as_the_event_is_by_then() -> None:
    far = {"EventType": "Redeploy", "NotBefore": f"{at(86_400):%a, %d %b %Y %H:%M:%S GMT}"}
    route = Route(sinks=("chat",), remind_before=(Duration("4h"), Duration("1h"), Duration("5m")))
    assert [one.severity for one in made(change(far), route)] == [
        "warning",
        "warning",
        "critical",
        "critical",
    ]
    own = msgspec.structs.replace(route, severity="info")
    assert {one.severity for one in made(change(far), own)} == {"info"}


def test_who_tells_of_all_is_reminded_of_what_left_this_vm() -> None:
    route = Route(sinks=("chat",), announce_by="all", remind_before=(Duration("5m"),))
    assert [one.kind for one in made(change(*LEFT), route)] == ["updated", "reminder"]


def test_there_may_be_several_reminders_each_with_its_time() -> None:
    # the notice is 15 min
    times = (
        Duration("5m"),
        Duration("10m"),
        Duration("1h"),
        Duration("600s"),
    )
    chat, *reminders = made(change({}), Route(sinks=("chat",), remind_before=times))
    start = chat.not_before
    found = [(one.kind, start - one.due, one.expires_with_event) for one in reminders]
    assert found == [("reminder", 600, True), ("reminder", 300, True)]
    assert [one.expires for one in reminders] == [reminders[1].due, start + REMINDER_GRACE]
    # or if a sink is renamed
    own = {one.delivery_id: delivery_id(one.change_id, "chat") for one in (chat, *reminders)}
    assert (len(own), [*own]) == (3, [*own.values()])
    assert {
        one.others for one in made(change({}), Route(sinks=("chat", "hub"), remind_before=times))
    } == {
        ("chat",),
        ("hub",),
    }


def test_who_is_still_affected_opens_the_alert_after_the_one_that_left_has_closed_it() -> None:
    both, mine = {"Resources": [ME, PEER]}, {"Resources": [ME]}
    update, chat = made(change(both, mine), Route(sinks=("chat", "hub")), keeps_incidents=True)
    assert (update.due - update.created, chat.due - chat.created) == (SETTLING, 0.0)
    (last,) = made(
        change(both, {"Resources": [PEER]}), Route(sinks=("chat",)), keeps_incidents=True
    )
    (more,) = made(change(mine, both), Route(sinks=("chat",)), keeps_incidents=True)
    assert last.due == last.created
    assert more.due == more.created


def test_what_is_critical_has_a_fallback() -> None:
    route = Route(sinks=("chat",), fallback=("hub", "chat"), fallback_after=Duration("30s"))
    (critical,) = made(change({"EventType": "Reboot"}), route)
    (info,) = made(change({}), route)
    assert (critical.fallback, critical.fallback_at) == (("hub",), critical.created + 30)
    # an end of it follows to whom its beginning was sent
    assert (info.fallback, info.fallback_at) == (
        ("hub",),
        None,
    )


def test_a_sign_of_life_is_worth_nothing_once_the_next_one_is_due() -> None:
    sign = heartbeat_delivery("hub", ME, b"{}", 1000.0, 300.0)
    assert (sign.kind, sign.due, sign.expires, sign.severity) == (
        "heartbeat",
        1000.0,
        1300.0,
        "info",
    )
    assert sign.delivery_id != heartbeat_delivery("hub", ME, b"{}", 1300.0, 300.0).delivery_id


def test_the_targets_of_a_record_are_those_that_the_routes_name_for_its_change() -> None:
    of = change({})
    line = record_of(of, VM).line()
    routes = (
        Route(match=Match(change=("announced",), scope=("self",)), sinks=("ops",)),
        Route(sinks=("rest",)),
    )
    routes = (msgspec.structs.replace(routes[0], fallback=("ops", "rest")), routes[1])
    assert targets_of(line, Routing(routes, {"ops": Terms(), "rest": Terms()}), VM) == Targets(
        ("ops",), ("rest",)
    )
    assert targets_of(line, Routing(routes[1:], {"rest": Terms()}), VM) == Targets(("rest",))
    assert targets_of(b"{}", Routing(routes, {}), VM) == Targets()


def test_a_fallback_that_has_the_change_by_its_own_route_is_not_given_it_twice() -> None:
    routes = (
        Route(sinks=("chat",), fallback=("mail", "pager"), severity="critical", go_on=True),
        Route(sinks=("mail",)),
    )
    made = deliveries(
        change({}),
        b"{}",
        Routing(routes, {name: Terms() for name in ("chat", "mail", "pager")}),
        VM,
    )
    assert {one.sink: one.fallback for one in made} == {"chat": ("pager",), "mail": ()}
