"""``Hub``: a simulated Event Hub's partitions, each an append-only log, on disk if wanted."""

import base64
import json
import os
import time
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Entry(NamedTuple):
    """One event in a partition."""

    offset: int
    enqueued: int  # Unix milliseconds
    key: str | None
    message: bytes


class Hub:
    """Partitions, each an append-only log."""

    def __init__(self, name: str, partitions: int, store: Path | None) -> None:
        self.name = name
        self.created = int(time.time() * 1000)
        self.logs: list[list[Entry]] = [[] for _ in range(partitions)]
        self._file: BinaryIO | None = None
        self._next = 0  # partition for events without a key
        if store is not None and store.exists():
            whole = store.read_bytes().rpartition(b"\n")
            os.truncate(store, len(whole[0] + whole[1]))  # a torn last line was never acknowledged
            for line in whole[0].splitlines():
                row = json.loads(line)
                self._put(row["p"], row["t"], row["k"], base64.b64decode(row["m"]))
        self.created = min([self.created, *(log[0].enqueued for log in self.logs if log)])
        self._file = store.open("ab") if store is not None else None

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

    def _put(self, partition: int, enqueued: int, key: str | None, message: bytes) -> None:
        log = self.logs[partition]
        offset = log[-1].offset + len(log[-1].message) + 40 if log else 0
        log.append(Entry(offset, enqueued, key, message))

    def partition_of(self, key: str | None) -> int:
        """Azure's hash is another, and as stable."""
        if key is None:
            self._next = (self._next + 1) % len(self.logs)
            return self._next
        return zlib.crc32(key.encode()) % len(self.logs)

    def append(self, partition: int, key: str | None, messages: list[bytes]) -> None:
        now = int(time.time() * 1000)
        for message in messages:
            if self._file is not None:
                row = {"p": partition, "t": now, "k": key, "m": base64.b64encode(message).decode()}
                self._file.write(json.dumps(row).encode() + b"\n")
            self._put(partition, now, key, message)
        if self._file is not None:
            self._file.flush()

    def first(self, partition: int, selector: str) -> int:
        """The index of the first event that a receiver's selector lets through."""
        log, (kind, bound) = self.logs[partition], _bound(selector)
        values = (entry.offset if kind == "offset" else entry.enqueued for entry in log)
        return next((index for index, value in enumerate(values) if value > bound), len(log))


def _bound(selector: str) -> tuple[str, int]:
    """What a selector asks for, ``offset`` or ``enqueued-time``, and beyond which value."""
    kind, _, bound = selector.removeprefix("amqp.annotation.x-opt-").split(" ")
    return kind, int(bound.strip("'"))
