"""The few octets of AMQP 1.0 that Proton does not show or does not write: what the Azure SDK needs of a peer.

The SDK's engine reads every field of a performative, where Proton (as the standard allows) leaves out trailing nulls;
and the message format alone shows a batch, which Proton hides. Section numbers: OASIS AMQP 1.0, parts 1 to 3.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

BATCH_FORMAT = 0x80013700  # Azure's: a message whose data sections are messages
MESSAGE_ANNOTATIONS, DATA = 0x72, 0x75
NOT_BARE = (0x70, 0x71, 0x72)  # header, delivery annotations, message annotations: not the sender's message (3.2)

# performative -> how many fields it has in the standard (2.7)
FIELDS = {0x10: 10, 0x11: 8, 0x12: 14, 0x13: 11, 0x14: 11, 0x15: 6, 0x16: 3, 0x17: 1, 0x18: 1}
TRANSFER = 0x14
FIXED_WIDTH = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}  # subcategory of a constructor -> octets of its value (1.2)


class Section(NamedTuple):
    """One section of a message; ``value`` is where its value begins in ``octets``."""

    code: int
    octets: bytes
    value: int


def size_at(data: bytes, at: int) -> int:
    """How many octets the value takes whose constructor stands at ``at``, the constructor included."""
    constructor = data[at]
    if constructor == 0:  # described: a descriptor, then the value
        descriptor = size_at(data, at + 1)
        return 1 + descriptor + size_at(data, at + 1 + descriptor)
    category = constructor >> 4
    if category in FIXED_WIDTH:
        return 1 + FIXED_WIDTH[category]
    if category in (0xA, 0xC, 0xE):  # one octet of size
        return 2 + data[at + 1]
    if category in (0xB, 0xD, 0xF):  # four
        size: int = struct.unpack_from(">I", data, at + 1)[0]
        return 5 + size
    raise ValueError(f"{constructor:#x} is no constructor")


def _list_at(data: bytes, at: int) -> tuple[int, int]:
    """How many items the list has that stands at ``at``, and where the first begins."""
    if data[at] == 0x45:  # list0
        return 0, at + 1
    if data[at] == 0xC0:  # list8
        return data[at + 2], at + 3
    return struct.unpack_from(">I", data, at + 5)[0], at + 9


def _performative(frame: bytes) -> tuple[int, int] | None:
    """The code of a frame's performative and where it begins; ``None`` for SASL frames and empty ones."""
    start = frame[4] * 4
    if frame[5] != 0 or len(frame) <= start or frame[start : start + 2] != b"\x00\x53":
        return None
    return frame[start + 2], start


def padded(frame: bytes) -> bytes:
    """The frame with all the fields that its performative has, those that were left out as nulls."""
    found = _performative(frame)
    if found is None or found[0] not in FIELDS:
        return frame
    code, start = found
    count, first = _list_at(frame, start + 3)
    if count >= FIELDS[code]:
        return frame
    end = start + 3 + size_at(frame, start + 3)
    items = frame[first:end] + b"\x40" * (FIELDS[code] - count)
    body = frame[8 : start + 3] + b"\xd0" + struct.pack(">II", len(items) + 4, FIELDS[code]) + items + frame[end:]
    return struct.pack(">I", len(body) + 8) + frame[4:8] + body


class Transfer(NamedTuple):
    """What Proton does not tell of a transfer."""

    link: tuple[int, int]  # channel and handle
    first: bool  # of possibly several frames
    message_format: int


def transfer_of(frame: bytes) -> Transfer | None:
    """The transfer that a frame holds, if it does (2.7.5)."""
    found = _performative(frame)
    if found is None or found[0] != TRANSFER:
        return None
    count, at = _list_at(frame, found[1] + 3)
    fields: list[int | None] = []
    for _ in range(min(count, 4)):  # handle, delivery-id, delivery-tag, message-format
        size = size_at(frame, at)
        empty = {0x40: None, 0x43: 0, 0x44: 0}
        constructor = frame[at]
        fields.append(empty.get(constructor, int.from_bytes(frame[at + 1 : at + size])))
        at += size
    fields += [None] * (4 - len(fields))
    channel: int = struct.unpack_from(">H", frame, 6)[0]
    return Transfer((channel, fields[0] or 0), fields[1] is not None, fields[3] or 0)


def frames(buffer: bytearray) -> Iterator[bytes]:
    """Take whole frames, or protocol headers, from the front of a buffer."""
    while len(buffer) >= 8:
        size = 8 if buffer[:4] == b"AMQP" else struct.unpack_from(">I", buffer)[0]
        if len(buffer) < size:
            return
        frame = bytes(buffer[:size])
        del buffer[:size]
        yield frame


def sections(message: bytes) -> list[Section]:
    """The sections of an encoded message (3.2)."""
    found, at = [], 0
    while at < len(message):
        if message[at : at + 2] != b"\x00\x53":
            raise ValueError("this is no section of a message")
        size = 3 + size_at(message, at + 3)
        found.append(Section(message[at + 2], message[at : at + size], 3))
        at += size
    return found


def data_of(section: Section) -> bytes:
    """The octets of a data section."""
    head = 2 if section.octets[section.value] == 0xA0 else 5
    return section.octets[section.value + head :]


def bare(parts: list[Section]) -> bytes:
    """The message as its sender made it, without what the way added (3.2)."""
    return b"".join(part.octets for part in parts if part.code not in NOT_BARE)


def annotations(values: dict[str, str | int], times: dict[str, int]) -> bytes:
    """A section of message annotations: texts, longs, and times in milliseconds."""
    items: list[bytes] = []
    for name, value in values.items():
        items += [_symbol(name), _text(value) if isinstance(value, str) else _long(value)]
    for name, milliseconds in times.items():
        items += [_symbol(name), b"\x83" + struct.pack(">q", milliseconds)]
    body = b"".join(items)
    return b"\x00\x53\x72\xd1" + struct.pack(">II", len(body) + 4, len(items)) + body


def _symbol(name: str) -> bytes:
    return b"\xa3" + bytes([len(name)]) + name.encode()


def _text(value: str) -> bytes:
    octets = value.encode()
    return b"\xb1" + struct.pack(">I", len(octets)) + octets


def _long(value: int) -> bytes:
    return b"\x81" + struct.pack(">q", value)
