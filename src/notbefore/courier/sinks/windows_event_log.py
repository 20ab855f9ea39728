"""Windows' event log, as Microsoft's own sample writes it: Azure Monitor reads it there, and raises alerts.

The entry's strings are the title, the text and the record as JSON; its id says what kind of change it is. The source is
registered by an administrator: ``New-EventLog`` brings .NET's message file, which has the text ``%1`` for every id, so
that the title is shown. (pywin32's own has it for the ids 1 to 9, and is gone with its environment.)
"""

import logging
import re
from typing import Any, Final

from notbefore.config.messages import Messages
from notbefore.config.sinks import WindowsEventLog
from notbefore.core.envelope import cut
from notbefore.courier.message import Asked, Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.courier.render import Renderer
from notbefore.courier.wording import Text
from notbefore.errors import SendError

EVENT_IDS: Final = {
    "announced": 1,
    "updated": 2,
    "started": 3,
    "canceled": 4,
    "finished": 5,
    "ended": 6,
    "reminder": 7,
    "sink_failed": 8,
    "approved": 10,
    "approval_failed": 11,
    "approval_skipped": 12,
}
ERROR, WARNING, INFORMATION = 1, 2, 4  # EVENTLOG_ERROR_TYPE and so on, of winnt.h
TYPES: Final = {"critical": ERROR, "warning": WARNING, "info": INFORMATION}
MAX_TITLE: Final = 500  # characters; all three together are less than the 64 KiB of an entry, at two bytes each
MAX_TEXT: Final = 8_000
MAX_RECORD: Final = 20_000
REFUSED: Final = (5, 87, 1734)  # of winerror.h: access denied, invalid parameter, more than an entry holds
KEY: Final = r"SYSTEM\CurrentControlSet\Services\EventLog"

log = logging.getLogger("notbefore.windows_event_log")


class Sink(BaseSink):
    """One source in one log."""

    def __init__(self, name: str, settings: WindowsEventLog, messages: Messages) -> None:
        import win32evtlogutil  # noqa: PLC0415 - pywin32, on Windows alone

        self._log: Any = win32evtlogutil
        self._settings = settings
        self._render = Renderer(settings, messages)
        try:
            self.connect()
        except SendError as error:  # Windows accepts the entries all the same
            log.warning("sink %s: %s", name, error)

    def send(self, message: Message) -> Receipt:
        """Write one entry."""
        text = self._render(message)
        event_id, kind, strings = entry(message, text)
        try:
            self._log.ReportEvent(self._settings.source, event_id, eventType=kind, strings=strings)
        except self._log.error as error:
            permanent = getattr(error, "winerror", 0) in REFUSED
            raise SendError(f"the event log refused the entry: {error}", permanent=permanent) from None
        return Receipt(fallback=bool(text.trouble))

    def connect(self) -> Asked:
        """Ask whether the source is registered; writes nothing. Raises ``SendError`` with what to do, once."""
        import winreg  # noqa: PLC0415 - on Windows alone

        registry: Any = winreg
        source, name = self._settings.source, self._settings.log
        try:
            registry.OpenKey(registry.HKEY_LOCAL_MACHINE, rf"{KEY}\{name}\{source}").Close()
        except OSError:
            raise SendError(
                f"the source {source} is not registered in the log {name}, and its entries go to Application with a"
                f" note about it: once, as administrator: New-EventLog -LogName '{name}' -Source '{source}'"
            ) from None
        return Asked()


def entry(message: Message, text: Text) -> tuple[int, int, list[str]]:
    """The id, the type and the strings of an entry. No string may hold ``%1``, which would stand for another."""
    # the escape is the same JSON; what is too large is cut as it is for an Event Hub
    lines = (one.line().decode().replace("%", r"\u0025") for one in (message.record, *cut(message.record)))
    record = next((line for line in lines if len(line) <= MAX_RECORD), "{}")
    strings = [_harmless(text.title, MAX_TITLE), _harmless(text.whole, MAX_TEXT), record]
    return EVENT_IDS[message.kind], TYPES[message.shown_severity], strings


def _harmless(text: str, most: int) -> str:
    """As a string of an entry: without NUL, and with no number right after a ``%``."""
    return re.sub(r"%(?=[%\d])", "% ", text.replace("\0", ""))[:most]
