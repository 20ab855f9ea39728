"""``Consumer``: the thread of ``notbefore fleet`` that reads the hub, again and again, with a ``Reader``."""

import asyncio
import concurrent.futures
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from notbefore.config.fleet import FleetConfig
from notbefore.core.duration import back_off
from notbefore.fleet.hub_errors import explained, store_explained
from notbefore.fleet.keeper import Keeper, Parts, write_history
from notbefore.fleet.others import Others
from notbefore.fleet.reader import Reader, ended, regularly
from notbefore.fleet.snapshot import Snapshot

HISTORY_EVERY: Final = 1.0  # seconds between two looks at what is new for the history
ASK_SECONDS: Final = 3.0  # for what other instances have written down
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0  # seconds between clients
HEALTHY: Final = 60.0  # seconds after which a client's failure is the first one again

log = logging.getLogger("notbefore.fleet.consumer")


class Consumer:
    """Runs in one thread, with an event loop of its own: ``run`` until ``stop``."""

    def __init__(self, config: FleetConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self.errors: Counter[str] = Counter()  # by part: see ``reader.Failed``
        self.trouble = ""  # why the hub could not be read at the last attempt
        self.alive = True
        self.keeper = Keeper(config, parts, self._note_error)
        self._others = Others(parts.snapshots, self.keeper.partitions)
        self.reader = Reader(config, parts, self.keeper, self._others, self._note_error)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    def others(self) -> dict[str, Snapshot]:
        """What other instances have written down of the other partitions, as of some seconds ago. From any thread."""
        if self._loop is not None and self.alive:
            # it ends; the store is slow: what is known is shown
            with suppress(RuntimeError, TimeoutError, concurrent.futures.CancelledError):
                asyncio.run_coroutine_threadsafe(self._others.look(), self._loop).result(ASK_SECONDS)
        return self._others.found

    def settled(self, partitions: set[str]) -> None:
        """Something of these partitions was accepted, or refused. From any thread."""
        self._call(partial(self.keeper.note_news, partitions))

    def stop(self) -> None:
        """Come to an end. From any thread."""
        self._call(self._end)

    def _end(self) -> None:
        self._stop.set()
        self.reader.end()

    def _call(self, do: Callable[[], None]) -> None:
        if self._loop is None:
            do()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(do)

    def run(self) -> None:
        """Read until ``stop``."""
        try:
            asyncio.run(self._run())
        finally:
            self.alive = False

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        history = asyncio.create_task(regularly(HISTORY_EVERY, "history", self._write_history, self._note_error))
        failures = 0
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    await self.reader.read()
                except Exception as error:  # noqa: BLE001 - the SDK raises many; any of them ends this client
                    self._note_error("hub", error)
                failures = 1 if time.monotonic() - began > HEALTHY else failures + 1
                pause = back_off(failures, FIRST_PAUSE, LONGEST_PAUSE) * (0.5 + random.random() / 2)  # noqa: S311 - no secret
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), pause)
        finally:
            history.cancel()
            await ended(self.keeper.write_all(), self._write_history())  # the hub may be away
            for name in list(self.keeper.partitions):
                self.keeper.forget(name)
            await ended(self._parts.snapshots.close())
            if self._parts.credential is not None:
                await ended(self._parts.credential.close())

    async def _write_history(self) -> None:
        await write_history(self._parts, self.keeper.folds)

    def _note_error(self, where: str, error: BaseException) -> None:
        self.errors[where] += 1
        if where == "hub":
            self.trouble = text = explained(error, self._config)
        else:
            text = store_explained(error) if where == "store" else f"{type(error).__name__}: {error}"
        if where == "fold":
            text = f"an error that nobody foresaw. Please report it. {text}"
        log.warning("%s: %s", where, text, exc_info=error if where == "fold" else None)
