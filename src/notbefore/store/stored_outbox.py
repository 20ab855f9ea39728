"""``StoredOutbox``: the outbox of an agent, for its courier and its commands; what changes in it is written."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct

from notbefore.core.change import Change
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import Outbox, SendResult
from notbefore.metrics.process import OutboxView, view_of

log = logging.getLogger("notbefore.store")


class StoredChange(Struct, frozen=True):
    """One change as it is kept. ``record``: the change as JSON, UTF-8. ``deliveries``: what is to be sent of it."""

    change: Change
    record: bytes
    deliveries: tuple[Delivery, ...] = ()


class StoreClock(Protocol):
    """The clocks of this machine (``process.clock.Clock``)."""

    boot_id: str  # tells this boot of the machine from another

    def time(self) -> float:
        """The wall clock, in Unix seconds."""
        ...

    def boot_time(self) -> float:
        """Seconds since the boot, by a clock that nobody sets."""
        ...


class StoredOutbox:
    """Safe to call from several threads. ``memory``: the lock of all that is remembered.

    With it held, ``stepped`` is called after each change. ``to_deliver`` is called when a courier may find something;
    it may not wait.
    """

    def __init__(
        self,
        outbox: Outbox,
        memory: threading.Condition,
        clock: StoreClock,
        stepped: Callable[[], object],
        to_deliver: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._memory = memory
        self._clock = clock
        self._stepped = stepped
        self._to_deliver = to_deliver
        self._sinks: Collection[str] | None = None  # those that are configured
        self._targets: Callable[[Delivery], Sequence[str]] = lambda _row: ()

    @contextmanager
    def opened(self, *, by_courier: bool = False) -> Iterator[tuple[Outbox, float]]:
        """The outbox, and the time on its clock, for whoever does not wait meanwhile."""
        with self._memory:
            yield self._outbox, self._clock.boot_time()
            changed = bool(self._outbox.rows.changed)
            self._stepped()
        if changed and not by_courier:
            self._to_deliver()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that no change causes."""
        with self.opened() as (outbox, now):
            outbox.put(deliveries, now, self._clock.time())

    def view(self) -> OutboxView:
        """The numbers of the outbox now."""
        with self._memory:
            return view_of(self._outbox, self._clock.boot_time(), self._clock.time())

    # ---- the courier: see ``courier.supervisor.OutboxOwner``

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[Delivery]:
        """Take in results, and give what is due; ``room``: how many deliveries a sink can take."""
        with self.opened(by_courier=True) as (outbox, now):
            return outbox.exchange(list(results), room, now)

    def courier_ended(self) -> None:
        """What the courier had is due again; what may run once is dead."""
        with self.opened(by_courier=True) as (outbox, now):
            for row in outbox.release(now):
                log.error("sink %s: `%s` of event %s: %s", row.sink, row.kind, row.event_key, row.error)
            self._redirect(outbox, now)

    def next_due(self) -> float | None:
        """Seconds until a courier is needed, 0 or less: now; ``None``: nothing waits."""
        with self._memory:
            due = self._outbox.rows.next_due()
            return None if due is None else due - self._clock.boot_time()

    def use_sinks(self, sinks: Collection[str], targets: Callable[[Delivery], Sequence[str]]) -> None:
        """From now on these are configured; ``targets``: where a delivery to another sink would go by the routes."""
        with self.opened(by_courier=True) as (outbox, now):
            self._sinks, self._targets = sinks, targets
            self._redirect(outbox, now)

    def _redirect(self, outbox: Outbox, now: float) -> None:
        if self._sinks is None:
            return
        left = Counter(row.sink for row in outbox.redirect(self._sinks, self._targets, now))
        for sink, count in left.items():
            log.warning(
                "sink %s is not configured any more: %d deliveries that wait for it go where the routes lead now, and"
                " are dead where no route names another sink (`notbefore outbox list`)", sink, count,
            )  # fmt: skip
