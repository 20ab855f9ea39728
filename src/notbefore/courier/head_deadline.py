"""``HeadDeadlineMixin``: an HTTP answer has an end as a whole, and interim answers before it (1xx) are skipped.

A timeout of a socket is for its next bytes alone: an answer that drips would never end.
"""

import io
import socket
import time
from http.client import HTTPException, HTTPResponse, parse_headers
from typing import Any, Final

LONGEST: Final = 300.0  # seconds for an answer, where no timeout says less
INTERIM: Final = range(102, 200)  # such as 103 (Early Hints); Python skips 100 itself, and nobody asks for 101
MAX_INTERIM: Final = 20


class HeadDeadlineMixin:
    """Beside a class of connections, of ``http.client`` or urllib3."""

    sock: Any
    response_class: Any

    def getresponse(self) -> Any:
        """As of the class beside it; raises ``TimeoutError`` where the answer does not end within the timeout."""
        timeout = self.sock.gettimeout() if self.sock is not None else None
        deadline = time.monotonic() + (timeout or LONGEST)

        def response(sock: Any, *args: Any, **options: Any) -> HTTPResponse:
            return _FinalResponse(_Until(sock, deadline), *args, **options)  # type: ignore[arg-type] # it makes a file of it

        self.response_class = response
        return super().getresponse()  # type: ignore[misc] # of the class beside it


class _FinalResponse(HTTPResponse):
    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(MAX_INTERIM):
            found: tuple[str, int, str] = super()._read_status()  # type: ignore[misc] # not in its stubs; urllib3 uses it
            if found[1] not in INTERIM:
                return found
            parse_headers(self.fp)
        raise HTTPException("too many interim answers")


class _Until:
    """A socket for the one who reads an answer from it."""

    def __init__(self, sock: Any, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Its bytes, until the deadline."""
        raw = _Bytes(self._sock, "r")
        raw.deadline = self._deadline
        self._sock._io_refs += 1  # noqa: SLF001 - as its own makefile does
        return io.BufferedReader(raw)


class _Bytes(socket.SocketIO):
    deadline: float  # monotonic seconds
    _sock: Any

    def readinto(self, buffer: Any) -> int | None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)
        return super().readinto(buffer)
