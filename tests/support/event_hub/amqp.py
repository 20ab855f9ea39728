"""The parts of AMQP 1.0 that the Azure SDK needs of a peer and Proton does not offer.

- The SDK's engine reads every field of a performative. Proton leaves out trailing nulls, as the
  standard allows: ``padded`` adds them.
- Only the message format shows that a message is a batch. Proton hides it: ``transfer_of`` reads
  it.

Proton's types encode and decode. Section numbers: OASIS AMQP 1.0, parts 1 to 3.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from proton import Data, Described, symbol, timestamp, ulong

BATCH_FORMAT = 0x80013700  # Azure's: a message whose data sections are messages
MESSAGE_ANNOTATIONS = 0x72
DATA = 0x75
# header, delivery annotations and message annotations are not part of the bare message (3.2)
NOT_BARE = (0x70, 0x71, 0x72)

# the number of fields of each performative (2.7)
FIELDS = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}
TRANSFER = 0x14


class Section(NamedTuple):
    """A described list, map or text: a section of a message, or a frame's performative."""

    code: int
    value: Any
    octets: bytes
    memory: Data  # where the octets of the value are


def section_at(octets: bytes, at: int) -> Section:
    """Decode the section that starts at this octet."""
    data: Any = Data()
    size = data.decode(memoryview(octets)[at:])
    data.rewind()
    data.next()
    described = data.get_py_described()
    return Section(int(described.descriptor), described.value, octets[at : at + size], data)


def encoded(code: int, value: Any) -> bytes:
    """Encode a section."""
    data: Any = Data()
    data.put_object(Described(ulong(code), value))
    return bytes(data.encode())


def sections(message: bytes) -> list[Section]:
    """Decode the sections of a message (3.2)."""
    decoded: list[Section] = []
    at = 0
    while at < len(message):
        section = section_at(message, at)
        decoded.append(section)
        at += len(section.octets)
    return decoded


def _start_of_body(frame: bytes) -> int:
    return frame[4] * 4


def _performative(frame: bytes) -> Section | None:
    """Return the performative; ``None`` for protocol headers, SASL frames and empty frames."""
    if frame.startswith(b"AMQP"):
        return None
    is_sasl = frame[5] != 0
    is_empty = len(frame) <= _start_of_body(frame)
    if is_sasl or is_empty:
        return None
    return section_at(frame, _start_of_body(frame))


def padded(frame: bytes) -> bytes:
    """Return the frame with all fields of its performative: omitted ones are nulls."""
    performative = _performative(frame)
    if performative is None or len(performative.value) == FIELDS[performative.code]:
        return frame
    missing = [None] * (FIELDS[performative.code] - len(performative.value))
    body = encoded(performative.code, [*performative.value, *missing])
    start = _start_of_body(frame)
    payload = frame[start + len(performative.octets) :]
    size = start + len(body) + len(payload)
    return struct.pack(">I", size) + frame[4:start] + body + payload


def transfer_of(frame: bytes) -> tuple[tuple[int, int], int | None] | None:
    """Return the link (channel and handle) and the message format of a transfer.

    Only the first of several frames has the message format (2.7.5). Other frames are ``None``.
    """
    performative = _performative(frame)
    if performative is None or performative.code != TRANSFER:
        return None
    channel = int.from_bytes(frame[6:8])
    handle, _, _, message_format = (*performative.value, None, None, None)[:4]
    return (channel, handle), message_format


def frames(buffer: bytearray) -> Iterator[bytes]:
    """Take whole frames and protocol headers from the front of a buffer."""
    while len(buffer) >= 8:
        if buffer[:4] == b"AMQP":
            size = 8
        else:
            size = int.from_bytes(buffer[:4])
        if len(buffer) < size:
            return
        frame = bytes(buffer[:size])
        del buffer[:size]
        yield frame


def bare(parts: list[Section]) -> bytes:
    """Return the message as its sender made it, without annotations of the transport (3.2)."""
    return b"".join(part.octets for part in parts if part.code not in NOT_BARE)


def annotations(values: dict[str, str | int | timestamp]) -> bytes:
    """Encode a section of message annotations."""
    return encoded(MESSAGE_ANNOTATIONS, {symbol(name): value for name, value in values.items()})
