"""The log of each process, on stderr: JSON lines for machines, text lines for a terminal."""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from notbefore.core.record import json_line
from notbefore.core.text import escaped, rfc3339

_SEVERITY_NAMES = {
    logging.DEBUG: "DEBUG",
    logging.INFO: "INFO",
    logging.WARNING: "WARN",
    logging.ERROR: "ERROR",
}

Redact = Callable[[str], str]
"""Returns a text with its secrets replaced."""


def _as_it_is(text: str) -> str:
    return text


class LogFormatter(logging.Formatter):
    """Formats a log record as text or as JSON, without secrets.

    The names in JSON are those of OpenTelemetry's log data model.
    """

    def __init__(self, redact: Redact = _as_it_is, *, as_json: bool = False) -> None:
        super().__init__()
        self._redact = redact
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message contains.

        In text form, the lines of a traceback follow, each after a bar.
        """
        message = self._redact(record.getMessage())
        traceback = ""
        if record.exc_info:
            traceback = self._redact(self.formatException(record.exc_info))

        if self._as_json:
            return _json_form(record, message, traceback)
        return _text_form(record, message, traceback)


def _json_form(record: logging.LogRecord, message: str, traceback: str) -> str:
    values = {
        "time": rfc3339(datetime.fromtimestamp(record.created, UTC)),
        "severity": _SEVERITY_NAMES.get(record.levelno, record.levelname),
        "logger": record.name,
        "body": message,
    }
    if traceback:
        values["exception"] = traceback
    return json_line(values).decode()


def _text_form(record: logging.LogRecord, message: str, traceback: str) -> str:
    local_time = datetime.fromtimestamp(record.created, UTC).astimezone()
    time = local_time.isoformat(timespec="seconds")
    lines = [f"{time} {record.levelname:<7} {escaped(message)}"]
    lines += [f"  | {escaped(line)}" for line in traceback.splitlines()]
    return "\n".join(lines)


def set_up(form: Literal["auto", "json", "text"], level: str, redact: Redact = _as_it_is) -> None:
    """Write all log lines from ``level`` up to stderr; replace the root logger's handlers.

    ``form``: ``auto`` is text on a terminal, else JSON. ``redact`` applies to every text, also to
    those of libraries.
    """
    as_json = form == "json"
    if form == "auto":
        as_json = not sys.stderr.isatty()

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(redact, as_json=as_json))
    # the root logger's level does not stop a library whose own logger has a lower one
    handler.setLevel(level.upper())

    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level == "info":  # Azure's libraries log several lines for each request
        logging.getLogger("azure").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # if stderr is closed, logging would print a traceback to it
