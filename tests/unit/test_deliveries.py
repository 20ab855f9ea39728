"""The deliveries of a change: their sinks, ids, severities, reminders, fallbacks and expiry."""

from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.change import Approval, Change
from notbefore.core.delivery import (
    REMINDER_GRACE,
    SETTLING,
    Delivery,
    Lane,
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
from support.azure import LEFT, ME, PEER, STARTED, at, last_change
from support.box import delivery

VM = Vm(name=ME)
OF_BOTH = {"Resources": [ME, PEER]}
OF_ME = {"Resources": [ME]}
OF_PEER = {"Resources": [PEER]}
TO_CHAT = Route(sinks=("chat",))


def deliveries_of(
    change: Change,
    *routes: Route,
    vm: str = ME,
    **terms: Any,
) -> tuple[Delivery, ...]:
    """Return the deliveries to the sinks "chat", with these terms, and "hub"."""
    sinks = {"chat": Terms(**terms), "hub": Terms(expire_on_end=False)}
    return deliveries(change, b"{}", Routing(routes, sinks), Vm(name=vm))


def ids(deliveries: tuple[Delivery, ...]) -> list[str]:
    return [delivery.delivery_id for delivery in deliveries]


def severities(deliveries: tuple[Delivery, ...]) -> list[str]:
    return [delivery.severity for delivery in deliveries]


# ---- one change


def test_each_sink_gets_a_delivery_without_routes() -> None:
    announced = last_change({})

    chat, hub = deliveries_of(announced)

    assert chat.sink == "chat"
    assert hub.sink == "hub"
    assert chat.kind == "announced"
    assert chat.severity == "info"
    assert chat.record == b"{}"


def test_delivery_is_due_at_once_and_expires_in_a_day() -> None:
    announced = last_change({})

    chat, _ = deliveries_of(announced)

    assert chat.created == announced.time.timestamp()
    assert chat.due == chat.created
    assert chat.expires == chat.created + 86_400


def test_delivery_expires_with_its_event_when_its_sink_says_so() -> None:
    chat, hub = deliveries_of(last_change({}))

    assert chat.expires_with_event
    assert not hub.expires_with_event


@pytest.mark.parametrize(
    ("looks", "expires_with_event"),
    [
        pytest.param(({},), True, id="announced"),
        pytest.param(({}, {"Description": "x"}), True, id="updated"),
        pytest.param(({}, STARTED), False, id="started"),
        pytest.param(({}, None), False, id="canceled"),
    ],
)
def test_delivery_expires_with_its_event_before_the_start(
    looks: tuple[dict[str, Any] | None, ...],
    *,
    expires_with_event: bool,
) -> None:
    chat, _ = deliveries_of(last_change(*looks))

    assert chat.expires_with_event == expires_with_event


def test_delivery_id_is_the_same_on_every_vm() -> None:
    of_this_vm = deliveries_of(last_change(OF_BOTH, vm=ME), vm=ME)
    of_peer = deliveries_of(last_change(OF_BOTH, vm=PEER), vm=PEER)

    assert ids(of_this_vm) == ids(of_peer)


def test_delivery_id_differs_by_sink_and_step() -> None:
    announced = deliveries_of(last_change(OF_BOTH))
    started = deliveries_of(last_change(OF_BOTH, OF_BOTH | STARTED))

    assert len({*ids(announced), *ids(started)}) == 4


# ---- approvals

APPROVED = replace(last_change({}), kind="approved", approval=Approval("users", "rule"))


def test_sink_without_approvals_gets_none() -> None:
    (hub,) = deliveries_of(APPROVED, approvals=False)

    assert hub.sink == "hub"
    assert hub.others == ()


def test_sink_without_approvals_is_no_fallback_of_them() -> None:
    to_hub = Route(sinks=("hub",), fallback=("chat",))

    (hub,) = deliveries_of(APPROVED, to_hub, approvals=False)

    assert hub.fallback == ()


def test_approval_does_not_expire_with_its_event() -> None:
    sent = deliveries_of(APPROVED)

    assert [delivery.expires_with_event for delivery in sent] == [False, False]


# ---- reminders


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(({"NotBefore": None},), id="no NotBefore"),
        pytest.param(({}, STARTED), id="started"),
        pytest.param(({}, None), id="canceled"),
        pytest.param(LEFT, id="this VM is no longer affected"),
    ],
)
def test_change_has_no_reminder_when_vm_has_no_coming_start(
    looks: tuple[dict[str, Any] | None, ...],
) -> None:
    reminded = replace(TO_CHAT, remind_before=(Duration("5m"),))

    assert len(deliveries_of(last_change(*looks), reminded)) == 1


