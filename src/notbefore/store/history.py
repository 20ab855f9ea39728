"""The history: the records that the file does not hold yet, and an answer from both."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from notbefore.store.file import MAX_SEQ, HistoryRecord

MAX_RECORDS: Final = 1_000  # that wait for the disk; older ones are dropped, and counted
KEEP_SECONDS: Final = 10.0  # for which those are kept that were written: a file that was deleted leaves no gap


class HistoryAnswer(NamedTuple):
    """Records as JSON, oldest first. ``rest``: where older ones begin that were left out, as too many bytes."""

    records: list[bytes]
    rest: int | None

    @classmethod
    def of(
        cls, unwritten: Iterable[bytes], read: Iterable[tuple[int, bytes]], limit: int, max_bytes: int
    ) -> "HistoryAnswer":
        """From what memory knows, and from what the file holds with its numbers, both newest first.

        The newest one, and those of memory, are given in any case: they have no place to go on from.
        """
        numbers: dict[bytes, int | None] = dict.fromkeys(unwritten)
        numbers |= {record: number for number, record in read}
        records, rest = list[bytes](), MAX_SEQ
        for record, number in list(numbers.items())[:limit]:
            max_bytes -= len(record)
            if records and max_bytes < 0 and number is not None:
                return cls(records[::-1], rest)
            records.append(record)
            rest = rest if number is None else number
        return cls(records[::-1], None)


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
