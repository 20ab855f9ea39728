"""The agent's own log, on stderr: JSON lines for machines, text lines for a terminal, with
``logging``.
"""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from notbefore.core.record import json_line
from notbefore.core.text import escaped, rfc3339

_SEVERITIES = {
    logging.DEBUG: "DEBUG",
    logging.INFO: "INFO",
    logging.WARNING: "WARN",
    logging.ERROR: "ERROR",
}

Redact = Callable[[str], str]


class LogFormatter(logging.Formatter):
    """Formats a log record as text or JSON, without secrets.

    JSON has the names of OpenTelemetry's log data model.
    """

    def __init__(self, redact: Redact = str, *, as_json: bool = False) -> None:
        super().__init__()
        self._redact = redact
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message contains.

        In text form, the lines of a traceback follow after a bar.
        """
        time, message = (
            datetime.fromtimestamp(record.created, UTC),
            self._redact(record.getMessage()),
        )
        exception = self._redact(self.formatException(record.exc_info)) if record.exc_info else None
        if self._as_json:
            severity = _SEVERITIES.get(record.levelno, record.levelname)
            values = {
                "time": rfc3339(time),
                "severity": severity,
                "logger": record.name,
                "body": message,
            }
            return json_line(values | ({"exception": exception} if exception else {})).decode()
        local = time.astimezone().isoformat(timespec="seconds")
        lines = [f"{local} {record.levelname:<7} {escaped(message)}"]
        lines += [f"  | {escaped(line)}" for line in (exception or "").splitlines()]
        return "\n".join(lines)


def set_up(form: Literal["auto", "json", "text"], level: str, redact: Redact = str) -> None:
    """Write all log lines from ``level`` up to stderr, in ``form`` (``auto``: text on a terminal).

    ``redact`` replaces the secrets in every text, also in those of libraries. The root logger's
    handlers are replaced.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler.setFormatter(LogFormatter(redact, as_json=as_json))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level == "info":  # Azure's libraries log several lines for each request
        logging.getLogger("azure").setLevel(logging.WARNING)
    # a library's own logger may have a lower level, for another handler
    handler.setLevel(level.upper())
    logging.raiseExceptions = False  # if stderr is closed, logging would print a traceback to it
