"""``StoredOutbox``: an outbox with a lock and a clock, for several threads."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from notbefore.core.delivery import Delivery, Targets
from notbefore.core.outbox import Outbox, SendResult
from notbefore.core.routing import Terms
from notbefore.metrics.totals import OutboxView, view_of

log = logging.getLogger("notbefore.store")


class StoreClock(Protocol):
    """The clocks of this machine (``process.clock.Clock``)."""

    boot_id: str  # distinguishes this boot of the machine from others

    def time(self) -> float:
        """Return the time of the wall clock, in Unix seconds."""

    def boot_time(self) -> float:
        """Return the seconds since the boot, on a clock that cannot be set."""


class StoredOutbox:
    """An outbox for several threads.

    ``to_deliver`` is called when there may be something to deliver; it must not wait.
    """

    def __init__(self, outbox: Outbox, clock: StoreClock, to_deliver: Callable[[], None]) -> None:
        self._outbox = outbox
        # the lock of all that is remembered; never held while the disk is used
        self._memory_lock = threading.Condition()
        self._clock = clock
        self._to_deliver = to_deliver
        self._open_steps = 0  # the calls of ``opened`` that have not ended

    def _save_changes(self) -> None:
        """Save what has changed. Called after each change, with the lock held."""

    @contextmanager
    def opened(self, *, by_courier: bool = False) -> Iterator[tuple[Outbox, float]]:
        """Give the outbox and the time on its clock, with the lock held.

        The caller must not wait meanwhile. ``by_courier``: the courier asks, so it need not be
        notified. Several changes within one ``opened`` are one step: room is made once.
        """
        with self._memory_lock:
            now = self._clock.boot_time()
            self._open_steps += 1
            try:
                yield self._outbox, now
            finally:
                self._open_steps -= 1
            if self._open_steps:
                return
            removed = self._outbox.make_room(now)
            has_changed = bool(self._outbox.rows.changed)
            self._save_changes()
        log_overflow(removed)
        if has_changed and not by_courier:
            self._to_deliver()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that do not belong to a change."""
        with self.opened() as (outbox, now):
            outbox.put(deliveries, now, self._clock.time())

    def view(self, now: float) -> OutboxView:
        """Return the present numbers of the outbox.

        ``now``: this moment in Unix seconds, by the reader's clock.
        """
        with self._memory_lock:
            return view_of(self._outbox, self._clock.boot_time(), now)

    # ---- the courier: see ``courier.supervisor``

    def exchange(
        self, results: Iterable[SendResult], limits: Mapping[str, int]
    ) -> Sequence[Delivery]:
        """Record results, and return due deliveries.

        ``limits``: how many deliveries each sink may have at a time.
        """
        with self.opened(by_courier=True) as (outbox, now):
            return outbox.exchange(list(results), limits, now)

    def under_way(self) -> Sequence[Delivery]:
        """Return the deliveries that a courier has."""
        with self._memory_lock:
            return self._outbox.rows.under_way

    def courier_ended(self, ids: Collection[str] | None = None) -> None:
        """Make the deliveries of an ended courier due again: those with these ids, or all.

        Those that may be attempted only once are dead.
        """
        with self.opened(by_courier=True) as (outbox, now):
            for row in outbox.release(now, ids):
                log.error(
                    "sink %s: `%s` of event %s: %s", row.sink, row.kind, row.event_key, row.error
                )
            _log_redirected(outbox.redirect(now))

    def redirect(self) -> None:
        """Move the deliveries of removed sinks to those of the present routes."""
        with self.opened(by_courier=True) as (outbox, now):
            _log_redirected(outbox.redirect(now))

    def next_due(self) -> float:
        """Return the seconds until a courier is needed.

        0 or less: now. Infinite: nothing waits.
        """
        with self._memory_lock:
            return self._outbox.rows.next_due() - self._clock.boot_time()

    def use_sinks(self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets]) -> None:
        """Set the configured sinks.

        ``targets`` returns where the routes send a delivery whose sink was removed.
        """
        with self.opened(by_courier=True) as (outbox, now):
            _log_redirected(outbox.use_sinks(terms, targets, now))


def _log_redirected(rows: Iterable[Delivery]) -> None:
    counts = Counter(row.sink for row in rows)
    for sink, count in counts.items():
        log.warning(
            "sink %s is no longer configured: %d waiting deliveries go to the sinks of"
            " the present routes, and are dead if no route gives another sink (`notbefore outbox"
            " list`)",
            sink,
            count,
        )


def log_overflow(removed: Sequence[Delivery]) -> None:
    """Log how many deliveries were removed from a full outbox, if any."""
    if not removed:
        return
    counts = Counter(row.sink for row in removed)
    sinks = ", ".join(f"{sink}: {count}" for sink, count in sorted(counts.items()))
    log.error(
        "the outbox is full: %d deliveries are removed and not sent (%s)", len(removed), sinks
    )


def log_left_open(left_open: Iterable[tuple[str, str]]) -> None:
    """Log what stays open after its event: pairs of a removed sink and an EventId."""
    for sink, event_id in left_open:
        log.warning(
            "sink %s is no longer configured, so it does not get the end of event %s: close by hand"
            " what is still open there",
            sink,
            event_id,
        )
