"""``Delivery``: one change to be sent to one sink; ``deliveries(change, ...)`` makes them. Pure."""

from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import APPROVAL_KINDS, Change, ChangeKind, Outcome, Scope
from notbefore.core.document import Event
from notbefore.core.event_types import Severity
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Record, Vm
from notbefore.core.routing import (
    NEAR,
    AnnounceBy,
    Route,
    Routing,
    Terms,
    route_by_sink,
    severity_at_once,
    severity_of,
)
from notbefore.core.text import sha256

MessageKind = ChangeKind | Literal["reminder", "heartbeat"]
# of no use once the event has ended
EXPIRING_KINDS: Final = frozenset({"announced", "updated", "reminder"})
SETTLING: Final = 5.0  # seconds; ``_settling`` says why
REMINDER_GRACE: Final = 60.0  # seconds after NotBefore during which a late reminder is still sent

DeliveryState = Literal["pending", "dead", "repeating"]
Lane = tuple[str, str]  # a sink and an event key: the deliveries of one lane are sent in order


class Delivery(Struct, frozen=True, omit_defaults=True):
    """One change to be sent to one sink. Times are Unix seconds.

    In an outbox they are on the outbox's clock.
    """

    # the same on every VM for the same step of the same event; the receiver may deduplicate by it
    delivery_id: str
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    created: float  # when the change was seen; for a reminder, when it is due
    due: float  # not to be sent before
    expires: float  # not to be sent after
    record: bytes  # the change as JSON
    change_id: str = ""  # the change's id, of a reminder with its time; empty for heartbeats
    expires_with_event: bool = False  # it expires when the event ends
    not_before: float = 0.0  # of the event, 0 if unknown; the smallest is sent first
    # the sinks that also get it at ``fallback_at``, or once it is dead
    fallback: tuple[str, ...] = ()
    fallback_at: float | None = None  # only for critical changes
    others: tuple[str, ...] = ()  # the other sinks that the change goes to
    note: str = ""  # why it goes to this sink, if not by its route
    once: bool = False  # it may be attempted only once, such as a command
    # set by the outbox
    seq: int = 0  # the order of arrival
    state: DeliveryState = "pending"
    attempts: int = 0  # failed ones
    error: str = ""  # why the last attempt failed
    begun: bool = False  # for ``once``: it may have been given to a courier
    final: bool = False  # its event is over, so it is not repeated
    # set for a courier: what the sink returned for this event's first message
    thread: str | None = None

    @property
    def lane(self) -> Lane:
        """Deliveries with the same lane are sent in order."""
        return self.sink, self.event_key

    @property
    def is_reminder(self) -> bool:
        """Whether it is a reminder: it has its own due time, and is of use only until the event
        starts.
        """
        return self.kind == "reminder"

    @property
    def queued(self) -> bool:
        """Whether later deliveries of its lane wait for it. None waits for a reminder."""
        return self.state == "pending" and not self.is_reminder

    def stays_open(self, ended: Collection[Lane]) -> bool:
        """Whether it would open an alarm that no later message closes, now that its event is over.

        ``ended``: lanes that hold an end.
        """
        if self.expires_with_event:
            return True
        return self.kind == "started" and self.lane not in ended

    def shifted(self, seconds: float) -> "Delivery":
        """Return the same delivery on a clock that is ahead by ``seconds``."""
        not_before = self.not_before
        if not_before:
            not_before += seconds

        fallback_at = self.fallback_at
        if fallback_at is not None:
            fallback_at += seconds

        return replace(
            self,
            created=self.created + seconds,
            due=self.due + seconds,
            expires=self.expires + seconds,
            not_before=not_before,
            fallback_at=fallback_at,
        )


def delivery_id(change_id: str, sink: str) -> str:
    """Return 32 hex digits: the same on every VM for the same step of an event and sink."""
    return sha256(f"{change_id}\n{sink}".encode())[:32]


def deliveries(
    change: Change, record: bytes, routing: Routing, vm: Vm | None
) -> tuple[Delivery, ...]:
    """Return the deliveries of a change. ``record``: the change as JSON, UTF-8.

    ``vm``: this VM, if it is known.
    """
    new: list[Delivery] = []
    routes = _accepting_sinks(change, routing, vm)
    template = _without_sink(change, record)
    created = template.created
    for sink, route in routes.items():
        terms = routing.sinks[sink]
        severity = route.severity or template.severity
        fallback = _fallback(change, route, routes, routing)
        fallback_at = None
        if fallback and severity == "critical":
            fallback_at = created + route.fallback_after.seconds

        message = replace(
            for_sink(template, sink, terms),
            severity=severity,
            due=created + _settling(change, terms),
            expires=created + terms.expire_after,
            fallback=fallback,
            fallback_at=fallback_at,
            others=tuple(sorted(routes.keys() - {sink})),
        )
        new.append(message)
        new += _reminders(change, route, message, announce_by=terms.announce_by(route))
    return tuple(new)


def last_message(change: Change, record: bytes) -> Delivery | None:
    """Return the last message of an event, without a sink; ``None`` if more may follow.

    It is for the sinks that got an earlier message, and to which no route leads now.
    """
    if not is_last(change):
        return None
    return _without_sink(change, record)


def is_last(change: Change) -> bool:
    """Whether this VM has nothing more to report: the event ended, or no longer affects it."""
    return change.kind in OUTCOMES or change.no_longer_affected


def _without_sink(change: Change, record: bytes) -> Delivery:
    created = change.time.timestamp()
    not_before = 0.0
    if change.not_before is not None:
        not_before = change.not_before.timestamp()
    return Delivery(
        delivery_id="",
        event_key=change.event.key,
        sink="",
        kind=change.kind,
        severity=severity_at_once(change),
        created=created,
        due=created,
        expires=created,
        record=record,
        change_id=change.id,
        not_before=not_before,
    )


