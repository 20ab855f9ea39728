"""``Snapshot``: all that the next owner of a partition needs, and its form as bytes. Pure."""

import errno
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from notbefore.core.outbox_rows import OutboxImage
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_records import Place
from notbefore.fleet.silence import Heard
from notbefore.fleet.story import OVER, AzureWord, Standing
from notbefore.fleet.wave import OpenWaves, Wave

# The version of a snapshot's form. Forms only add fields at the end, so that a version also reads
# the previous one; what cannot be added needs a reader of its own.
FORM: Final = 9
PREVIOUS_FORM: Final = 8
HEAD_BYTES: Final = 8  # of a snapshot, which contain its form
LOST_SECONDS: Final = 3_600.0  # after a loss; by then all VMs have sent heartbeats
REPORT_SECONDS: Final = 60.0  # for the report of an event that a VM lists in a heartbeat
MAX_FIXINT: Final = 127  # MessagePack writes numbers up to this one as one byte
MAX_SNAPSHOT: Final = 256 * 1024 * 1024  # bytes of a snapshot before it is compressed


class Position(NamedTuple):
    """The last record that was read from the log."""

    offset: str = ""  # empty before the first one
    sequence: int = -1
    enqueued: float = 0.0  # Unix seconds of the hub's clock; 0 before the first one


FROM_START: Final = Position(offset="-1", sequence=-2)
"""The position of a partition that is read from the start of the hub's retention."""


class Unknown(Struct, array_like=True):
    """An event that VMs list in heartbeats, and that was never reported here."""

    first: float  # when it was listed first, in Unix seconds of the hub's clock
    last: float


class Closed(Struct, array_like=True):
    """An event that is over. It is remembered, because reports about it may come late."""

    event_key: str  # empty if another resource group's event had the EventId first
    standing: Standing  # its own, not that of its wave
    at: float  # Unix seconds of the hub's clock
    nth: int  # the number of earlier events with this id
    over: datetime  # the last VM's report of the end
    wave_key: str = ""  # the event key of its wave; empty if no one was notified of it
    azure: AzureWord | None = None  # what Azure has said about it


class AzureVm(Struct, array_like=True):
    """A VM that Azure has reported an event of, and that has not reported anything itself."""

    name: str
    place: Place
    at: float  # when Azure reported the last one, in Unix seconds of the hub's clock


class Snapshot(Struct, array_like=True):
    """The state of a partition's fold.

    While the partition is read, the fold changes it in place.
    """

    form: int = FORM
    at: float = 0.0  # when it was taken; all times here are Unix seconds of the hub's clock
    position: Position = Position()
    partitions: int = 0  # how many the hub has
    # the last record when the first read began: no one is notified of what was over by then
    backlog: int = -1
    waves: OpenWaves = {}
    silent: OpenWaves = {}
    missing: OpenWaves = {}
    closed: dict[str, Closed] = {}  # in the order in which they were over
    vanished: dict[str, float] = {}  # VM -> when an event deleted it
    heard: dict[str, Heard] = {}
    expected: dict[str, Heard] = {}  # VMs of the inventory that are not heard from
    outbox: OutboxImage = OutboxImage()  # as it was at ``at``
    past: list[PastEvent] = []  # events that are over and not in the history yet
    muted: set[str] = set()  # event keys of open waves of which no one was notified
    # the time of the last look for overdue events and silent VMs: the hub was read until then
    looked: float = 0.0
    # after a loss: no one is notified of what was over by then
    quiet_until: float = 0.0
    lost_at: float = 0.0  # when the last snapshot was found to be lost; 0: never
    unknown: dict[str, Unknown] = {}  # by resource group and EventId
    resized_at: float = 0.0  # when the hub was found to have more partitions; 0: never
    # by event key: waves that other partitions had then, and that may continue here
    elsewhere: dict[str, Wave] = {}
    azure_vms: dict[str, AzureVm] = {}  # VMs that Azure has named: see ``AzureVm``

    def was_lost(self, now: float) -> bool:
        """Whether a snapshot was lost so recently that events may still be missing."""
        return self.lost_at > 0 and now - self.lost_at < LOST_SECONDS

    def open_events(self) -> set[str]:
        """Return the keys of open events that were heard of since partitions were added."""
        keys: set[str] = set()
        for wave in self.waves.values():
            for story in wave.stories.values():
                if story.standing not in OVER and story.heard_at > self.resized_at:
                    keys.add(story.key)
        return keys

    def unknown_events(self, now: float) -> int:
        """Count the events that VMs list and that were not reported in time."""
        unknown = list(self.unknown.values())  # a copy: other threads read it
        return sum(now - listed.first > REPORT_SECONDS for listed in unknown)


def compressed(snapshot: bytes) -> bytes:
    """Compress a snapshot for the store.

    That may take some 10 ms, so do not call this in an event loop. Raises ``OSError`` if the
    snapshot is so large that no instance could read it.
    """
    if len(snapshot) > MAX_SNAPSHOT:
        raise OSError(errno.EFBIG, f"a snapshot of {len(snapshot)} bytes could not be read again")
    return zlib.compress(snapshot, 1)


class NewerSnapshotError(Exception):
    """A snapshot of a newer form: a newer version writes it, and this one must not replace it."""


def check_form(body: bytes) -> None:
    """Raise ``NewerSnapshotError`` if the bytes are a snapshot of a newer form.

    Only the beginning is read. Bytes that are no snapshot pass.
    """
    with suppress(zlib.error):
        head = zlib.decompressobj().decompress(body, HEAD_BYTES)
        form = _form_in(head)
        if form > FORM:
            raise NewerSnapshotError(f"it has form {form}, this version writes form {FORM}")


def _form_in(head: bytes) -> int:
    """Return the form in the first bytes of a snapshot; 0 if they are not those of a snapshot.

    A snapshot is a MessagePack array that begins with its form.
    """
    lead = head[:1]
    if b"\x90" < lead <= b"\x9f":
        number = head[1:2]
    elif lead == b"\xdc":
        number = head[3:4]
    else:
        return 0
    if number and number[0] <= MAX_FIXINT:
        return number[0]
    return 0


def read_snapshot(body: bytes) -> Snapshot:
    """Read a stored snapshot of this form or of the previous one.

    Raises ``ValueError`` if the bytes are no snapshot, or one of another form.
    """
    try:
        expanded = zlib.decompressobj()
        data = expanded.decompress(body, MAX_SNAPSHOT)
        if expanded.unconsumed_tail or not expanded.eof:
            raise ValueError("it is cut off, or too large")
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except (zlib.error, msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if not PREVIOUS_FORM <= snapshot.form <= FORM:
        raise ValueError(f"a snapshot of form {snapshot.form}, expected {FORM}")
    snapshot.form = FORM
    return snapshot


def split_events(states: Mapping[str, Snapshot]) -> dict[str, list[str]]:
    """Return the events that are open in several partitions, and these partitions.

    ``states``: partition -> its state. Azure's messages and the VMs' records meet only within one.
    """
    partitions: dict[str, list[str]] = {}
    for name, state in states.items():
        for key in state.open_events():
            partitions.setdefault(key, []).append(name)
    return {key: names for key, names in partitions.items() if len(names) > 1}
