"""``Hub``: a simulated Event Hub's partitions, each an append-only log on disk."""

import base64
import json
import os
import time
import zlib
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One event in a partition."""

    offset: int
    enqueued: int  # Unix milliseconds
    key: str
    message: bytes


class Hub:
    """Partitions, each an append-only log."""

    def __init__(self, partitions: int, store: Path) -> None:
        self.created = int(time.time() * 1000)
        self.logs: list[list[Entry]] = [[] for _ in range(partitions)]
        if store.exists():
            whole = store.read_bytes().rpartition(b"\n")
            os.truncate(store, len(whole[0] + whole[1]))  # a torn last line was never acknowledged
            for line in whole[0].splitlines():
                row = json.loads(line)
                self._put(row["p"], row["t"], row["k"], base64.b64decode(row["m"]))
        self.created = min([self.created, *(log[0].enqueued for log in self.logs if log)])
        self._file = store.open("ab")

    def resize(self, partitions: int) -> None:
        """To so many partitions; Azure takes none away either."""
        self.logs += [[] for _ in range(partitions - len(self.logs))]

    def refusal(self, partition: int, selector: str) -> str | None:
        """Why a receiver is refused: its offset is beyond the last one; the words are Event Hubs'."""
        log, (kind, bound) = self.logs[partition], _bound(selector)
        last = log[-1].offset if log else -1
        if kind != "offset" or bound <= last:
            return None
        return f"The supplied offset '{bound}' is invalid. The last offset in the system is '{last}'"

    def _put(self, partition: int, enqueued: int, key: str, message: bytes) -> None:
        log = self.logs[partition]
        offset = log[-1].offset + len(log[-1].message) + 40 if log else 0
        log.append(Entry(offset, enqueued, key, message))

    def append(self, key: str, messages: list[bytes]) -> int:
        """Write down events, and return their partition; Azure's hash is another, and as stable."""
        now, partition = int(time.time() * 1000), zlib.crc32(key.encode()) % len(self.logs)
        for message in messages:
            row = {"p": partition, "t": now, "k": key, "m": base64.b64encode(message).decode()}
            self._file.write(json.dumps(row).encode() + b"\n")
            self._put(partition, now, key, message)
        self._file.flush()
        return partition

    def first(self, partition: int, selector: str) -> int:
        """The index of the first event that a receiver's selector lets through."""
        log, (kind, bound) = self.logs[partition], _bound(selector)
        values = (entry.offset if kind == "offset" else entry.enqueued for entry in log)
        return next((index for index, value in enumerate(values) if value > bound), len(log))


def _bound(selector: str) -> tuple[str, int]:
    """What a selector asks for, ``offset`` or ``enqueued-time``, and beyond which value."""
    kind, _, bound = selector.removeprefix("amqp.annotation.x-opt-").split(" ")
    return kind, int(bound.strip("'"))
