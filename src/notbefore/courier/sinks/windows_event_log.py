"""Windows' event log: an entry for each message, with an id for each step of an event.

An entry has two texts: the message, which the Event Viewer shows, and the record as JSON, which
programs read. ``notbefore event-source`` registers the source. Without that, Windows keeps the same
entries in the log Application, and the Event Viewer says that it has no description.
"""

from typing import Final

import pywintypes
import win32evtlog

from notbefore.config.sinks import Messages, WindowsEventLog
from notbefore.core.delivery import MessageKind
from notbefore.core.event_types import Severity
from notbefore.core.message import Message
from notbefore.core.text import shortened
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import SendError
from notbefore.wording.texts import text_of

EVENT_IDS: Final[dict[MessageKind, int]] = {  # at most 1000: see ``commands/event_source``
    "announced": 101,
    "updated": 102,
    "started": 103,
    "canceled": 104,
    "finished": 105,
    "ended": 106,
    "reminder": 107,
    "approved": 111,
    "approval_failed": 112,
    "approval_skipped": 113,
}
ENTRY_TYPES: Final[dict[Severity, int]] = {
    "critical": win32evtlog.EVENTLOG_ERROR_TYPE,
    "warning": win32evtlog.EVENTLOG_WARNING_TYPE,
    "info": win32evtlog.EVENTLOG_INFORMATION_TYPE,
}
MAX_ENTRY_TEXT: Final = 14_000  # characters; Windows takes 31,839 UTF-16 units in a text
MAX_ENTRY: Final = 60_000  # bytes of UTF-16 in both texts; Windows takes a little more


class Sink(BaseSink):
    """A source of entries."""

    def __init__(self, _name: str, settings: WindowsEventLog, messages: Messages) -> None:
        self._source = settings.source
        self._messages = messages

    def send(self, message: Message) -> Receipt:
        """Write an entry. Raises ``SendError`` if Windows does not take it."""
        text = text_of(message, self._messages)
        texts = [shortened(f"{text.title}\n\n{text.whole}", MAX_ENTRY_TEXT), message.line.decode()]
        if len("".join(texts).encode("utf-16-le")) > MAX_ENTRY:
            texts[1] = ""  # a part of the record would be no JSON
        try:
            self._write(ENTRY_TYPES[message.shown_severity], EVENT_IDS[message.kind], texts)
        except pywintypes.error as error:
            raise SendError(f"{error.strerror} ({error.funcname}, {error.winerror})") from None
        return Receipt()

    def _write(self, entry_type: int, event_id: int, texts: list[str]) -> None:
        handle = win32evtlog.RegisterEventSource(None, self._source)  # on this machine
        try:
            win32evtlog.ReportEvent(handle, entry_type, 0, event_id, None, texts, None)
        finally:
            win32evtlog.DeregisterEventSource(handle)
