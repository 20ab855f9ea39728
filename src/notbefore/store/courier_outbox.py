"""``CourierOutbox``: the outbox for the courier, wherever it is now."""

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, TypeVar

from msgspec.structs import replace

from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.errors import StoreError
from notbefore.store import spare
from notbefore.store.agent_outbox import AgentOutbox
from notbefore.store.disk import DiskHangsError, DiskThread
from notbefore.store.outbox import CourierTurn, Outbox, OutboxMoved
from notbefore.store.outbox_intake import MAX_ROWS
from notbefore.store.schema import BUSY_SECONDS

T = TypeVar("T")
AnyOutbox = Outbox | AgentOutbox
REMEMBERED: Final = 30.0  # seconds: longer than the agent puts in again (``store.state.RECENT``)


class CourierOutbox:
    """The outbox of the state file, or of the spare one while that is in use; for one thread at a time.

    It follows a state file that is deleted, replaced or set aside, and waits for a disk that hangs no longer than a
    deadline. ``agent``: where the outbox is from ``use_agent`` on, in neither file. Methods raise ``sqlite3.Error``.
    """

    def __init__(self, state_file: Path, spare_file: Path | None, agent: AgentOutbox | None = None) -> None:
        self._agent = agent
        self._in_agent = False
        self._state_file = state_file
        self._spare_file = spare_file
        self._disk = DiskThread()
        self._main: Outbox | None = None  # used in that thread alone
        self._spare: Outbox | None = None
        self._held: set[str] = set()  # what the courier has been given, and has not reported
        self._delivered: deque[DeliveryResult] = deque(maxlen=MAX_ROWS)  # in the last seconds, oldest first
        self._moved_there = False  # and it has not been asked yet
        self._doubtful = False  # in the state file more may be leased than that
        self._run_once: Collection[str] = ()
        self._released = False  # what the courier before has left, somewhere,
        self._released_main = False  # in the state file

    def release_leases(self, now: float, run_once: Collection[str] = ()) -> list[Delivery]:
        """See ``Outbox``."""
        self._run_once = run_once
        return self._do(lambda outbox: self._release(outbox, now, run_once))

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """See ``Outbox``."""
        leased = self._do(lambda outbox: outbox.exchange(turn))
        self._held -= {result.delivery_id for result in turn.results}
        self._delivered.extend(one for one in turn.results if one.result == "delivered" and one.repeat is None)
        while self._delivered and self._delivered[0].time <= turn.now - REMEMBERED:
            self._delivered.popleft()
        self._held |= {delivery.delivery_id for delivery in leased}
        return leased

    def sinks_with_work(self) -> set[str]:
        """See ``Outbox``."""
        return self._do(lambda outbox: outbox.sinks_with_work())

    def use_agent(self) -> None:
        """From now on, and until the agent says otherwise, the outbox is in its process."""
        self._in_agent = self._moved_there = self._agent is not None

    def close(self) -> None:
        """Close the files."""
        self._close_spare()
        try:
            self._disk.do(self._close_main)
        except DiskHangsError:
            return
        self._disk.end()

    def _do(self, action: Callable[[AnyOutbox], T]) -> T:
        try:
            try:
                return self._once(action)
            except OutboxMoved:
                return self._once(action)
        except (DiskHangsError, StoreError) as error:  # StoreError: the file is being replaced
            raise sqlite3.OperationalError(str(error)) from None

    def _once(self, action: Callable[[AnyOutbox], T]) -> T:
        if self._in_agent and self._agent is not None:
            try:
                if self._moved_there:
                    self._arrive(self._agent)
                    self._moved_there = False
                return action(self._agent)
            except OutboxMoved:
                self._in_agent = False
                raise
        if self._spare_file is not None and self._is_in_spare():
            return action(self._open_spare(self._spare_file))
        self._close_spare()
        try:
            return self._disk.do(lambda: self._with_main(action), needless=self._is_in_spare)
        except DiskHangsError:
            self._doubtful = True
            if self._is_in_spare():
                raise OutboxMoved("the agent has given the disk up") from None
            raise

    def _is_in_spare(self) -> bool:
        return self._spare_file is not None and spare.is_there(self._spare_file)

    def _with_main(self, action: Callable[[AnyOutbox], T]) -> T:
        if self._main is None or self._main.moved:
            self._close_main()
            self._main = Outbox(self._state_file, BUSY_SECONDS, unless=self._is_in_spare)
        if self._released and not self._released_main:  # this courier began elsewhere
            self._release(self._main, time.time(), self._run_once)
        elif self._doubtful:  # its disk may have leased something when nobody waited for it any more
            self._release(self._main, time.time())
        self._doubtful = False
        return action(self._main)

    def _release(self, outbox: AnyOutbox, now: float, run_once: Collection[str] = ()) -> list[Delivery]:
        left = outbox.release_leases(now, run_once, self._held)
        self._released, self._released_main = True, self._released_main or outbox is self._main
        return left

    def _open_spare(self, path: Path) -> Outbox:
        if self._spare is None or self._spare.moved:
            self._close_spare()
            opened = Outbox(path, BUSY_SECONDS)
            try:
                spare.catch_up(opened, self._state_file)
                self._arrive(opened)
            except sqlite3.Error:
                opened.close()
                raise
            self._spare = opened
        return self._spare

    def _arrive(self, outbox: AnyOutbox) -> None:
        if not self._released:
            return
        self._release(outbox, time.time())
        # the agent, if it could not read the state file, has put in again what it wrote there just before
        known = [replace(result, counted=True) for result in self._delivered]
        outbox.exchange(CourierTurn(known, {}, time.time()))

    def _close_main(self) -> None:
        if self._main is not None:
            self._main.close()
            self._main = None

    def _close_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None
