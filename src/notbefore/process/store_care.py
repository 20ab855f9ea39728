"""``StoreCare`` has the store write what it could not write before, and notice that its file was deleted."""

from typing import Final

from notbefore.process.clock import Clock
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.state import Store

RETRY_INTERVAL: Final = 2.0  # seconds between attempts to write a state that could not be written
LOOK_INTERVAL: Final = 30.0  # seconds between looks at the state file, while what it holds can be read


class StoreCare:
    """``outbox``: what is read of the store all the time, so it shows first that the file is gone."""

    def __init__(self, store: Store, outbox: OutboxReader, clock: Clock) -> None:
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._retried = self._looked = clock.monotonic()

    def tick(self, *, trouble: bool) -> None:
        """To be called each few seconds; ``trouble``: the courier cannot use the outbox."""
        now = self._clock.monotonic()
        if trouble or not self._outbox.readable or now - self._looked >= LOOK_INTERVAL:
            self._looked = now
            self._store.look_after(writes=trouble)
        if self._store.degraded and now - self._retried >= RETRY_INTERVAL:
            self._retried = now
            self._store.retry()
