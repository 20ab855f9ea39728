"""``Log`` is the log of one partition and the fold that reads it, with a clock of its own."""

from datetime import UTC, datetime
from typing import Any

from notbefore.config.sinks import Messages
from notbefore.core.delivery import deliveries
from notbefore.core.message import Message
from notbefore.core.record import Vm
from notbefore.core.routing import Route, Routing, Terms
from notbefore.fleet.notification import Notification
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position, Snapshot, compressed, read_snapshot
from notbefore.fleet.waves import Grouping
from notbefore.wording.records import heartbeat_of, record_of
from notbefore.wording.texts import Text, text_of
from support.azure import T0, at
from support.event_grid import encoded, message
from support.fleet_records import body, report, vm

VMS = [vm(f"web_{number}") for number in range(4)]
A, B, C, D = VMS
LIMIT = 3600.0  # seconds without news after which the fold ends an event


def grouped(
    by: tuple[str, ...] = ("event_id",),
    wait: float = 10.0,
    interval: float = 300.0,
    routes: tuple[Route, ...] = (),
) -> Grouping:
    """Return a grouping with the limit of this module."""
    return Grouping(by, wait, interval, LIMIT, routes)


EACH = grouped()
WAVES = grouped(("scale_set", "event_type"))


def snapshot_of(fold: Partition) -> Snapshot:
    """Return the snapshot of a fold as another instance reads it."""
    return read_snapshot(compressed(fold.snapshot(0.0)))


class Log:
    """A partition's log, read by a fold."""

    def __init__(self, grouping: Grouping = EACH, sequence: int = 0) -> None:
        self.grouping = grouping
        self.fold = Partition("0", grouping)
        self.notifications: list[Notification] = []
        self.sequence = sequence
        self.now = T0.timestamp()

    def add(self, *words: Any, after: float = 1.0, **fields: Any) -> list[str]:
        """Append a report after so many seconds, let the fold read it, and return as ``wait``."""
        self.now += after
        fields.setdefault("not_before", at(fields.get("notice", 900.0)))
        fields.setdefault("at", datetime.fromtimestamp(self.now, UTC))
        self.read(body(report(*words, **fields)))
        return self.wait(0)

    def azure(self, status: str, *words: Any, after: float = 1.0, **fields: Any) -> list[str]:
        """Append a message of Azure, as ``add`` does with a report."""
        self.now += after
        fields.setdefault("at", datetime.fromtimestamp(self.now, UTC))
        if status == "Scheduled":
            fields.setdefault("not_before", at(900))
        self.read(encoded(message(status, *words, **fields)))
        return self.wait(0)

    def read(self, data: bytes) -> None:
        """Append a record, and let the fold read it."""
        self.notifications += self.fold.add(
            data, Position(str(self.sequence), self.sequence, self.now)
        )
        self.sequence += 1

    def taken_over(self) -> "Log":
        """Return the log as another instance continues it from a snapshot."""
        other = Log(self.grouping, self.sequence)
        other.fold = Partition("0", self.grouping, snapshot_of(self.fold))
        other.now = self.now
        return other

    def wait(self, seconds: float) -> list[str]:
        """Let time pass, and return the kinds of all notifications so far."""
        self.now += seconds
        self.notifications += self.fold.advance(self.now)
        return self.kinds

    def beat(self, *vms: Vm, interval: float = 300.0) -> None:
        """Append a heartbeat of each of these VMs."""
        now = datetime.fromtimestamp(self.now, UTC)
        for sender in vms:
            self.read(body(heartbeat_of(sender, (), "1", now, interval)))

    def beat_listing(self, sender: Vm, *event_ids: str) -> None:
        """Append a heartbeat of a VM that lists these events."""
        now = datetime.fromtimestamp(self.now, UTC)
        self.read(body(heartbeat_of(sender, event_ids, "1", now, 300.0)))

    def pass_time(self, seconds: float, *alive: Vm) -> list[str]:
        """Let time pass while these VMs send a heartbeat each minute; return as ``wait``."""
        end = self.now + seconds
        while self.now < end:
            self.beat(*alive)
            self.wait(60)
        return self.kinds

    @property
    def silent(self) -> list[str]:
        """The names of the silent VMs."""
        return [vm.name for vm in self.fold.state.heard.values() if vm.silent]

    @property
    def kinds(self) -> list[str]:
        return [notification.change.kind for notification in self.notifications]

    @property
    def last(self) -> Notification:
        return self.notifications[-1]


def text_of_last(log: Log) -> Text:
    """Return the text of the message about the last notification."""
    notification = log.last
    routing = Routing((Route(sinks=("it",)),), {"it": Terms()})
    record = record_of(notification.change, notification.vm, fleet=notification.facts)
    (delivery,) = deliveries(notification.change, record.line(), routing, notification.vm)
    created = datetime.fromtimestamp(delivery.created, UTC)
    return text_of(Message.of(delivery, created), Messages())
