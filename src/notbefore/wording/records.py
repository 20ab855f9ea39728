"""Records with their sentences. Pure."""

from datetime import datetime

from notbefore.core.change import Change
from notbefore.core.record import FleetFacts, Heartbeat, Record, Vm
from notbefore.wording.sentences import EXERCISE, sentence


def record_of(
    change: Change,
    vm: Vm | None,
    *,
    exercise: bool = False,
    fleet: FleetFacts | None = None,
) -> Record:
    """Return the record of a change that was seen on ``vm``; ``None``: the VM is not known yet.

    ``fleet``: what many VMs say about it together; ``vm`` then has what these VMs have in common.
    """
    body = sentence(change, vm, fleet)
    if exercise:
        body = EXERCISE + body
    return Record.of(change, vm, body, exercise=exercise, fleet=fleet)


def heartbeat_of(
    vm: Vm | None,
    listed: tuple[str, ...],
    version: str,
    now: datetime,
    interval: float | None = None,
) -> Heartbeat:
    """Return the heartbeat at ``now``; ``listed``: the EventIds of the listed events.

    ``interval`` in seconds.
    """
    body = f"notbefore watches this VM; {len(listed)} scheduled events are pending"
    return Heartbeat.of(vm, body, listed=listed, version=version, now=now, interval=interval)
