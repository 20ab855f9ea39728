"""Which addresses a connection may lead to where only public ones are allowed."""

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from notbefore.errors import SendError

NAT64: Final = ipaddress.ip_network("64:ff9b::/96")  # its last 32 bits are an IPv4 address, which the network connects
_NOT_PUBLIC: Final = (
    "168.63.129.16/32",  # the host's agent channel in Azure: as private as IMDS
    "192.0.0.0/24",  # IETF protocol assignments; one of them is another cloud's IMDS
    "::/96",  # IPv4 addresses as IPv6 ones, of old
    "64:ff9b:1::/48",  # NAT64 of a network's own
    "2001::/32",  # Teredo, which holds an IPv4 address
    "2002::/16",  # 6to4, which holds one as well
    "fec0::/10",  # site-local, of old
)
NOT_PUBLIC: Final = tuple(map(ipaddress.ip_network, _NOT_PUBLIC))


def check_address(address: str) -> None:
    """Raise ``SendError`` for an address that is not public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in NAT64 else ip.ipv4_mapped
        ip = inner or ip
    if not ip.is_global or ip.is_multicast or any(ip in network for network in NOT_PUBLIC):
        raise SendError(
            f"{ip} is not a public address: set `allow_private: true` if it is the right one", permanent=True
        )


def check_target(url: str, *, proxied: bool) -> None:
    """As ``check_address``, before there is a connection: for each attempt anew, of a name where a proxy connects."""
    host = urlsplit(url).hostname or ""
    flags = socket.AI_NUMERICHOST if not proxied else 0  # the address of a name that we connect to is looked at then
    try:
        found = socket.getaddrinfo(host, None, flags=flags)
    except (OSError, ValueError):
        if not proxied:
            return
        raise SendError(
            f"{host} cannot be resolved here, and the proxy may connect to a private address: set"
            " `allow_private: true` if you trust the name"
        ) from None
    for one in found:
        check_address(str(one[4][0]))
