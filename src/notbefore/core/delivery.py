"""``Delivery``: one change that is to go to one sink; ``deliveries(change, ...)`` makes them. Pure."""

from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import APPROVAL_KINDS, Change, ChangeKind
from notbefore.core.document import Event
from notbefore.core.record import Record, Vm, view
from notbefore.core.routing import NEAR, Route, Severity, route, severity_at_once, severity_of
from notbefore.core.text import sha256

MessageKind = ChangeKind | Literal["reminder", "heartbeat"]
EXPIRING_KINDS: Final = frozenset({"announced", "updated", "reminder"})  # they are of no use once the event has ended
SETTLING: Final = 5.0  # seconds
REMINDER_GRACE: Final = 60.0  # seconds after NotBefore for which a reminder that is late is still sent
A_DAY: Final = 86_400.0  # seconds

DeliveryState = Literal["pending", "dead", "repeating"]
Lane = tuple[str, str]  # a sink and the key of an event: what is in it goes in order


class Delivery(Struct, frozen=True, omit_defaults=True):
    """One change that is to go to one sink. Times are Unix seconds; in an outbox they are on its clock."""

    delivery_id: str  # the same on every VM for the same step of the same event; the receiver may deduplicate by it
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    created: float  # when the change was seen; of a reminder, when it is worth sending
    due: float  # not to be sent before
    expires: float  # not to be sent after
    record: bytes  # the change as JSON
    change_id: str = ""  # of the change itself, where it is one
    expires_with_event: bool = False  # it expires when the event ends
    not_before: float = 0.0  # of the event, in Unix seconds; 0 where it is not known: the smallest is sent first
    fallback: tuple[str, ...] = ()  # sinks that it goes to from ``fallback_at`` on, or once it is dead
    fallback_at: float | None = None  # of what is critical; an event's end goes to those that were given its beginning
    others: tuple[str, ...] = ()  # the other sinks that the change goes to
    note: str = ""  # why it goes to this sink, where that is not by its route
    once: bool = False  # it may run once, such as a command
    # what the outbox knows of it
    seq: int = 0  # the order in which they came
    state: DeliveryState = "pending"
    attempts: int = 0  # that have failed
    error: str = ""  # why the last attempt failed
    begun: bool = False  # it runs once, and may have been given to a courier
    final: bool = False  # its event is over: it is not repeated
    thread: str | None = None  # where a courier is given it: what the sink said of the first message of this event

    @property
    def lane(self) -> Lane:
        """In which order it goes."""
        return self.sink, self.event_key

    @property
    def is_reminder(self) -> bool:
        """It has a time of its own, and is of use only until the event starts."""
        return self.kind == "reminder"

    @property
    def queued(self) -> bool:
        """Later ones of its lane wait for it. Nothing waits for a reminder."""
        return self.state == "pending" and not self.is_reminder

    def shifted(self, seconds: float) -> "Delivery":
        """The same on a clock that is ahead by ``seconds``."""
        return replace(
            self,
            created=self.created + seconds,
            due=self.due + seconds,
            expires=self.expires + seconds,
            fallback_at=None if self.fallback_at is None else self.fallback_at + seconds,
        )


class Terms(Struct, frozen=True):
    """How long a sink's deliveries are worth sending."""

    expire_after: float = A_DAY
    expire_on_end: bool = True
    approvals: bool = True  # it is notified of approvals as well
    once: bool = False  # what it is sent may run once


class Routing(Struct, frozen=True):
    """The routes, and the sinks that they may name."""

    routes: tuple[Route, ...] = ()
    sinks: dict[str, Terms] = {}


def delivery_id(change_id: str, sink: str, kind: str = "") -> str:
    """32 hex digits, the same for the same step of an event and the same sink, on every VM."""
    return sha256("\n".join(filter(None, (change_id, sink, kind))).encode())[:32]


