"""``Channel``: waitress's connection of a client, with time limits."""

import logging
import math
import select
import socket
import sys
import time
from typing import Any, Final

from waitress.channel import HTTPChannel

# seconds for a request to arrive, from its first byte or the connection's opening
REQUEST_PATIENCE: Final = 10.0
ANSWER_PATIENCE: Final = 60.0  # seconds for an answer to be made and read completely
# seconds between two requests of one connection; scrapes come each minute or more often
IDLE_PATIENCE: Final = 120.0

# seconds for a new connection to send a request before a newer one may replace it
REQUEST_GRACE: Final = 0.1
# seconds for a client to read more of an answer before a new connection may replace its own
STALL_GRACE: Final = 1.0
# seconds that a request of a client that closed waits at most for its turn; later it is not served
ABANDONED_PATIENCE: Final = 0.1

log = logging.getLogger("notbefore.http")


class Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection with deadlines.

    Waitress counts from the last byte, so a client that drips could stay for ever.
    """

    requests: list[Any]  # requests that have arrived; the first is being answered
    socket: Any  # a plain one, or an ``SSLSocket``
    served: bool = False
    # monotonic seconds: since when the client reads nothing while its socket is full
    stalled_since: float = math.inf

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # when the connection opened, or its last request began or arrived
        self.since = time.monotonic()
        super().__init__(*args, **kwargs)

    def received(self, data: bytes) -> bool:
        """Read bytes; a complete request goes to a worker."""
        if self.request is None:
            self.since = time.monotonic()
        result: bool = super().received(data)
        if self.requests:
            self.served = True
            self.since = time.monotonic()
        return result

    def service(self) -> None:
        """Answer one request.

        The connection closes after it if more have arrived: they wait ahead of other clients.
        """
        if self._is_abandoned():
            self.cancel()
            self.server.pull_trigger()
            return
        if len(self.requests) > 1:  # pipelining, which clients of this server do not use
            self.requests[0].headers["CONNECTION"] = "close"
        super().service()

    def _is_abandoned(self) -> bool:
        """Whether the client closed the connection while its request waited for its turn.

        A client may also close only its own direction, and wait for the answer. It looks the same,
        so a request whose turn comes at once is served.
        """
        waited = time.monotonic() - self.since
        return waited > ABANDONED_PATIENCE and has_closed(self.socket)

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write as much as there is room for, and note whether the client reads."""
        sent = int(super().send(data, do_close))
        self.note_progress(sent, len(data))
        return sent

    def note_progress(self, sent: int, offered: int) -> None:
        """Note how many bytes the socket took of those that it was offered."""
        if sent == offered:
            self.stalled_since = math.inf
        elif sent > 0 or self.stalled_since == math.inf:
            self.stalled_since = time.monotonic()

    def is_idle(self, now: float) -> bool:
        """Whether it waits for its client: to read an answer, or to send the next request."""
        if self.requests:
            return False
        if self.total_outbufs_len:
            return now - self.stalled_since > STALL_GRACE
        return now - self.since > REQUEST_GRACE

    def handle_expt(self) -> None:
        """Close: no one reads urgent data, so they would end each poll at once."""
        self.handle_close()

    def handle_error(self) -> None:
        """Close the connection."""
        # a client that goes away or sends garbage is not an error of the agent
        log.debug("connection from %s: closed on %r", self.addr, sys.exc_info()[1])
        self.handle_close()

    def overdue(self, now: float) -> bool:
        """Whether the client has used up its time to send a request or to read the answer."""
        if self.requests or self.total_outbufs_len:
            return now - self.since > ANSWER_PATIENCE
        if self.served and self.request is None:
            return now - self.since > IDLE_PATIENCE
        return now - self.since > REQUEST_PATIENCE


def has_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, or its own direction of it."""
    try:
        if hasattr(select, "POLLRDHUP"):  # Linux: finds the end behind bytes that were not read
            poll = select.poll()
            poll.register(connection, select.POLLRDHUP)
            return bool(poll.poll(0))
        # an ``SSLSocket`` does not peek
        return not socket.socket.recv(connection, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except (OSError, ValueError):  # it was closed here meanwhile
        return True
