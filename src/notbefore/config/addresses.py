"""The public addresses: a webhook is sent to no other, unless its settings allow it."""

import ipaddress
from typing import Final

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


def not_public(address: str) -> str:
    """Return why no webhook may be sent to an address; an empty text if it is public.

    Raises ``ValueError`` for a host name.
    """
    ip = _destination(ipaddress.ip_address(address.partition("%")[0]))
    is_unicast = any(ip in network for network in UNICAST)
    is_special = any(ip in network for network in SPECIAL)
    if is_unicast and not is_special and ip.is_global:
        return ""
    return f"{ip} is not a public address: set `allow_private: true` if it is the right one"


def _destination(ip: IPAddress) -> IPAddress:
    """Return the IPv4 address that an IPv6 address stands for; any other address as it is."""
    if not isinstance(ip, ipaddress.IPv6Address):
        return ip
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip
