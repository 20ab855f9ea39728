"""Finds IMDS for a VM without 169.254.169.254, in places that may contain its address.

An address from a lease, the environment or the registry is only a candidate. It is used if it
answers with a Scheduled Events document. In a lease it is DHCP option 245; a value that is not an
IPv4 address is ignored.
"""

import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from notbefore.core.document import ENDPOINT, parse
from notbefore.errors import ConfigError, DocumentError, ImdsError
from notbefore.imds.client import ImdsClient, events_path

VARIABLE: Final = "SCHEDULEDEVENTSIP"  # the name in Microsoft's sample
# that sample can write the address to this key of HKEY_LOCAL_MACHINE
REGISTRY_KEY: Final = r"Software\ScheduledEvents"
REGISTRY_VALUE: Final = "ScheduledEventsIp"
PROBE_TIMEOUT: Final = 10.0  # seconds
MAX_FILES: Final = 32
MAX_LEASE: Final = 256 * 1024  # bytes; dhclient appends to its file for ever

# of systemd-networkd (Azure Linux, Ubuntu, Debian), NetworkManager (RHEL) and dhclient (Debian)
LEASES: Final = (
    "run/systemd/netif/leases/*",
    "run/NetworkManager/devices/*",
    "var/lib/dhcp/dhclient*.lease*",
)
# as these three write it: OPTION_245=a83f8110, private_245=a8:3f:81:10, option unknown-245
# a8:3f:81:10;
_OPTION: Final = re.compile(
    rb"^\s*(?:OPTION_245=|private_245=|unknown_245=|option unknown-245 )([0-9a-fA-F:]{1,60});?\s*$",
    re.MULTILINE,
)


def candidates(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Iterator[tuple[str, str]]:
    """Yield the endpoints where IMDS may be, as (place, endpoint), in the order to try them."""
    yield "the usual address", ENDPOINT

    address = environment.get(VARIABLE, "").strip()
    if address:
        yield VARIABLE, _endpoint(address)
    address = registry_address()
    if address:
        yield "the registry", _endpoint(address)

    for pattern in LEASES:
        with suppress(OSError):  # a file is gone, or cannot be read
            yield from _newest_lease(root, pattern)


def _endpoint(address: str) -> str:
    if "://" in address:
        return address
    return f"http://{address}"


if sys.platform == "win32":
    import winreg

    def registry_address() -> str:
        """Return the address in the registry of Windows; empty without one."""
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, REGISTRY_KEY) as key:
                value, _type = winreg.QueryValueEx(key, REGISTRY_VALUE)
        except OSError:  # there is no such key or value
            return ""
        if not isinstance(value, str):
            return ""
        return value.strip()

else:

    def registry_address() -> str:
        """Return nothing: only Windows has a registry."""
        return ""


def _newest_lease(root: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the endpoint in the newest lease of one DHCP client; older ones have older addresses.

    Raises ``OSError``.
    """
    files = [path for path in root.glob(pattern) if path.is_file()]
    files.sort(key=_modified, reverse=True)
    for path in files[:MAX_FILES]:
        address = address_in(_tail(path))
        if address:
            yield str(path), f"http://{address}"
            return


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def why_not(endpoint: str, api_version: str) -> str:
    """Return why IMDS is not at an endpoint, in words; empty if it is."""
    try:
        with closing(ImdsClient(endpoint)) as client:
            answer = client.get(events_path(api_version), timeout=PROBE_TIMEOUT)
            parse(answer.body)
    except (ConfigError, ImdsError) as error:
        return str(error)
    except DocumentError as error:
        return f"the answer is not a Scheduled Events document ({error})"
    return ""


def address_in(lease: bytes) -> str:
    """Return the IPv4 address in the last, newest option 245 that has one; empty without one."""
    for value in reversed(_OPTION.findall(lease)):
        address = _address(value.decode("ascii"))
        if address is not None and _may_be_imds(address):
            return str(address)
    return ""


def _address(value: str) -> ipaddress.IPv4Address | None:
    """Return the address that ``a83f8110`` or ``a8:3f:81:10`` means; ``None`` for another form."""
    if ":" in value:
        parts = value.split(":")
    else:
        parts = [value[begin : begin + 2] for begin in range(0, len(value), 2)]
    try:
        return ipaddress.IPv4Address(bytes(int(part, 16) for part in parts))
    except ValueError:
        return None


def _may_be_imds(address: ipaddress.IPv4Address) -> bool:
    if address.is_unspecified or address.is_loopback:
        return False
    return not (address.is_multicast or address.is_reserved)


def _tail(path: Path) -> bytes:
    """Return the end of a file: it has the newest lease."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LEASE))
        return file.read(MAX_LEASE)
