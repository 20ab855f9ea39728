"""What the agents of many VMs would send to an Event Hub. Pure: no hub, no clock."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import Struct

from notbefore.core.change import Change, Gap, LifecycleKind, change_id
from notbefore.core.document import SCHEDULED, STARTED, Event
from notbefore.core.envelope import cloud_event, partition_key
from notbefore.core.record import Heartbeat, Record, Vm, json_line


class Maintenance(Struct, frozen=True):
    """One event of a platform maintenance, which affects some VMs of a scale set."""

    event_id: str
    resources: tuple[str, ...]
    announced: datetime
    not_before: datetime
    interruption: float  # seconds that its VMs stand still

    def seen(self, who: Vm, kind: LifecycleKind, now: datetime) -> Record:
        """The record of one VM, of the same scale set, that sees a step of it at ``now``."""
        listed = Event(
            event_id=self.event_id,
            event_type="Freeze",
            event_status=SCHEDULED if kind == "announced" else STARTED,
            resource_type="VirtualMachine",
            resources=self.resources,
            not_before=self.not_before if kind == "announced" else None,
            description="Virtual machine is being paused because of a memory-preserving Live Migration operation.",
            event_source="Platform",
            duration=round(self.interruption),
        )
        affected, over = who.name in self.resources, kind == "finished"
        change = Change(
            id=change_id(listed.key, kind, "", 0),
            kind=kind,
            reason="gone_after_start" if over else "status_started" if kind == "started" else "first_seen_scheduled",
            time=now,
            event=listed,
            scope="self" if affected else "peer",
            incarnation=1,
            first_seen=self.announced,
            outcome="finished" if over else None,
            not_before=self.not_before,
            notice_seconds=(self.not_before - self.announced).total_seconds(),
            interruption=Gap(self.interruption, self.interruption) if over and affected else None,
        )
        return Record.of(change, who)


def scale_set(name: str, count: int) -> list[Vm]:
    """The VMs of a scale set."""
    return [
        Vm(
            name=f"{name}_{number}",
            vm_id=f"{name}-{number:04d}",
            subscription_id="simulated",
            resource_group="fleet",
            location="westeurope",
            zone=str(1 + number % 3),
            scale_set=name,
        )
        for number in range(count)
    ]


def maintenance(vms: list[Vm], size: int, announced: datetime, notice: float) -> list[Maintenance]:
    """Events that go over the VMs, ``size`` at a time; ``notice`` in seconds."""
    groups = [vms[begin : begin + size] for begin in range(0, len(vms), size)]
    return [
        Maintenance(
            event_id=f"{vms[0].scale_set}-{number}".upper(),
            resources=tuple(vm.name for vm in group),
            announced=announced,
            not_before=announced + timedelta(seconds=notice + 5 * number),
            interruption=2.0 + number,
        )
        for number, group in enumerate(groups)
    ]


def heartbeats(vms: Iterable[Vm], now: datetime, interval: float) -> list[Heartbeat]:
    """A heartbeat of each; ``interval``: seconds between two of them."""
    return [Heartbeat.of(vm, (), "simulated", now, interval) for vm in vms]


def message(record: Record | Heartbeat) -> tuple[str, bytes]:
    """The partition key and the body with which the sink `event_hub` sends a record."""
    own = record.event_id.casefold() if isinstance(record, Record) else record.vm_name or ""
    identity = record.change_id if isinstance(record, Record) else f"{record.vm_id}-{record.time.timestamp()}"
    return partition_key(record, own), json_line(cloud_event(record, identity, record.flat()))
