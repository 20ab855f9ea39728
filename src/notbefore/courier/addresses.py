"""Which addresses a connection may lead to where only public ones are allowed."""

import ipaddress
import socket
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

NAT64: Final = ipaddress.ip_network(
    "64:ff9b::/96"
)  # an IPv4 address in its last 32 bits, which the network connects to
NOT_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # the host's agent channel in Azure: as private as IMDS
            "192.0.0.0/24",  # IETF protocol assignments; one of them is another cloud's IMDS
            "::/96",  # IPv4 addresses as IPv6 ones, of old
            "64:ff9b:1::/48",  # NAT64 of a network's own
            "2001::/32",  # Teredo, which holds an IPv4 address
            "2002::/16",  # 6to4, which holds one as well
            "fec0::/10",  # site-local, of old
        ),
    )
)


class PrivateAddressError(Exception):
    """The connection would go to an address that is not public."""


class UnresolvedError(PrivateAddressError):
    """Nobody can say now where the connection would go: the name is not resolved, as before the network is up."""


def check_address(address: str) -> None:
    """Raise ``PrivateAddressError`` for an address that is not public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in NAT64 else ip.ipv4_mapped
        ip = inner or ip
    if not ip.is_global or ip.is_multicast or any(ip in network for network in NOT_PUBLIC):
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