def for_sink(delivery: Delivery, sink: str, terms: Terms) -> Delivery:
    """Return an untried copy of a delivery for a sink, by its terms.

    It has the same id from every route, and on every VM.
    """
    expires_with_event = delivery.is_reminder
    if terms.expire_on_end and delivery.kind in EXPIRING_KINDS:
        expires_with_event = True
    return replace(
        delivery,
        sink=sink,
        delivery_id=delivery_id(delivery.change_id or delivery.delivery_id, sink),
        expires_with_event=expires_with_event,
        once=terms.once,
        state="pending",
        attempts=0,
        error="",
        begun=False,
    )


class Targets(NamedTuple):
    """The sinks that the routes give for a change, and the ``fallback`` sinks for when one of these
    fails.
    """

    sinks: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()


def targets_of(record: bytes, routing: Routing, vm: Vm | None) -> Targets:
    """Return where the routes send a change, by the values that its ``record`` has."""
    try:
        change = _change_of(Record.read(record))
    except msgspec.MsgspecError:  # a heartbeat
        return Targets()
    routes = _accepting_sinks(change, routing, vm)
    fallback: dict[str, None] = {}
    for route in routes.values():
        fallback.update(dict.fromkeys(_fallback(change, route, routes, routing)))
    return Targets(tuple(routes), tuple(fallback))


def _change_of(record: Record) -> Change:
    """Return the change with the values that a record has of it.

    Its kind and its scope are not checked: a newer version may add values.
    """
    event = Event(
        event_id=record.event_id,
        event_type=record.event_type,
        event_status=record.event_status,
        resource_type=record.resource_type,
        resources=record.resources,
        not_before=record.not_before,
        description=record.description,
        event_source=record.event_source,
        duration=record.expected_duration_seconds,
    )
    return Change(
        id=record.change_id,
        kind=cast("ChangeKind", record.change),
        reason=record.reason,
        time=record.time,
        event=event,
        scope=cast("Scope", record.scope),
        incarnation=record.incarnation,
        first_seen=record.first_seen,
        previous_scope=cast("Scope | None", record.previous_scope),
        outcome=cast("Outcome | None", record.outcome),
        not_before=record.not_before,
        notice_seconds=record.notice_seconds,
        scheduled_seconds=record.scheduled_seconds,
        started_seconds=record.started_seconds,
        over_since=record.over_since,
    )


def _accepting_sinks(change: Change, routing: Routing, vm: Vm | None) -> dict[str, Route]:
    """Return the sinks of a change, each with the route that leads there."""
    routes = route_by_sink(change, routing, vm)
    return {sink: route for sink, route in routes.items() if _accepts(routing.sinks[sink], change)}


def _fallback(
    change: Change, route: Route, routed: Collection[str], routing: Routing
) -> tuple[str, ...]:
    """Return the fallback sinks of a route, without those that have routes of their own."""
    others = [sink for sink in route.fallback if sink not in routed]
    return tuple(sink for sink in others if _accepts(routing.sinks[sink], change))


def _accepts(terms: Terms, change: Change) -> bool:
    return terms.approvals or change.kind not in APPROVAL_KINDS


def _settling(change: Change, terms: Terms) -> float:
    """Return how many seconds to wait after an event stopped affecting another VM.

    That VM closes the incident at the receiver. This one must reopen it, so it sends later.
    """
    if change.kind != "updated" or change.scope != "self" or change.previous is None:
        return 0.0
    no_longer_affected = set(change.previous.vms) - set(change.event.vms)
    if no_longer_affected and terms.keeps_incidents:
        return SETTLING
    return 0.0


def heartbeat_delivery(sink: str, vm: str, record: bytes, now: float, interval: float) -> Delivery:
    """Return a heartbeat of this VM for a sink.

    It expires when the next one is due, after ``interval`` seconds.
    """
    return Delivery(
        delivery_id=delivery_id(f"heartbeat {vm} {now}", sink),
        event_key=f"heartbeat {vm}".casefold(),
        sink=sink,
        kind="heartbeat",
        severity="info",
        created=now,
        due=now,
        expires=now + interval,
        record=record,
    )


def _reminders(
    change: Change, route: Route, message: Delivery, *, announce_by: AnnounceBy
) -> Iterator[Delivery]:
    """Yield the reminders to send before NotBefore."""
    event = change.event
    ahead = change.ahead_seconds
    if change.kind not in ("announced", "updated") or ahead is None:
        return
    if change.no_longer_affected and announce_by != "all":
        return

    start = message.created + ahead  # by the clock of ``created``, however wrong it is
    seconds_before: dict[float, float] = {}  # by the time at which the reminder is due
    for before in route.remind_before:
        due = start - before.seconds
        if due > message.created:  # otherwise the message of the change is enough
            seconds_before[due] = before.seconds
    due_times = sorted(seconds_before)
    expiries = [*due_times[1:], start + REMINDER_GRACE]  # the next reminder replaces it
    severity_near = route.severity or severity_of(event.event_type, None, event.duration)

    for due, expires in zip(due_times, expiries, strict=False):
        identity = f"{change.id} reminder {seconds_before[due]:g}"
        severity = message.severity
        if due >= start - NEAR:
            severity = severity_near
        yield replace(
            message,
            delivery_id=delivery_id(identity, message.sink),
            kind="reminder",
            severity=severity,
            created=due,
            due=due,
            expires=expires,
            change_id=identity,
            expires_with_event=True,
            fallback=(),
            fallback_at=None,
        )
