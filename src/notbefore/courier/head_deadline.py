"""``HeadDeadlineMixin``: an HTTP answer has an end as a whole.

A timeout of a socket is for its next bytes alone: an answer that drips would never end.
"""

import io
import socket
import time
from http.client import HTTPResponse
from typing import Any, Final

LONGEST: Final = 300.0  # seconds for an answer, where no timeout says less


class HeadDeadlineMixin:
    """Beside a class of connections, of ``http.client`` or urllib3."""

    sock: Any
    response_class: Any

    def getresponse(self) -> Any:
        """As of the class beside it; raises ``TimeoutError`` where the answer does not end within the timeout."""
        timeout = self.sock.gettimeout() if self.sock is not None else None
        deadline = time.monotonic() + (timeout or LONGEST)

        def response(sock: Any, *args: Any, **options: Any) -> HTTPResponse:
            return HTTPResponse(_Until(sock, deadline), *args, **options)  # type: ignore[arg-type] # it makes a file of it

        self.response_class = response
        return super().getresponse()  # type: ignore[misc] # of the class beside it


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
