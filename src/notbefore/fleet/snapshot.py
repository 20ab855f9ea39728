"""``Snapshot``: all of a partition that whoever has it next needs, and the bytes that are written of it. Pure."""

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

FORM: Final = 7  # of a snapshot
MAX_SNAPSHOT: Final = 256 * 1024 * 1024  # bytes of one that is not compressed


class Position(NamedTuple):
    """Up to where the log was read: the last record."""

    offset: str = ""  # empty before the first one
    sequence: int = -1
    enqueued: float = 0.0  # Unix seconds of the hub's clock; 0 before the first one


class Closed(Struct, array_like=True):
    """An event that is over."""

    event_key: str  # empty where the event of another resource group has the EventId
    standing: Standing  # its own, whatever the rest of its wave did
    at: float  # Unix seconds of the hub's clock
    nth: int
    over: datetime  # by the last VM's word


class Snapshot(Struct, array_like=True):
    """What a partition's fold knows: while it is read, the fold changes it in place."""

    form: int = FORM
    at: float = 0.0  # when it was written down: this, and the times below, are Unix seconds of the hub's clock
    position: Position = Position()
    partitions: int = 0  # of the hub
    backlog: int = -1  # the last record before it was first read: what is over by then is history, and no news
    waves: OpenWaves = {}
    silent: OpenWaves = {}
    missing: OpenWaves = {}
    closed: dict[str, Closed] = {}  # in the order in which they were over
    vanished: dict[str, float] = {}  # VMs that an event has deleted, and when
    heard: dict[str, Heard] = {}
    expected: dict[str, Heard] = {}  # VMs of the inventory that are not heard from
    outbox: OutboxImage = OutboxImage()  # as it was when it was written down
    past: list[PastEvent] = []  # events that are over, and not in the history yet
    muted: set[str] = set()  # event keys of open waves that nobody was notified of


def compressed(snapshot: bytes) -> bytes:
    """A snapshot as it is written down. It may take some 10 ms: not for an event loop."""
    return zlib.compress(snapshot, 1)


def read_snapshot(body: bytes) -> Snapshot:
    """Read what was written down; raises ``ValueError`` for what is no snapshot, or one of another form."""
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
