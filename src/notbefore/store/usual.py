"""``Usual``: which interruption is usual on this VM, by type of event, as far as it was measured."""

from contextlib import suppress
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

from notbefore.core.outbox import GivenDelivery
from notbefore.core.record import Record

MAX_MEASURED: Final = 100  # interruptions of a type that are remembered


class Usual:
    """For one thread at a time."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], list[float]] = {}  # (type, id of the VM) -> seconds

    def take(self, record: bytes) -> None:
        """Note what a change says of an interruption. ``record``: the change as JSON."""
        with suppress(msgspec.DecodeError):
            change = Record.read(record)
            if change.change == "finished" and change.scope == "self" and change.interruption_seconds is not None:
                self.note(change.event_type, change.vm_id or "", change.interruption_seconds)

    def note(self, event_type: str, vm_id: str, seconds: float) -> None:
        """An interruption was measured."""
        measured = self._measured.setdefault((event_type, vm_id), [])
        measured.append(seconds)
        del measured[:-MAX_MEASURED]

    def added_to(self, given: GivenDelivery) -> GivenDelivery:
        """With the interruption that is usual for this type of event, where it is known and the event is not over."""
        if self._measured:
            with suppress(msgspec.DecodeError):
                record = Record.read(given.record)
                measured = self._measured.get((record.event_type, record.vm_id or ""))
                if measured and record.scope == "self" and record.outcome is None:
                    return replace(given, usual=(median(measured), len(measured)))
        return given
