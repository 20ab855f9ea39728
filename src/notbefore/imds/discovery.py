"""Find IMDS for a VM without 169.254.169.254: look at one place after the other until something answers as IMDS does.

An address in a lease, in the environment or in the registry is only a candidate. It is used if it answers with a
Scheduled Events document.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from notbefore.core.document import parse
from notbefore.errors import ConfigError, DocumentError, ImdsError
from notbefore.imds.client import ImdsClient, may_be_elsewhere
from notbefore.imds.inform import CannotAskError, inform
from notbefore.imds.leases import MAX_LEASE, from_dhclient, from_network_manager, from_networkd, from_packet

VARIABLE: Final = "SCHEDULEDEVENTSIP"  # the name in Microsoft's sample
REGISTRY_KEY: Final = r"Software\ScheduledEvents"  # as above, on Windows
REGISTRY_VALUE: Final = "ScheduledEventsIp"
PROBE_TIMEOUT: Final = 10.0  # seconds
MAX_FILES: Final = 32

Parser = Callable[[bytes], str | None]
# the DHCP client, where its leases are, how they are read; Azure's images use the first one today
LEASES: Final[tuple[tuple[str, tuple[str, ...], Parser], ...]] = (
    ("systemd-networkd", ("run/systemd/netif/leases/*",), from_networkd),
    (
        "dhclient",
        ("var/lib/dhcp/dhclient*.lease*", "var/lib/dhclient/*.lease*", "var/lib/NetworkManager/dhclient-*.lease"),
        from_dhclient,
    ),
    (
        "NetworkManager",
        ("run/NetworkManager/devices/*", "var/lib/NetworkManager/internal-*.lease"),
        from_network_manager,
    ),
    ("dhcpcd", ("var/lib/dhcpcd/*.lease", "var/lib/dhcpcd5/*.lease", "var/db/dhcpcd/*.lease"), from_packet),
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
    ask_network: Callable[[], str | None] = inform
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
        for name, patterns, parser in LEASES:
            yield from self._leases(name, patterns, parser)
        try:
            yield _candidate("DHCP INFORM", self._places.ask_network(), "no answer with option 245")
        except CannotAskError as error:
            yield SearchStep("DHCP INFORM", why=str(error))
        try:
            yield _candidate("Windows registry", self._places.registry(), "not on this system")
        except OSError as error:
            yield SearchStep("Windows registry", why=str(error.strerror or error))

    def _leases(self, name: str, patterns: tuple[str, ...], parser: Parser) -> Iterator[SearchStep]:
        unreadable = [folder for folder in self._folders(patterns) if not _is_readable(folder)]
        why = f"{unreadable[0]}: not readable for this user" if unreadable else "no lease"
        for path in self._newest(patterns):
            try:
                address = parser(_tail(path))
            except OSError as error:
                why = f"{path}: {error.strerror}"
                continue
            if address is not None:
                yield SearchStep(f"{name} (option 245)", f"http://{address}", why=f"in {path}")
                return
            why = f"{path}: no option 245"
        yield SearchStep(f"{name} (option 245)", why=why)

    def _folders(self, patterns: tuple[str, ...]) -> Iterator[Path]:
        return (self._places.root / Path(pattern).parent for pattern in patterns)

    def _newest(self, patterns: tuple[str, ...]) -> list[Path]:
        found = [path for pattern in patterns for path in self._places.root.glob(pattern)]
        return sorted(found, key=_age)[:MAX_FILES]

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
