"""``Snapshot``: all that the next owner of a partition needs, and its form as bytes. Pure."""

import zlib
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from notbefore.core.outbox_rows import OutboxImage
from notbefore.fleet.history import PastEvent
from notbefore.fleet.silence import Heard
from notbefore.fleet.story import Standing
from notbefore.fleet.waves import OpenWaves

FORM: Final = 7  # the version of a snapshot's form
MAX_SNAPSHOT: Final = 256 * 1024 * 1024  # bytes of a snapshot before it is compressed


class Position(NamedTuple):
    """The last record that was read from the log."""

    offset: str = ""  # empty before the first one
    sequence: int = -1
    enqueued: float = 0.0  # Unix seconds of the hub's clock; 0 before the first one


class Closed(Struct, array_like=True):
    """An event that is over."""

    event_key: str  # empty if another resource group's event had the EventId first
    standing: Standing  # its own, not that of its wave
    at: float  # Unix seconds of the hub's clock
    nth: int  # see ``Story``
    over: datetime  # the last VM's report of the end


class Snapshot(Struct, array_like=True):
    """The state of a partition's fold.

    While the partition is read, the fold changes it in place.
    """

    form: int = FORM
    at: float = 0.0  # when it was taken; all times here are Unix seconds of the hub's clock
    position: Position = Position()
    partitions: int = 0  # how many the hub has
    # the last record when the first read began: nobody is notified of what is over by then
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
    muted: set[str] = set()  # event keys of open waves that nobody was notified of
    # when it was last looked for VMs that are silent: the hub was read until then
    looked: float = 0.0


def compressed(snapshot: bytes) -> bytes:
    """Compress a snapshot for the store.

    It may take some 10 ms: do not call it in an event loop.
    """
    return zlib.compress(snapshot, 1)


def read_snapshot(body: bytes) -> Snapshot:
    """Read a stored snapshot.

    Raises ``ValueError`` if the bytes are no snapshot, or one of another form.
    """
    try:
        expanded = zlib.decompressobj()
        data = expanded.decompress(body, MAX_SNAPSHOT)
        if expanded.unconsumed_tail or not expanded.eof:
            raise ValueError("it is cut off, or too large")
        found = msgspec.msgpack.decode(data, type=Snapshot)
    except (zlib.error, msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if found.form != FORM:
        raise ValueError(f"a snapshot of form {found.form}, expected {FORM}")
    return found