def test_event_of_another_vm_has_a_reminder_when_route_says_all() -> None:
    to_all = replace(TO_CHAT, announce_by="all", remind_before=(Duration("5m"),))

    sent = deliveries_of(last_change(*LEFT), to_all)

    assert [delivery.kind for delivery in sent] == ["updated", "reminder"]


FAR_REDEPLOY = {
    "EventType": "Redeploy",
    "NotBefore": f"{at(86_400):%a, %d %b %Y %H:%M:%S GMT}",
}
THREE_REMINDERS = (Duration("4h"), Duration("1h"), Duration("5m"))


def test_reminder_is_as_severe_as_the_event_when_it_is_due() -> None:
    reminded = replace(TO_CHAT, remind_before=THREE_REMINDERS)

    sent = deliveries_of(last_change(FAR_REDEPLOY), reminded)

    assert severities(sent) == ["warning", "warning", "critical", "critical"]


def test_reminder_has_the_severity_of_its_route() -> None:
    reminded = replace(TO_CHAT, remind_before=THREE_REMINDERS, severity="info")

    sent = deliveries_of(last_change(FAR_REDEPLOY), reminded)

    assert severities(sent) == ["info"] * 4


# the notice is 15 min: an hour before is too early, and 600 s is 10 min again
REMIND_BEFORE = (Duration("5m"), Duration("10m"), Duration("1h"), Duration("600s"))


def test_reminders_are_due_before_not_before() -> None:
    reminded = replace(TO_CHAT, remind_before=REMIND_BEFORE)

    chat, first, second = deliveries_of(last_change({}), reminded)

    start = chat.not_before
    assert first.kind == "reminder"
    assert second.kind == "reminder"
    assert start - first.due == 600
    assert start - second.due == 300


def test_reminder_expires_when_the_next_is_due() -> None:
    reminded = replace(TO_CHAT, remind_before=REMIND_BEFORE)

    chat, first, second = deliveries_of(last_change({}), reminded)

    assert first.expires == second.due
    assert second.expires == chat.not_before + REMINDER_GRACE
    assert first.expires_with_event
    assert second.expires_with_event


def test_reminders_have_unique_ids() -> None:
    reminded = replace(TO_CHAT, remind_before=REMIND_BEFORE)

    sent = deliveries_of(last_change({}), reminded)

    # an id can be computed again, when a sink is renamed
    computed = [delivery_id(delivery.change_id, "chat") for delivery in sent]
    assert ids(sent) == computed
    assert len(set(computed)) == 3


def test_reminders_name_the_other_sinks() -> None:
    reminded = Route(sinks=("chat", "hub"), remind_before=REMIND_BEFORE)

    sent = deliveries_of(last_change({}), reminded)

    assert {delivery.others for delivery in sent} == {("chat",), ("hub",)}


# ---- incidents


