"""A DHCP INFORM that asks the network for option 245 and nothing else; no lease is changed. RFC 2131."""

import errno
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from notbefore.imds.leases import COOKIE, MESSAGE_TYPE, OPTION, from_packet, options

TRIES: Final = 2
PATIENCE: Final = 1.0  # seconds to wait for the answer to each
MAX_INTERFACES: Final = 4
SIOCGIFADDR: Final = 0x8915
INTERFACES: Final = Path("/sys/class/net")  # if_nameindex() needs a netlink socket, which a sandbox may forbid
INFORM: Final = 8
ACK: Final = 5
CLIENT_PORT: Final = 68
SERVER_PORT: Final = 67


class CannotAskError(Exception):
    """The request cannot be sent; the text says why, and what would help."""


def inform() -> str | None:
    """Ask on the first interfaces that have an address; raises ``CannotAskError`` if none can send.

    Returns the address in option 245, or ``None`` without an answer.
    """
    try:
        interfaces = _interfaces()
    except OSError as error:
        raise CannotAskError(f"the network interfaces cannot be listed: {error.strerror or error}") from None
    if not interfaces:
        raise CannotAskError("no interface has an IPv4 address")
    trouble: list[CannotAskError] = []
    for name, address in interfaces[:MAX_INTERFACES]:
        try:
            found = _ask(name, address)
        except CannotAskError as error:
            trouble.append(error)
            continue
        if found is not None:
            return found
    if trouble:
        raise trouble[0]
    return None


def _interfaces() -> list[tuple[str, str]]:
    """Return names and addresses; interfaces with a device first, because Azure's is not a bridge or a tunnel."""
    try:
        import fcntl  # noqa: PLC0415 - not on Windows
    except ImportError:  # pragma: no cover - the tests run on POSIX
        raise CannotAskError("not on this system") from None
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in sorted(path.name for path in INTERFACES.iterdir()):
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    outside = [(name, address) for name, address in found if not address.startswith("127.")]
    return sorted(outside, key=lambda interface: not (INTERFACES / interface[0] / "device").exists())


def _ask(name: str, address: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a DHCP client may hold the port
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            asking.bind((address, CLIENT_PORT))
            for _ in range(TRIES):
                xid = os.urandom(4)
                asking.sendto(request(xid, address, _mac(name)), ("255.255.255.255", SERVER_PORT))
                found = _answer(asking, xid)
                if found is not None:
                    return found
    except PermissionError:
        raise CannotAskError(
            "not permitted: it needs CAP_NET_BIND_SERVICE (systemd: AmbientCapabilities=CAP_NET_BIND_SERVICE)"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotAskError("a DHCP client uses port 68 exclusively") from None
        raise CannotAskError(f"{name}: {error.strerror}") from None
    return None


def _answer(asking: socket.socket, xid: bytes) -> str | None:
    """Return the address in the first answer to this request; other packets are ignored."""
    deadline = time.monotonic() + PATIENCE
    while (left := deadline - time.monotonic()) > 0:
        asking.settimeout(left)
        try:
            packet, (_, port) = asking.recvfrom(4096)
        except TimeoutError:
            break
        if port == SERVER_PORT and packet[:1] == b"\x02" and packet[4:8] == xid:
            acknowledged = options(packet).get(MESSAGE_TYPE) == bytes([ACK])
            return from_packet(packet) if acknowledged else None
    return None


def request(xid: bytes, address: str, mac: bytes) -> bytes:
    """Return the DHCP message that asks for option 245. ``address`` and ``mac`` are those of the interface."""
    head = struct.pack("!4B4sHH4s12x6s202x", 1, 1, 6, 0, xid, 0, 0, socket.inet_aton(address), mac)
    return (head + COOKIE + bytes([MESSAGE_TYPE, 1, INFORM, 55, 1, OPTION, 255])).ljust(300, b"\0")


def _mac(name: str) -> bytes:
    try:
        return bytes.fromhex((INTERFACES / name / "address").read_text(encoding="ascii").strip().replace(":", ""))
    except (OSError, ValueError):
        return bytes(6)
