"""The agent's own log, on stderr: JSON lines for machines, text lines for a terminal. Made with ``logging``."""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from notbefore.core.record import json_line, rfc3339
from notbefore.core.text import escaped

_SEVERITIES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}


Redact = Callable[[str], str]


class TextFormatter(logging.Formatter):
    """One line of text, without secrets."""

    def __init__(self, redact: Redact) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._redact = redact

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


def set_up(form: Literal["auto", "json", "text"], level: str, redact: Redact = str) -> None:
    """Write everything that is logged to stderr, in ``form`` (``auto``: text on a terminal), from ``level`` up.

    ``redact`` replaces the secrets in every text, also in those that libraries log. The root's handlers are replaced.
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json" or (form == "auto" and not sys.stderr.isatty()):
        handler.setFormatter(JsonFormatter(redact))
    else:
        handler.setFormatter(TextFormatter(redact))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    handler.setLevel(level.upper())  # a library's own logger may have a lower level, for another handler
    logging.raiseExceptions = False  # when stderr is closed, logging would print its own traceback to it
