"""The agent's own log, on stderr: JSON lines for machines, text lines for a terminal. Made with ``logging``."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from notbefore.core.record import json_line
from notbefore.core.sentence import rfc3339
from notbefore.core.text import escaped

_SEVERITIES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))  # from a level on: syslog's

Redact = Callable[[str], str]


class TextFormatter(logging.Formatter):
    """One line of text, without secrets."""

    def __init__(self, redact: Redact) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self._redact = redact

    def formatTime(self, record: logging.LogRecord, _datefmt: str | None = None) -> str:  # noqa: N802 - as below
        """Return date and time with the zone of this machine, as in RFC 3339."""
        return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="seconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the base class's
        """Return time, level and message as one line, whatever the message holds."""
        record.message = escaped(self._redact(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as above
        """Return the traceback; its lines begin with a bar, so that none can be taken for a line of the log."""
        text = self._redact(super().formatException(ei))
        return "\n".join(f"  | {escaped(line)}" for line in text.splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names of OpenTelemetry's log data model, without secrets."""

    def __init__(self, redact: Redact = str) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """Message and, where there is one, the exception, on one line."""
        values = {
            "time": rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "severity": _SEVERITIES.get(record.levelno, record.levelname),
            "logger": record.name,
            "body": self._redact(record.getMessage()),
        }
        if record.exc_info:
            values["exception"] = self._redact(self.formatException(record.exc_info))
        return json_line(values).decode()


class JournalFormatter(logging.Formatter):
    """The lines of another formatter, each with its priority before it: ``<4>`` is a warning (sd-daemon(3))."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Every line has the priority: each is an entry of its own in the journal, also one of a traceback."""
        prefix = next(f"<{priority}>" for level, priority in _PRIORITIES if record.levelno >= level)
        return "\n".join(prefix + line for line in self._inner.format(record).splitlines())


def goes_to_journal(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether standard error is the journal's: systemd names its device and inode."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # it is closed, or none
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def set_up(form: Literal["auto", "json", "text"], level: str, redact: Redact = str) -> None:
    """Write everything that is logged to stderr, in ``form`` (``auto``: text on a terminal), from ``level`` up.

    ``redact`` replaces the secrets in every text, also in those that libraries log. The root's handlers are replaced.
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json" or (form == "auto" and not sys.stderr.isatty()):
        handler.setFormatter(JsonFormatter(redact))
    else:
        handler.setFormatter(TextFormatter(redact))
    if goes_to_journal() and handler.formatter is not None:
        handler.setFormatter(JournalFormatter(handler.formatter))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level == "info":  # they write several lines for each request
        logging.getLogger("azure").setLevel(logging.WARNING)
    handler.setLevel(level.upper())  # a library's own logger may have a lower level, for another handler
    logging.raiseExceptions = False  # when stderr is closed, logging would print its own traceback to it