def deliveries(change: Change, record: bytes, routing: Routing, vm: Vm | None) -> tuple[Delivery, ...]:
    """The deliveries of a change. ``record``: the change as JSON, UTF-8; ``vm``: this VM, as far as it is known."""
    found: list[Delivery] = []
    targets = _targets(change, routing, vm)
    created, not_before = change.time.timestamp(), change.not_before.timestamp() if change.not_before else 0.0
    for sink, way in targets.items():
        terms, severity = routing.sinks[sink], way.severity or severity_at_once(change)
        fallback = _fallback(change, way, targets, routing)
        message = Delivery(
            delivery_id=delivery_id(change.id, sink),
            event_key=change.event.key,
            sink=sink,
            kind=change.kind,
            severity=severity,
            created=created,
            due=created + _settling(change, terms),
            expires=created + terms.expire_after,
            record=record,
            change_id=change.id,
            expires_with_event=terms.expire_on_end and change.kind in EXPIRING_KINDS,
            not_before=not_before,
            fallback=fallback,
            fallback_at=created + way.fallback_after.seconds if fallback and severity == "critical" else None,
            others=tuple(sorted(targets.keys() - {sink})),
            once=terms.once,
        )
        found += (message, *_reminders(change, way, message))
    return tuple(found)


class Targets(NamedTuple):
    """Where a change goes by the routes: to these sinks, and to those of ``fallback`` where one of them fails."""

    sinks: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()


def targets_of(record: bytes, routing: Routing, vm: Vm | None) -> Targets:
    """Where a change goes by the routes, as far as its ``record`` says what they ask for."""
    try:
        read = Record.read(record)
    except msgspec.MsgspecError:  # a heartbeat
        return Targets()
    event = view(Event, read, duration=read.expected_duration_seconds)
    change = view(Change, read, id=read.change_id, kind=read.change, event=event)
    ways = _targets(change, routing, vm)
    fallback = [name for way in ways.values() for name in _fallback(change, way, ways, routing)]
    return Targets(tuple(ways), tuple(dict.fromkeys(fallback)))


def _targets(change: Change, routing: Routing, vm: Vm | None) -> dict[str, Route]:
    """The sinks of a change, each with the route by which it goes there."""
    found = route(change, routing.routes, vm, tuple(routing.sinks))
    return {sink: way for sink, way in found.items() if _takes(routing.sinks[sink], change)}


def _fallback(change: Change, way: Route, targets: Collection[str], routing: Routing) -> tuple[str, ...]:
    """The fallback of a route; those that have the change by their own routes are not given it twice."""
    return tuple(name for name in way.fallback if name not in targets and _takes(routing.sinks[name], change))


def _takes(terms: Terms, change: Change) -> bool:
    return terms.approvals or change.kind not in APPROVAL_KINDS


def _settling(change: Change, terms: Terms) -> float:
    """Seconds to wait if an event no longer affects another VM: that VM closes the alert, this one opens it again."""
    before = change.previous if change.kind == "updated" and change.scope == "self" else None
    left = before is not None and set(before.vms) - set(change.event.vms)
    return SETTLING if left and not terms.approvals else 0.0


def heartbeat_delivery(sink: str, vm: str, record: bytes, now: float, interval: float) -> Delivery:
    """A sign of life of this VM, worth nothing once the next one is due."""
    identity, key = delivery_id(f"{vm} {now}", sink, "heartbeat"), f"heartbeat {vm}".casefold()
    return Delivery(identity, key, sink, "heartbeat", "info", now, now, now + interval, record)


def _reminders(change: Change, way: Route, message: Delivery) -> Iterator[Delivery]:
    """The reminders of a change before NotBefore."""
    event, ahead = change.event, change.ahead_seconds
    last = change.no_longer_affected and way.announce_by != "all"
    if last or change.kind not in ("announced", "updated") or ahead is None:
        return
    near = way.severity or severity_of(event.event_type, None, event.duration)
    start = message.created + ahead  # by the clock of ``created``, however wrong it is
    # a notice that is shorter than that: the change itself says it
    times = sorted({start - one.seconds for one in way.remind_before if start - one.seconds > message.created})
    ends = [*times[1:], start + REMINDER_GRACE]  # the next one replaces it
    for number, (due, expires) in enumerate(zip(times, ends, strict=False)):
        yield replace(
            message,
            delivery_id=delivery_id(change.id, message.sink, f"reminder {number}" if number else "reminder"),
            kind="reminder",
            severity=near if due >= start - NEAR else message.severity,
            created=due,
            due=due,
            expires=expires,
            change_id="",
            expires_with_event=True,
            fallback=(),
            fallback_at=None,
        )
