"""Which addresses a connection may lead to where only public ones are allowed."""

import ipaddress
import socket
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

WIRE_SERVER: Final = ipaddress.ip_address("168.63.129.16")  # the host's agent channel in Azure: as private as IMDS


class PrivateAddressError(Exception):
    """The connection would go to an address that is not public."""


class UnresolvedError(PrivateAddressError):
    """Nobody can say now where the connection would go: the name is not resolved, as before the network is up."""


def check_address(address: str) -> None:
    """Raise ``PrivateAddressError`` for an address that is not public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if not ip.is_global or ip == WIRE_SERVER:
        raise PrivateAddressError(f"{ip} is not a public address: set `allow_private: true` if it is the right one")


def check_target(url: str, *, proxied: bool) -> None:
    """What can be known before there is a connection: all that can, where a proxy makes it. For each attempt anew."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):  # it is a name
        check_address(host)
        return
    if not proxied:
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UnresolvedError(
            f"{host} cannot be resolved here, so that nobody can say whether the proxy would connect to a private"
            " address: set `allow_private: true` if you trust the name"
        ) from None
    for info in found:
        check_address(str(info[4][0]))
