"""What the agents of a scale set would send to an Event Hub while a platform maintenance goes over it. Pure."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from notbefore.core.change import LifecycleKind
from notbefore.core.envelope import partition_key
from notbefore.core.record import Heartbeat, Record, Vm
from support.fleet_records import body, report, vm


class Maintenance(Struct, frozen=True):
    """One event, which affects some VMs of the scale set."""

    event_id: str
    resources: tuple[str, ...]
    announced: datetime
    not_before: datetime
    interruption: float  # seconds that its VMs stand still

    def seen(self, who: Vm, kind: LifecycleKind, now: datetime) -> Record:
        """The record of one VM that sees a step of it at ``now``."""
        notice = (self.not_before - self.announced).total_seconds()
        changed: dict[str, Any] = {"not_before": self.not_before, "first_seen": self.announced, "notice": notice}
        if kind == "finished" and who.name in self.resources:
            changed["interruption"] = self.interruption
        return report(who, kind, self.event_id, at=now, resources=self.resources, event_type="Freeze", **changed)


def scale_set(name: str, count: int) -> list[Vm]:
    """The VMs of a scale set."""
    return [vm(f"{name}_{number}", name, zone=str(1 + number % 3)) for number in range(count)]


def maintenance(vms: list[Vm], size: int, announced: datetime, notice: float) -> list[Maintenance]:
    """Events that go over the VMs, ``size`` at a time; ``notice`` in seconds."""
    return [
        Maintenance(
            event_id=f"{vms[0].scale_set}-{number}".upper(),
            resources=tuple(one.name for one in vms[number * size : number * size + size]),
            announced=announced,
            not_before=announced + timedelta(seconds=notice + 5 * number),
            interruption=2.0 + number,
        )
        for number in range(-(-len(vms) // size))
    ]


def heartbeats(vms: Iterable[Vm], now: datetime, interval: float) -> list[Heartbeat]:
    """A heartbeat of each; ``interval``: seconds between two of them."""
    return [Heartbeat.of(one, (), "1", now, interval) for one in vms]


def message(record: Record | Heartbeat) -> tuple[str, bytes]:
    """The partition key and the body with which the sink `event_hub` sends a record."""
    own = record.event_id.casefold() if isinstance(record, Record) else record.vm_name or ""
    return partition_key(record, own), body(record)
