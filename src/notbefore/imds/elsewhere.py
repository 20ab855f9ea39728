"""Find IMDS for a VM without 169.254.169.254: look at one place after the other until something answers as IMDS does.

An address in a lease, in the environment or in the registry is only a candidate. It is used if it answers with a
Scheduled Events document. In a lease it is DHCP option 245; what cannot be understood there is no address.
"""

import errno
import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from notbefore.core.document import parse
from notbefore.errors import ConfigError, DocumentError, ImdsError
from notbefore.imds.client import ImdsClient, may_be_elsewhere

VARIABLE: Final = "SCHEDULEDEVENTSIP"  # the name in Microsoft's sample
REGISTRY_KEY: Final = r"Software\ScheduledEvents"  # as above, on Windows
REGISTRY_VALUE: Final = "ScheduledEventsIp"
PROBE_TIMEOUT: Final = 10.0  # seconds
MAX_FILES: Final = 32
MAX_LEASE: Final = 256 * 1024  # bytes; dhclient appends to its file for ever

_NETWORKD: Final = re.compile(rb"^OPTION_245=(\S+)\s*$", re.MULTILINE)
_NETWORK_MANAGER: Final = re.compile(rb"^(?:private|unknown)_245=(\S+)\s*$", re.MULTILINE)
_DHCLIENT: Final = re.compile(rb"^\s*option unknown-245 (.{1,60});\s*$", re.MULTILINE)
_QUOTED: Final = re.compile(rb'"(.*)"', re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)

# the DHCP client, where its leases are, the option in them: those of Azure Linux, Ubuntu and Debian; of RHEL; of Debian
LEASES: Final = (
    ("systemd-networkd", "run/systemd/netif/leases/*", _NETWORKD),
    ("NetworkManager", "run/NetworkManager/devices/*", _NETWORK_MANAGER),
    ("dhclient", "var/lib/dhcp/dhclient*.lease*", _DHCLIENT),
)


class SearchStep(Struct, frozen=True):
    """One place: the endpoint found there, whether it answers as IMDS does, and if not, why."""

    place: str
    found: str = ""  # an endpoint
    answers: bool = False
    why: str = ""

    def __str__(self) -> str:
        """Return it as one line for people."""
        if not self.found:
            return f"{self.place}: {self.why}"
        result = "answers" if self.answers else "is not IMDS"
        return f"{self.place}: {self.found} {result}" + (f": {self.why}" if self.why else "")


def read_registry() -> str | None:
    """Return the value in Windows' registry, ``None`` on other systems; raises ``OSError`` if there is none."""
    try:
        import winreg  # noqa: PLC0415 - only on Windows
    except ImportError:
        return None
    key = winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, REGISTRY_KEY)  # type: ignore[attr-defined,unused-ignore]  # Windows
    with key:
        return str(winreg.QueryValueEx(key, REGISTRY_VALUE)[0])  # type: ignore[attr-defined,unused-ignore]  # as above


class Places(Struct, frozen=True):
    """The places to look at on this machine."""

    environment: Mapping[str, str] = os.environ
    root: Path = Path("/")
    registry: Callable[[], str | None] = read_registry


class Discovery:
    """Looks for IMDS, first at the configured endpoint."""

    def __init__(self, configured: str, api_version: str, places: Places | None = None) -> None:
        self._configured = configured
        self._path = f"/metadata/scheduledevents?api-version={api_version}"
        self._places = places or Places()

    def search(self) -> Iterator[SearchStep]:
        """Look at one place after the other; ends after the first that answers."""
        asked: dict[str, str] = {}  # endpoint -> why it is not IMDS
        for candidate in self._candidates():
            if not candidate.found:
                yield candidate
                continue
            if candidate.found not in asked:
                asked[candidate.found] = self._probe(candidate.found)
            why = asked[candidate.found]
            yield SearchStep(candidate.place, candidate.found, not why, why or candidate.why)
            if not why:
                return

    def _candidates(self) -> Iterator[SearchStep]:
        yield SearchStep("configuration", self._configured)
        if not may_be_elsewhere(self._configured):
            return
        yield _candidate(f"environment ({VARIABLE})", self._places.environment.get(VARIABLE), "not set")
        for name, pattern, option in LEASES:
            yield self._leases(f"{name} (option 245)", pattern, option)
        try:
            yield _candidate("Windows registry", self._places.registry(), "not on this system")
        except OSError as error:
            yield SearchStep("Windows registry", why=str(error.strerror or error))

    def _leases(self, place: str, pattern: str, option: re.Pattern[bytes]) -> SearchStep:
        """The address in the newest lease that has one."""
        why = "no lease" if _is_readable(self._places.root / Path(pattern).parent) else "not readable for this user"
        for path in sorted(self._places.root.glob(pattern), key=_age)[:MAX_FILES]:
            try:
                address = address_in(_tail(path), option)
            except OSError as error:
                why = f"{path}: {error.strerror}"
                continue
            if address is not None:
                return SearchStep(place, f"http://{address}", why=f"in {path}")
            why = f"{path}: no option 245"
        return SearchStep(place, why=why)

    def _probe(self, endpoint: str) -> str:
        """Return why this is not IMDS; empty if it is."""
        try:
            client = ImdsClient(endpoint)
        except ConfigError as error:
            return str(error)
        try:
            parse(client.get(self._path, timeout=PROBE_TIMEOUT).body or b"")
        except ImdsError as error:
            return str(error)
        except DocumentError as error:
            return f"the answer is not a Scheduled Events document ({error})"
        finally:
            client.close()
        return ""


def _candidate(place: str, address: str | None, otherwise: str) -> SearchStep:
    if not address:
        return SearchStep(place, why=otherwise)
    return SearchStep(place, address if "://" in address else f"http://{address}")


def address_in(lease: bytes, option: re.Pattern[bytes]) -> str | None:
    """The IPv4 address in the last option that has one, as the newest lease comes last; ``None`` without one."""
    for written in reversed(option.findall(lease)):
        try:
            address = ipaddress.IPv4Address(_octets(written))
        except ValueError:
            continue
        if not (address.is_unspecified or address.is_multicast or address.is_loopback or address.is_reserved):
            return str(address)
    return None


def _octets(written: bytes) -> bytes:
    """Bytes as clients write them: ``a83f8110``, ``a8:3f:81:10``, or quoted where all are printable.

    Raises ``ValueError`` for anything else.
    """
    if quoted := _QUOTED.fullmatch(written):
        return _ESCAPE.sub(_unescaped, quoted[1])
    if b":" in written:
        return bytes(int(part, 16) for part in written.split(b":"))
    return bytes.fromhex(written.decode("ascii"))


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else code  # noqa: PLR2004 - octal


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # gone, or not readable: reading it will give the reason
        return 0.0


def _is_readable(folder: Path) -> bool:
    """Return whether a folder can be listed; ``True`` also where there is none."""
    try:
        next(folder.iterdir(), None)
    except PermissionError:
        return False
    except OSError:  # not there, or not a folder
        return True
    return True


def _tail(path: Path) -> bytes:
    """Return the end of a file, where a lease file has its newest lease; raises ``OSError``."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no file")
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LEASE))
        return file.read(MAX_LEASE)
