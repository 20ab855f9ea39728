"""What of AMQP 1.0 Proton does not show or does not write, and the Azure SDK needs of a peer;
Proton has the types.

The SDK's engine reads every field of a performative, where Proton (as the standard allows) leaves
out trailing nulls; and the message format alone shows a batch, which Proton hides. Section numbers:
OASIS AMQP 1.0, parts 1 to 3.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from proton import Data, Described, symbol, timestamp, ulong

BATCH_FORMAT = 0x80013700  # Azure's: a message whose data sections are messages
MESSAGE_ANNOTATIONS = 0x72
DATA = 0x75
# header, delivery annotations, message annotations: not the sender's message (3.2)
NOT_BARE = (
    0x70,
    0x71,
    0x72,
)

# performative -> how many fields it has in the standard (2.7)
FIELDS = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}
TRANSFER = 0x14


class Section(NamedTuple):
    """A described list, map or text: a section of a message, or a frame's performative."""

    code: int
    value: Any
    octets: bytes
    memory: Data  # where the octets of the value are


def section_at(octets: bytes, at: int) -> Section:
    data: Any = Data()
    size = data.decode(memoryview(octets)[at:])
    data.rewind()
    data.next()
    found = data.get_py_described()
    return Section(int(found.descriptor), found.value, octets[at : at + size], data)


def encoded(code: int, value: Any) -> bytes:
    data: Any = Data()
    data.put_object(Described(ulong(code), value))
    return bytes(data.encode())


def sections(message: bytes) -> list[Section]:
    """The sections of an encoded message (3.2)."""
    found = []
    at = 0
    while at < len(message):
        found.append(section_at(message, at))
        at += len(found[-1].octets)
    return found


def _performative(frame: bytes) -> Section | None:
    """``None`` for protocol headers, SASL frames and empty ones."""
    start = frame[4] * 4
    return (
        section_at(frame, start)
        if not frame.startswith(b"AMQP") and frame[5] == 0 and len(frame) > start
        else None
    )


def padded(frame: bytes) -> bytes:
    """The frame with all the fields that its performative has, those that were left out
    as nulls.
    """
    found = _performative(frame)
    if found is None or len(found.value) == FIELDS[found.code]:
        return frame
    missing = [None] * (FIELDS[found.code] - len(found.value))
    start = frame[4] * 4
    body = encoded(found.code, [*found.value, *missing]) + frame[start + len(found.octets) :]
    return struct.pack(">I", start + len(body)) + frame[4:start] + body


def transfer_of(frame: bytes) -> tuple[tuple[int, int], int | None] | None:
    """Of a transfer its channel and handle, and its message format, which the first of several
    frames has (2.7.5).
    """
    found = _performative(frame)
    if found is None or found.code != TRANSFER:
        return None
    handle, _, _, message_format = (*found.value, None, None, None)[:4]
    return (int.from_bytes(frame[6:8]), handle), message_format


def frames(buffer: bytearray) -> Iterator[bytes]:
    """Take whole frames, or protocol headers, from the front of a buffer."""
    while len(buffer) >= 8:
        size = 8 if buffer[:4] == b"AMQP" else int.from_bytes(buffer[:4])
        if len(buffer) < size:
            return
        frame = bytes(buffer[:size])
        del buffer[:size]
        yield frame


def bare(parts: list[Section]) -> bytes:
    """The message as its sender made it, without what the way added (3.2)."""
    return b"".join(part.octets for part in parts if part.code not in NOT_BARE)


def annotations(values: dict[str, str | int | timestamp]) -> bytes:
    """A section of message annotations."""
    return encoded(MESSAGE_ANNOTATIONS, {symbol(name): value for name, value in values.items()})
