"""``Month``: how the last 30 days went, as a part of the page of an instance."""

import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from notbefore.fleet.history import read_past
from notbefore.fleet.report import Report

DAYS: Final = 30
EVERY: Final = 60.0  # seconds between two readings of the history
PATIENCE: Final = 0.5  # seconds for the first one

log = logging.getLogger("notbefore.fleet.history")


class Month:
    """Read by a thread when somebody opens the page: a disk that hangs keeps nobody waiting."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reading: threading.Thread | None = None
        self._read_at = 0.0  # monotonic seconds
        self._section = ""

    def get(self) -> str:
        """The part of the page, as it was a minute ago at most; empty until the history has been read."""
        busy = self._reading is not None and self._reading.is_alive()
        if not busy and (not self._section or time.monotonic() - self._read_at > EVERY):
            self._reading = threading.Thread(target=self._read, name="month", daemon=True)
            self._reading.start()
            if not self._section:
                self._reading.join(PATIENCE)
        return self._section

    def _read(self) -> None:
        from notbefore.fleet.page import month_section  # noqa: PLC0415 - the template library, for those who open the page

        until = datetime.now(UTC)
        since = until - timedelta(days=DAYS)
        try:
            past = read_past([self._directory], since, until, [])
        except OSError as error:
            log.warning("the history cannot be read: %s", error)
            past = []
        self._section = month_section(Report.of(past, since, until))
        self._read_at = time.monotonic()
