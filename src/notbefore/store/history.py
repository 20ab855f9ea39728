"""The records that the history in the file does not hold yet."""

import time
from collections import deque
from typing import Final

from notbefore.store.file import HistoryRecord

MAX_RECORDS: Final = 1_000  # that wait for the disk; older ones are dropped, and counted
KEEP_SECONDS: Final = 10.0  # for which those are kept that were written: a file that was deleted leaves no gap


class RecentRecords:
    """``waiting``: those that are not on disk, oldest first. Those of the last seconds are kept as well."""

    def __init__(self) -> None:
        self.waiting: list[HistoryRecord] = []
        self._taken = 0  # how many of them a transaction writes, or could not write
        self._written: deque[tuple[float, HistoryRecord]] = deque()  # in the last seconds, and when
        self._dropped = 0  # they are missing in the history

    def add(self, record: HistoryRecord) -> None:
        """It is to be written."""
        self.waiting.append(record)
        if len(self.waiting) > MAX_RECORDS:
            del self.waiting[0]
            self._taken = max(0, self._taken - 1)
            self._dropped += 1

    def take(self, *, again: bool) -> list[HistoryRecord]:
        """What is to be written now; ``again``: also what was written in the last seconds."""
        while self._written and self._written[0][0] < time.monotonic() - KEEP_SECONDS:
            self._written.popleft()
        self._taken = len(self.waiting)
        return [*(one for _, one in self._written if again), *self.waiting]

    def written(self) -> int:
        """What was taken is on disk; returns how many were dropped since the last time."""
        self._written.extend((time.monotonic(), one) for one in self.waiting[: self._taken])
        del self.waiting[: self._taken]
        dropped, self._dropped, self._taken = self._dropped, 0, 0
        return dropped

    def since(self, start: float) -> list[bytes]:
        """Those since a Unix time, newest first."""
        known = [*(one for _, one in self._written), *self.waiting]
        return [one.record for one in reversed(known) if one.time >= start]
