"""Find IMDS for a VM without 169.254.169.254: look at one place after the other until something answers as IMDS does.

An address in a lease or in the environment is only a candidate. It is used if it answers with a Scheduled Events
document. In a lease it is DHCP option 245; what cannot be understood there is no address.
"""

import errno
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.document import parse
from notbefore.errors import ConfigError, DocumentError, ImdsError
from notbefore.imds.client import ImdsClient, may_be_elsewhere

VARIABLE: Final = "SCHEDULEDEVENTSIP"  # the name in Microsoft's sample
PROBE_TIMEOUT: Final = 10.0  # seconds
MAX_FILES: Final = 32
MAX_LEASE: Final = 256 * 1024  # bytes; dhclient appends to its file for ever

# the DHCP client, and where its leases are: those of Azure Linux, Ubuntu and Debian; of RHEL; of Debian
LEASES: Final = (
    ("systemd-networkd", "run/systemd/netif/leases/*"),
    ("NetworkManager", "run/NetworkManager/devices/*"),
    ("dhclient", "var/lib/dhcp/dhclient*.lease*"),
)
# as the three write it: OPTION_245=a83f8110, private_245=a8:3f:81:10, option unknown-245 a8:3f:81:10;
_OPTION: Final = re.compile(
    rb"^\s*(?:OPTION_245=|private_245=|unknown_245=|option unknown-245 )(.{1,60}?);?\s*$", re.MULTILINE
)
_QUOTED: Final = re.compile(rb'"(.*)"', re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)


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


def search(
    configured: str, api_version: str, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Iterator[SearchStep]:
    """Look at one place after the other, the configured one first; ends after the first that answers."""
    for candidate in _candidates(configured, environment, root):
        why = _probe(candidate.found, api_version) if candidate.found else candidate.why
        answers = bool(candidate.found) and not why
        yield replace(candidate, answers=answers, why=why or candidate.why)
        if answers:
            return


def _candidates(configured: str, environment: Mapping[str, str], root: Path) -> Iterator[SearchStep]:
    yield SearchStep("configuration", configured)
    if not may_be_elsewhere(configured):
        return
    address = environment.get(VARIABLE, "")
    found = address if not address or "://" in address else f"http://{address}"
    yield SearchStep(f"environment ({VARIABLE})", found, why="" if found else "not set")
    for client, pattern in LEASES:
        yield _leases(f"{client} (option 245)", root, pattern)


def _leases(place: str, root: Path, pattern: str) -> SearchStep:
    """The address in the newest lease that has one."""
    folder = (root / pattern).parent
    hidden = os.access(folder, os.F_OK) and not os.access(folder, os.R_OK | os.X_OK)
    why = "not readable for this user" if hidden else "no lease"
    for path in sorted(root.glob(pattern), key=_age)[:MAX_FILES]:
        try:
            address = address_in(_tail(path))
        except OSError as error:
            why = f"{path}: {error.strerror}"
            continue
        if address is not None:
            return SearchStep(place, f"http://{address}", why=f"in {path}")
        why = f"{path}: no option 245"
    return SearchStep(place, why=why)


def _probe(endpoint: str, api_version: str) -> str:
    """Return why this is not IMDS; empty if it is."""
    try:
        client = ImdsClient(endpoint)
    except ConfigError as error:
        return str(error)
    try:
        path = f"/metadata/scheduledevents?api-version={api_version}"
        parse(client.get(path, timeout=PROBE_TIMEOUT).body)
    except ImdsError as error:
        return str(error)
    except DocumentError as error:
        return f"the answer is not a Scheduled Events document ({error})"
    finally:
        client.close()
    return ""


def address_in(lease: bytes) -> str | None:
    """The IPv4 address in the last option 245 that has one, as the newest lease comes last; ``None`` without one."""
    for written in reversed(_OPTION.findall(lease)):
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


def _tail(path: Path) -> bytes:
    """Return the end of a file, where a lease file has its newest lease; raises ``OSError``."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no file")
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LEASE))
        return file.read(MAX_LEASE)
