"""``Channel``: a client's connection, waitress's with limits on how long it may take; and the same over TLS."""

import logging
import sys
import time
from typing import Any, Final

from waitress.channel import HTTPChannel

from notbefore.web.request import Request, Task

REQUEST_PATIENCE: Final = 10.0  # seconds for a request to arrive, from its first byte or the connection's opening
ANSWER_PATIENCE: Final = 60.0  # seconds for a whole answer to be read
IDLE_PATIENCE: Final = 120.0  # seconds between two requests of one connection; scrapes come each minute or more often
PIPELINED: Final = 4  # requests of one connection that wait; Prometheus and browsers send one at a time

log = logging.getLogger("notbefore.http")


class Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection. Times are monotonic seconds."""

    parser_class = Request
    task_class = Task
    requests: list[Request]  # those that have arrived; the first is being answered
    waiting_since: float  # when it opened, or its last request began or arrived
    progress: float = 0.0  # when bytes of an answer last went out, or began to wait
    served: bool = False
    login_failed: bool = False  # its last password was wrong
    login_waits: bool = False  # its password has not been checked yet
    socket: Any  # a plain one, over TLS an ``SSLSocket`` from the first byte on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.waiting_since = time.monotonic()
        super().__init__(*args, **kwargs)

    def received(self, data: bytes) -> bool:
        """Read bytes; a complete request goes to a worker."""
        if self.request is None:
            self.waiting_since = time.monotonic()
        result: bool = super().received(data)
        if self.requests:
            self.served = True
            self.waiting_since = time.monotonic()
        if len(self.requests) > PIPELINED:
            log.debug("connection from %s: closed, it sends requests and reads no answers", self.addr)
            self.handle_close()
        return result

    def write_soon(self, data: Any) -> int:
        """Take a part of an answer from a worker."""
        if not self.total_outbufs_len:
            self.progress = time.monotonic()
        return int(super().write_soon(data))

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write what there is room for; returns how many bytes."""
        sent = self._send(data, do_close)
        if sent:
            self.progress = time.monotonic()
        return sent

    def _send(self, data: bytes, do_close: bool) -> int:  # noqa: FBT001 - as above
        return int(super().send(data, do_close))

    def handle_error(self) -> None:
        """Close."""
        # that a client goes away is no error of the agent
        log.debug("connection from %s: closed on %r", self.addr, sys.exc_info()[1])
        self.handle_close()

    @property
    def busy(self) -> bool:
        """One of its requests is being answered, or soon will be."""
        return bool(self.requests) and not self.login_waits

    def overdue(self, now: float) -> bool:
        """It has used up its time: to send a request, to read the answer, or to send the next request."""
        if self.busy:
            return bool(self.total_outbufs_len) and (
                now - self.progress > REQUEST_PATIENCE or now - self.waiting_since > ANSWER_PATIENCE
            )
        idle = self.served and self.request is None and not self.total_outbufs_len
        return now - self.waiting_since > (IDLE_PATIENCE if idle else REQUEST_PATIENCE)
