"""``PoisonFile``: the records that cannot be read, with their places, for people."""

import base64
import logging
from collections import deque
from pathlib import Path
from typing import Final

from notbefore.core.record import json_line
from notbefore.fleet.hub_records import Poison
from notbefore.fleet.partition import Item
from notbefore.store.private import private

MAX_BYTES: Final = 16 * 1024 * 1024  # of the file, of which there are two
MAX_BODY: Final = 8 * 1024  # bytes of one record that are kept
MAX_WAITING: Final = 1_000  # records that wait for the disk; more of them are only counted

log = logging.getLogger("notbefore.fleet.poison")


class PoisonFile:
    """JSON lines in one file; what is older is in a second one, until that is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged: set[tuple[str, str]] = set()
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)

    def add(self, partition: str, item: Item, poison: Poison) -> None:
        """Have a record written soon; log the first of each kind."""
        if (partition, poison.reason) not in self._logged:
            self._logged.add((partition, poison.reason))
            log.warning(
                "partition %s, sequence number %d: a record is not used (%s: %s): it is in %s, and more are counted",
                partition, item.sequence, poison.reason, poison.detail[:200], self._path,
            )  # fmt: skip
        row = {
            "partition": partition,
            "sequence": item.sequence,
            "offset": item.offset,
            "reason": poison.reason,
            "detail": poison.detail[:500],
            "bytes": len(item.body),
            "body": base64.b64encode(item.body[:MAX_BODY]).decode(),
        }
        self._waiting.append(json_line(row) + b"\n")

    def write(self) -> None:
        """Append what was added; raises ``OSError``, and what could not be written waits. Not for an event loop."""
        lines = list(self._waiting)
        if not lines:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
            self._path.replace(self._path.with_suffix(".jsonl.1"))
        with open(self._path, "ab", opener=private) as file:
            file.write(b"".join(lines))
        for _ in lines:
            self._waiting.popleft()
