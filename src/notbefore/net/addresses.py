"""The guard of addresses: a request of a webhook leads to public addresses only."""

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from notbefore.errors import SendError

# the unicast addresses of the internet; all others are not public
UNICAST: Final = (
    ipaddress.ip_network("0.0.0.0/1"),
    ipaddress.ip_network("128.0.0.0/2"),
    ipaddress.ip_network("192.0.0.0/3"),
    ipaddress.ip_network("2000::/3"),
)
# special-purpose addresses of IANA's registries that lie within them; some versions of Python's
# ``ipaddress`` take these for global
SPECIAL: Final = (
    ipaddress.ip_network("168.63.129.16/32"),  # Azure's host agent: as private as IMDS
    ipaddress.ip_network("192.0.0.0/24"),  # IETF protocols; one of them is another cloud's IMDS
    ipaddress.ip_network("192.88.99.0/24"),  # relays of 6to4, deprecated
    ipaddress.ip_network("2001::/23"),  # IETF protocols; Teredo, which contains an IPv4 address
    ipaddress.ip_network("2002::/16"),  # 6to4, which contains an IPv4 address
    ipaddress.ip_network("3fff::/20"),  # documentation
)
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are the reached IPv4 address

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_address(address: str) -> None:
    """Raise ``SendError`` for an address that is not public."""
    ip = _destination(ipaddress.ip_address(address.partition("%")[0]))
    is_unicast = any(ip in network for network in UNICAST)
    is_special = any(ip in network for network in SPECIAL)
    if is_special or not is_unicast or not ip.is_global:
        raise SendError(
            f"{ip} is not a public address: set `allow_private: true` if it is the right one",
            permanent=True,
        )


def _destination(ip: IPAddress) -> IPAddress:
    """Return the IPv4 address that an IPv6 address stands for; any other address as it is."""
    if not isinstance(ip, ipaddress.IPv6Address):
        return ip
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip


def check_host(host: str) -> None:
    """Raise ``SendError`` if an address of a host is not public.

    Raises ``OSError`` or ``ValueError`` if the host cannot be resolved.
    """
    for *_, endpoint in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        check_address(str(endpoint[0]))


def check_proxied(url: str) -> None:
    """Raise ``SendError`` if the host to which a proxy is to connect is not public.

    Also raise it if the host cannot be resolved here: the proxy may know a private address of it.
    """
    host = urlsplit(url).hostname or ""
    try:
        check_host(host)
    except (OSError, ValueError):
        raise SendError(
            f"{host} cannot be resolved here, and the proxy may connect to a private address: set"
            " `allow_private: true` if you trust the name"
        ) from None
