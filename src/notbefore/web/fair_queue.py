"""``FairQueue``: in which order passwords are checked, so that a guesser does not keep others out. Pure.

Addresses take turns, those without failures first. After each failure an address waits longer for its next turn. The
logins of one address are checked in the order in which they came, those of a connection that has just failed last. All
times are monotonic seconds.
"""

import ipaddress
import math
from typing import Any, Final

from msgspec import Struct

PER_ADDRESS: Final = 8  # logins of one address that wait
TOTAL: Final = 256  # logins that wait
PATIENCE: Final = 10.0  # seconds that a login waits; Prometheus gives up a scrape by then
FIRST_DELAY: Final = 0.05  # seconds after the first failure; each one more doubles it
# seconds; behind a proxy others share the address, and all who wait there are checked within 5 s
LONGEST_DELAY: Final = 0.5
FORGOTTEN_AFTER: Final = 600.0  # seconds without a failure
KNOWN_ADDRESSES: Final = 1024  # with failures; the oldest are forgotten


class WaitingLogin(Struct, eq=False):
    """A request whose password is to be checked. ``request`` is opaque."""

    address: str
    since: float
    request: Any
    failed: bool = False  # the last one of this connection was wrong


class _Failures(Struct):
    count: int
    last: float


def network_of(address: str) -> str:
    """The address as one client: IPv4 whole, of IPv6 the first 64 bits, of which everybody has as many as he likes."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class FairQueue:
    """The logins that wait, and the failures of each address. Not safe for several threads."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[WaitingLogin]] = {}
        self._failures: dict[str, _Failures] = {}  # in the order of their last failure
        self._turns: dict[str, float] = {}  # of addresses that wait: when they had their last turn

    def put(self, login: WaitingLogin) -> WaitingLogin | None:
        """Add a login; returns one that has to go for lack of room, perhaps the same."""
        mine = self._waiting.setdefault(login.address, [])
        mine.append(login)
        if len(mine) > PER_ADDRESS:
            return self._remove(max(mine, key=_rank))
        if sum(map(len, self._waiting.values())) > TOTAL:
            longest = max(self._waiting.values(), key=len)
            return self._remove(max(longest, key=_rank))
        return None

    def take(self, now: float) -> WaitingLogin | None:
        """The login that is next; ``None`` where none waits or every address has to wait."""
        ready = [address for address in self._waiting if self._next_turn(address, now) <= now]
        if not ready:
            return None
        address = min(ready, key=lambda one: (one in self._failures, self._turns.get(one, -math.inf)))
        self._turns[address] = now
        return self._remove(min(self._waiting[address], key=_rank))

    def expired(self, now: float) -> list[WaitingLogin]:
        """Remove those that have waited too long."""
        late = [one for waiting in self._waiting.values() for one in waiting if now - one.since >= PATIENCE]
        return [self._remove(one) for one in late]

    def wait(self, now: float) -> float:
        """Seconds until there is something to do; infinite where nothing waits."""
        turns = [self._next_turn(address, now) for address in self._waiting]
        ends = [one.since + PATIENCE for waiting in self._waiting.values() for one in waiting]
        return max(0.0, min([*turns, *ends], default=math.inf) - now)

    def record(self, address: str, now: float, *, right: bool) -> None:
        """What came of a password."""
        before = self._failures.pop(address, None)
        if right:
            return
        count = 1 if before is None or now - before.last > FORGOTTEN_AFTER else before.count + 1
        self._failures[address] = _Failures(count, now)
        while len(self._failures) > KNOWN_ADDRESSES:
            self._failures.pop(next(iter(self._failures)))

    def _next_turn(self, address: str, now: float) -> float:
        failures = self._failures.get(address)
        if failures is None or now - failures.last > FORGOTTEN_AFTER:
            return now
        delay = LONGEST_DELAY if failures.count > 10 else FIRST_DELAY * 2 ** (failures.count - 1)  # noqa: PLR2004 - no overflow
        return failures.last + min(delay, LONGEST_DELAY)

    def _remove(self, login: WaitingLogin) -> WaitingLogin:
        waiting = self._waiting[login.address]
        waiting.remove(login)
        if not waiting:
            del self._waiting[login.address]
            self._turns.pop(login.address, None)
        return login


def _rank(login: WaitingLogin) -> tuple[bool, float]:
    """The least is checked first, the greatest is refused first."""
    return login.failed, login.since
