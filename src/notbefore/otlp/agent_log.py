"""The agent's own log on its way to an OTLP receiver: the last lines that were not accepted yet."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

MAX_LINES: Final = 128  # that wait; as many again may be on their way
MAX_TEXT: Final = 1_000  # characters of one line, and of its stack
LEVELS: Final = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}

log = logging.getLogger("notbefore.otlp")


class LogEntry(Struct, frozen=True):
    """One log record, before it is OpenTelemetry's. ``severity``: debug, info, warning, error or critical."""

    time: datetime
    severity: str
    body: str
    attributes: dict[str, Any]
    event_name: str = ""


class LogLines(logging.Handler):
    """Keeps the lines that are logged, but for those that the exporting thread itself logs."""

    def __init__(self, level: str, thread: threading.Thread, redact: Callable[[str], str]) -> None:
        """``level``: from which up; ``thread``: the one that exports; ``redact`` takes secrets out of a text."""
        super().__init__(level.upper())
        self._thread = thread
        self._redact = redact
        self._waiting: deque[LogEntry] = deque(maxlen=MAX_LINES)
        self._batch: list[LogEntry] = []
        self._lost = 0
        self._mutex = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; the oldest one is lost where there are too many."""
        if record.thread == self._thread.ident:
            return
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - arguments that do not fit their text: standard error has said so
            return
        with self._mutex:
            self._lost += len(self._waiting) == MAX_LINES
            self._waiting.append(line)

    def _line(self, record: logging.LogRecord) -> LogEntry:
        attributes = {"log.logger": record.name}
        if record.exc_info and record.exc_info[0] is not None:
            stack = logging.Formatter().formatException(record.exc_info)
            attributes["exception.type"] = record.exc_info[0].__name__
            attributes["exception.stacktrace"] = self._redact(stack)[-MAX_TEXT:]
        level = max((number for number in LEVELS if number <= record.levelno), default=logging.DEBUG)
        time = datetime.fromtimestamp(record.created, UTC)
        return LogEntry(time, LEVELS[level], self._redact(record.getMessage())[:MAX_TEXT], attributes)

    def batch(self) -> list[LogEntry]:
        """Return the lines to send now: the same ones until ``accepted`` or ``refused`` is called.

        The first one says how many were lost before it.
        """
        with self._mutex:
            if not self._batch and self._waiting:
                self._batch, lost, self._lost = list(self._waiting), self._lost, 0
                self._waiting.clear()
                if lost:
                    text = f"{lost} lines of the log before this one are lost: they could not be sent"
                    self._batch.insert(0, LogEntry(self._batch[0].time, "warning", text, {"log.logger": log.name}))
            return self._batch

    def accepted(self) -> None:
        """The receiver has the batch."""
        with self._mutex:
            self._batch = []

    def refused(self) -> None:
        """The batch is lost: the receiver would refuse it again."""
        with self._mutex:
            self._lost += len(self._batch)
            self._batch = []
