"""DHCP option 245, where DHCP clients keep it: pure parsers, bytes of a lease -> the address, or ``None``.

A client's files are its own; what cannot be read is no lease. That an address stands there does not make it IMDS's.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

OPTION: Final = 245  # of Azure's DHCP server: where the host answers
MAX_LEASE: Final = 256 * 1024  # bytes; dhclient appends to its file for ever
COOKIE: Final = b"\x63\x82\x53\x63"  # before the options
OPTIONS_AT: Final = 240  # the length of all that is before them
MESSAGE_TYPE: Final = 53
OVERLOAD: Final = 52
END: Final = 255

_NETWORKD: Final = re.compile(rb"^OPTION_245=([0-9a-fA-F]{8})\s*$", re.MULTILINE)
_DHCLIENT: Final = re.compile(rb"^\s*option (?:unknown|private|option)-245 (.{1,60});\s*$", re.MULTILINE)
_NETWORK_MANAGER: Final = re.compile(rb"^(?:private|unknown)_245=(.{1,60}?)\s*$", re.MULTILINE)
_COLONS: Final = re.compile(rb"[0-9a-fA-F]{1,2}(?::[0-9a-fA-F]{1,2}){3}")
_DOTS: Final = re.compile(rb"\d{1,3}(?:\.\d{1,3}){3}")
_ESCAPE: Final = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)


def from_networkd(lease: bytes) -> str | None:
    """The file of systemd-networkd, and that of NetworkManager's internal client as long as it was the same code."""
    return _last(address_of(bytes.fromhex(found.decode("ascii"))) for found in _NETWORKD.findall(lease))


def from_dhclient(lease: bytes) -> str | None:
    """The file of dhclient; the newest lease is the last one."""
    return _last(map(_written, _DHCLIENT.findall(lease)))


def from_network_manager(state: bytes) -> str | None:
    """NetworkManager's state of a device, or its internal client's lease."""
    return _last(map(_written, _NETWORK_MANAGER.findall(state))) or from_networkd(state)


def from_packet(packet: bytes) -> str | None:
    """A DHCP message as it came over the network, which is what dhcpcd keeps."""
    return address_of(options(packet).get(OPTION, b""))


def options(packet: bytes) -> dict[int, bytes]:
    """The options of a DHCP message; one that stands there in parts is put together (RFC 3396)."""
    if packet[OPTIONS_AT - len(COOKIE) : OPTIONS_AT] != COOKIE:
        return {}
    found: dict[int, bytes] = {}
    _collect(packet[OPTIONS_AT:], found)
    overload = found.get(OVERLOAD, b"\0")[0] if found.get(OVERLOAD) else 0
    if overload & 1:
        _collect(packet[108:236], found)
    if overload & 2:
        _collect(packet[44:108], found)
    return found


def _collect(field: bytes, found: dict[int, bytes]) -> None:
    at = 0
    while at + 1 < len(field) and field[at] != END:
        if field[at] == 0:
            at += 1
            continue
        value = field[at + 2 : at + 2 + field[at + 1]]
        if len(value) < field[at + 1]:
            return  # cut off
        found[field[at]] = found.get(field[at], b"") + value
        at += 2 + len(value)


def address_of(octets: bytes) -> str | None:
    """The address that four bytes say, if it can be another machine's."""
    if len(octets) != 4:  # noqa: PLR2004 - IPv4
        return None
    address = ipaddress.IPv4Address(octets)
    if address.is_unspecified or address.is_multicast or address.is_loopback or address.is_reserved:
        return None
    return str(address)


def _written(value: bytes) -> str | None:
    """As clients write four bytes: ``a8:3f:81:10``, dotted, or text where all four happen to be printable."""
    if value.startswith(b'"') and value.endswith(b'"'):
        return address_of(_ESCAPE.sub(_unescaped, value[1:-1]))
    if _COLONS.fullmatch(value):
        return address_of(bytes(int(part, 16) for part in value.split(b":")))
    if _DOTS.fullmatch(value):
        parts = [int(part) for part in value.split(b".")]
        return address_of(bytes(parts)) if max(parts) <= 255 else None  # noqa: PLR2004 - a byte
    return None


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else code  # noqa: PLR2004 - octal


def _last(found: Iterator[str | None]) -> str | None:
    return ([None, *filter(None, found)])[-1]
