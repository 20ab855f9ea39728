"""Windows' event log, as Microsoft's own sample writes it: from there Azure Monitor takes it, and raises alerts.

The entry's strings are the title, the text and the record as JSON; its id says what kind of change it is.
"""

import logging
from typing import Any, Final

from notbefore.delivery.message import Message, Receipt
from notbefore.delivery.render import Renderer, Text
from notbefore.delivery.settings import Links, WindowsEventLog
from notbefore.errors import SendError

EVENT_IDS: Final = {
    "announced": 1,
    "updated": 2,
    "started": 3,
    "canceled": 4,
    "finished": 5,
    "ended": 6,
    "reminder": 7,
    "approved": 10,
    "approval_failed": 11,
    "approval_skipped": 12,
}
ERROR, WARNING, INFORMATION = 1, 2, 4  # EVENTLOG_ERROR_TYPE and so on, of winnt.h
TYPES: Final = {"critical": ERROR, "warning": WARNING, "info": INFORMATION}
MAX_STRING: Final = 30_000  # characters; the system takes 31,839
ACCESS_DENIED: Final = 5  # of winerror.h

log = logging.getLogger("notbefore.windows_event_log")


class Sink:
    """One source in one log."""

    def __init__(self, _name: str, settings: WindowsEventLog, _links: Links) -> None:
        import win32evtlogutil  # noqa: PLC0415 - pywin32, on Windows alone

        self._log: Any = win32evtlogutil
        self._source = settings.source
        self._render = Renderer(settings.title, settings.body)
        self._register(settings.log)

    def _register(self, name: str) -> None:
        """Tell Windows how entries of this source are shown; where that is not allowed, they are written anyway."""
        try:
            self._log.AddSourceToRegistry(self._source, eventLogType=name)
        except self._log.error as error:
            log.warning(
                "the source %s cannot be registered (%s): once, as administrator:"
                " New-EventLog -LogName %s -Source %s. Until then entries go to Application, with a note about it",
                self._source,
                error,
                name,
                self._source,
            )

    def send(self, message: Message) -> Receipt:
        """Write one entry."""
        text = self._render(message)
        event_id, kind, strings = entry(message, text)
        try:
            self._log.ReportEvent(self._source, event_id, eventType=kind, strings=strings)
        except self._log.error as error:
            raise SendError(
                f"the event log does not take it: {error}", permanent=getattr(error, "winerror", 0) == ACCESS_DENIED
            ) from None
        return Receipt(fallback=text.fallback)

    def close(self) -> None:
        """Nothing is kept open."""


def entry(message: Message, text: Text) -> tuple[int, int, list[str]]:
    """The id, the type and the strings of an entry."""
    kind = INFORMATION if message.over else TYPES[message.severity]
    strings = [text.title, text.plain, message.line.decode()]
    # a NUL would end the string there
    return EVENT_IDS[message.kind], kind, [one.replace("\0", "")[:MAX_STRING] for one in strings]
