"""``CourierOutbox``: the outbox for the courier, wherever it is now."""

import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from notbefore.core.delivery import Delivery
from notbefore.errors import StoreError
from notbefore.store import spare
from notbefore.store.outbox import CourierTurn, Outbox, OutboxMoved
from notbefore.store.schema import BUSY_SECONDS

T = TypeVar("T")


class CourierOutbox:
    """The outbox of the state file, or of the spare one while that is in use; for one thread at a time.

    It follows a state file that is deleted, replaced or set aside. Its methods raise ``sqlite3.Error``.
    """

    def __init__(self, state_file: Path, spare_file: Path | None) -> None:
        self._state_file = state_file
        self._spare_file = spare_file
        self._outbox: Outbox | None = None

    def release_leases(self, now: float, run_once: Collection[str] = ()) -> list[Delivery]:
        """See ``Outbox``."""
        return self._do(lambda outbox: outbox.release_leases(now, run_once))

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """See ``Outbox``."""
        return self._do(lambda outbox: outbox.exchange(turn))

    def sinks_with_work(self) -> set[str]:
        """See ``Outbox``."""
        return self._do(lambda outbox: outbox.sinks_with_work())

    def close(self) -> None:
        """Close the file."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    def _do(self, action: Callable[[Outbox], T]) -> T:
        try:
            return action(self._current())
        except OutboxMoved:
            return action(self._current())

    def _current(self) -> Outbox:
        if self._outbox is not None and not self._outbox.moved:
            return self._outbox
        self.close()
        try:
            if self._spare_file is None or not self._spare_file.exists():
                self._outbox = Outbox(self._state_file, BUSY_SECONDS, unless=self._spare_file)
                return self._outbox
            outbox = Outbox(self._spare_file, BUSY_SECONDS)
        except StoreError as error:  # it is being made anew
            raise sqlite3.OperationalError(str(error)) from None
        try:
            with outbox.transaction() as db:
                spare.catch_up(db, self._state_file)
        except sqlite3.Error:
            outbox.close()
            raise
        self._outbox = outbox
        return outbox
