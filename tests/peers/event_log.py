"""``EventLog`` stands for the event log of Windows, with the functions that the sink uses.

It replaces the modules ``win32evtlog`` and ``pywintypes`` of pywin32, and has the names and the
order of arguments that pywin32 documents. It refuses what Windows refuses.
"""

import sys
from types import ModuleType
from typing import Any, Final, NamedTuple, Self

NOT_AVAILABLE: Final = 1722  # RPC_S_SERVER_UNAVAILABLE: the service of the log does not run
WRONG_PARAMETER: Final = 87
MAX_TEXT: Final = 2 * 31_839  # bytes of one text, as UTF-16
MAX_ENTRY: Final = 61_440  # bytes of all texts of an entry, as UTF-16
TYPES: Final = {"error": 1, "warning": 2, "information": 4}


class Entry(NamedTuple):
    """One entry of the log."""

    source: str
    entry_type: int
    event_id: int
    texts: list[str]


class Win32Error(Exception):
    """``pywintypes.error``."""

    def __init__(self, winerror: int, funcname: str, strerror: str) -> None:
        super().__init__(winerror, funcname, strerror)
        self.winerror = winerror
        self.funcname = funcname
        self.strerror = strerror


class EventLog:
    """A log. Within ``with EventLog()``, the two modules can be imported, and write to it.

    ``down``: whether the service of the log is stopped. ``open_handles``: sources that are open.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.down = False
        self.open_handles: dict[int, str] = {}
        self._opened = 0

    def _register_source(self, server: str | None, source: str) -> int:
        assert server is None
        if self.down or source == "down":
            raise Win32Error(NOT_AVAILABLE, "RegisterEventSource", "The RPC server is unavailable.")
        self._opened += 1
        self.open_handles[self._opened] = source
        return self._opened

    def _report(  # noqa: PLR0917 - the arguments of pywin32
        self,
        handle: int,
        entry_type: int,
        category: int,
        event_id: int,
        sid: Any,
        texts: list[str],
        data: bytes | None,
    ) -> None:
        assert category == 0
        assert sid is None
        assert data is None
        sizes = [len(text.encode("utf-16-le")) for text in texts]
        is_too_large = max(sizes) > MAX_TEXT or sum(sizes) > MAX_ENTRY
        if is_too_large or entry_type not in TYPES.values():
            raise Win32Error(WRONG_PARAMETER, "ReportEvent", "The parameter is incorrect.")
        assert not any("\0" in text for text in texts)
        self.entries.append(Entry(self.open_handles[handle], entry_type, event_id, texts))

    def _deregister(self, handle: int) -> None:
        del self.open_handles[handle]

    def __enter__(self) -> Self:
        log: Any = ModuleType("win32evtlog")
        log.RegisterEventSource = self._register_source
        log.ReportEvent = self._report
        log.DeregisterEventSource = self._deregister
        for name, value in TYPES.items():
            setattr(log, f"EVENTLOG_{name.upper()}_TYPE", value)
        types: Any = ModuleType("pywintypes")
        types.error = Win32Error
        sys.modules |= {"win32evtlog": log, "pywintypes": types}
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("win32evtlog", "pywintypes", "notbefore.courier.sinks.windows_event_log"):
            sys.modules.pop(name, None)
