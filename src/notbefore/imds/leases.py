"""DHCP option 245 in the lease files of DHCP clients: pure parsers, bytes of a lease -> the address, or ``None``.

Bytes that cannot be understood are not a lease. Whether IMDS is at the address is not known here.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

OPTION: Final = 245  # Azure's DHCP server: the IPv4 address of the host
MAX_LEASE: Final = 256 * 1024  # bytes; dhclient appends to its file for ever
COOKIE: Final = b"\x63\x82\x53\x63"  # before the options
OPTIONS_AT: Final = 240  # bytes before the options
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
    """Read a file of systemd-networkd, or of NetworkManager's internal client in versions with the same code."""
    return _last(address_of(bytes.fromhex(found.decode("ascii"))) for found in _NETWORKD.findall(lease))


def from_dhclient(lease: bytes) -> str | None:
    """Read a file of dhclient; the newest lease is the last one."""
    return _last(map(_written, _DHCLIENT.findall(lease)))


def from_network_manager(state: bytes) -> str | None:
    """Read NetworkManager's state of a device, or the lease of its internal client."""
    return _last(map(_written, _NETWORK_MANAGER.findall(state))) or from_networkd(state)


def from_packet(packet: bytes) -> str | None:
    """Read a DHCP message as it came over the network; dhcpcd keeps this."""
    return address_of(options(packet).get(OPTION, b""))


def options(packet: bytes) -> dict[int, bytes]:
    """Return the options of a DHCP message; an option in several parts is joined (RFC 3396)."""
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
            return  # truncated
        found[field[at]] = found.get(field[at], b"") + value
        at += 2 + len(value)


def address_of(octets: bytes) -> str | None:
    """Return four bytes as an IPv4 address; ``None`` if it cannot be the address of another machine."""
    if len(octets) != 4:  # noqa: PLR2004 - IPv4
        return None
    address = ipaddress.IPv4Address(octets)
    if address.is_unspecified or address.is_multicast or address.is_loopback or address.is_reserved:
        return None
    return str(address)


def _written(value: bytes) -> str | None:
    """Read four bytes as clients write them: ``a8:3f:81:10``, dotted, or as text if all four are printable."""
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