def test_affected_vm_reopens_incident_after_another_has_closed_it() -> None:
    to_both = Route(sinks=("chat", "hub"))

    update, chat = deliveries_of(last_change(OF_BOTH, OF_ME), to_both, keeps_incidents=True)

    assert update.due - update.created == SETTLING
    assert chat.due - chat.created == 0.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(OF_BOTH, OF_PEER, id="this VM leaves"),
        pytest.param(OF_ME, OF_BOTH, id="another VM joins"),
    ],
)
def test_incident_is_updated_at_once_when_no_other_vm_closes_it(
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    (update,) = deliveries_of(last_change(before, after), TO_CHAT, keeps_incidents=True)

    assert update.due == update.created


# ---- fallbacks

WITH_FALLBACK = Route(
    sinks=("chat",),
    fallback=("hub", "chat"),
    fallback_after=Duration("30s"),
)


def test_critical_delivery_has_a_fallback_after_some_time() -> None:
    (critical,) = deliveries_of(last_change({"EventType": "Reboot"}), WITH_FALLBACK)

    assert critical.fallback == ("hub",)
    assert critical.fallback_at == critical.created + 30


def test_delivery_that_is_not_critical_has_no_fallback_time() -> None:
    (info,) = deliveries_of(last_change({}), WITH_FALLBACK)

    assert info.fallback == ("hub",)  # it gets the end, if it got the beginning
    assert info.fallback_at is None


def test_fallback_is_dropped_when_a_route_sends_it_the_change() -> None:
    routes = (
        Route(sinks=("chat",), fallback=("mail", "pager"), severity="critical", continues=True),
        Route(sinks=("mail",)),
    )
    sinks = {"chat": Terms(), "mail": Terms(), "pager": Terms()}

    sent = deliveries(last_change({}), b"{}", Routing(routes, sinks), VM)

    fallbacks = {delivery.sink: delivery.fallback for delivery in sent}
    assert fallbacks == {"chat": ("pager",), "mail": ()}


# ---- heartbeats


def test_heartbeat_expires_when_the_next_is_due() -> None:
    heartbeat = heartbeat_delivery("hub", ME, b"{}", 1000.0, 300.0)

    assert heartbeat.kind == "heartbeat"
    assert heartbeat.severity == "info"
    assert heartbeat.due == 1000.0
    assert heartbeat.expires == 1300.0


def test_heartbeats_have_unique_ids() -> None:
    heartbeat = heartbeat_delivery("hub", ME, b"{}", 1000.0, 300.0)
    following = heartbeat_delivery("hub", ME, b"{}", 1300.0, 300.0)

    assert heartbeat.delivery_id != following.delivery_id


# ---- the targets of a record

TO_OPS = Route(
    match=Match(change=("announced",), scope=("self",)),
    sinks=("ops",),
    fallback=("ops", "rest"),
)
TO_REST = Route(sinks=("rest",))


def test_record_has_the_targets_of_its_change() -> None:
    line = record_of(last_change({}), VM).line()
    routing = Routing((TO_OPS, TO_REST), {"ops": Terms(), "rest": Terms()})

    assert targets_of(line, routing, VM) == Targets(("ops",), ("rest",))


def test_record_has_the_targets_of_the_next_matching_route() -> None:
    line = record_of(last_change({}), VM).line()

    assert targets_of(line, Routing((TO_REST,), {"rest": Terms()}), VM) == Targets(("rest",))


def test_unreadable_record_has_no_targets() -> None:
    assert targets_of(b"{}", Routing((TO_OPS, TO_REST), {}), VM) == Targets()


# ---- deliveries that stay open


@pytest.mark.parametrize(
    ("kind", "expires_with_event", "ended", "stays_open"),
    [
        ("announced", True, set(), True),
        ("announced", False, set(), False),
        ("started", False, set(), True),
        ("started", False, {("chat", "e")}, False),
    ],
)
def test_delivery_stays_open_when_no_later_message_closes_it(
    kind: Any, ended: set[Lane], *, expires_with_event: bool, stays_open: bool
) -> None:
    row = delivery(kind=kind, expires_with_event=expires_with_event)

    assert row.stays_open(ended) is stays_open
