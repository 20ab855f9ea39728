"""The agent's own log, on stderr: JSON lines for machines, text lines for a terminal. Made with ``logging``."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal

from notbefore.core.record import json_line
from notbefore.core.sentence import rfc3339
from notbefore.core.text import escaped

_SEVERITIES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))  # from a level on: syslog's

Redact = Callable[[str], str]


class LogFormatter(logging.Formatter):
    """A record as text or as JSON, without secrets; JSON has the names of OpenTelemetry's log data model.

    ``journal``: with its priority before each line, as sd-daemon(3) has it: ``<4>`` is a warning.
    """

    def __init__(self, redact: Redact = str, *, as_json: bool = False, journal: bool = False) -> None:
        super().__init__()
        self._redact = redact
        self._as_json = as_json
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message holds; in text, each line of a traceback follows behind a bar."""
        time, message = datetime.fromtimestamp(record.created, UTC), self._redact(record.getMessage())
        exception = self._redact(self.formatException(record.exc_info)) if record.exc_info else None
        if self._as_json:
            severity = _SEVERITIES.get(record.levelno, record.levelname)
            values = {"time": rfc3339(time), "severity": severity, "logger": record.name, "body": message}
            lines = [json_line(values | ({"exception": exception} if exception else {})).decode()]
        else:
            local = time.astimezone().isoformat(timespec="seconds")
            lines = [f"{local} {record.levelname:<7} {escaped(message)}"]
            lines += [f"  | {escaped(line)}" for line in (exception or "").splitlines()]
        priority = next(priority for level, priority in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" if self._journal else line for line in lines)


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
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler.setFormatter(LogFormatter(redact, as_json=as_json, journal=goes_to_journal()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level == "info":  # they write several lines for each request
        logging.getLogger("azure").setLevel(logging.WARNING)
    handler.setLevel(level.upper())  # a library's own logger may have a lower level, for another handler
    logging.raiseExceptions = False  # when stderr is closed, logging would print its own traceback to it
