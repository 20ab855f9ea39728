"""The agent's own log, on stderr: JSON lines for machines, plain lines on a terminal. Standard ``logging`` below it."""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from notbefore.events.record import json_line, rfc3339

_SEVERITIES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names of OpenTelemetry's log data model."""

    def format(self, record: logging.LogRecord) -> str:
        """Message and, where there is one, the exception, on one line."""
        values = {
            "time": rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "severity": _SEVERITIES.get(record.levelno, record.levelname),
            "logger": record.name,
            "body": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json_line(values).decode()


def set_up(form: Literal["auto", "json", "text"], level: str) -> None:
    """Send everything that is logged to stderr in ``form`` (``auto``: text on a terminal), from ``level`` up."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json" or (form == "auto" and not sys.stderr.isatty()):
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # a stderr that is gone is no reason to print to it
