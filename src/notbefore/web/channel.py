"""``Channel``: waitress's connection of a client, with time limits."""

import logging
import sys
import time
from typing import Any, Final

from waitress.channel import HTTPChannel

# seconds for a request to arrive, from its first byte or the connection's opening
REQUEST_PATIENCE: Final = 10.0
ANSWER_PATIENCE: Final = 60.0  # seconds for an answer to be made and read completely
# seconds between two requests of one connection; scrapes come each minute or more often
IDLE_PATIENCE: Final = 120.0

log = logging.getLogger("notbefore.http")


class Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection with deadlines.

    Waitress counts from the last byte, so a client that drips could stay for ever.
    """

    requests: list[Any]  # requests that have arrived; the first is being answered
    socket: Any  # a plain one, or an ``SSLSocket``
    served: bool = False

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
        if len(self.requests) > 1:  # pipelining, which clients of this server do not use
            self.requests[0].headers["CONNECTION"] = "close"
        super().service()

    def handle_expt(self) -> None:
        """Close: nobody reads urgent data, so each poll would return at once because of them."""
        self.handle_close()

    def handle_error(self) -> None:
        """Close."""
        # a client that goes away or sends garbage is not an error of the agent
        log.debug("connection from %s: closed on %r", self.addr, sys.exc_info()[1])
        self.handle_close()

    def overdue(self, now: float) -> bool:
        """Whether it has used up its time to send a request, to read the answer, or to send the
        next request.
        """
        if self.requests or self.total_outbufs_len:
            return now - self.since > ANSWER_PATIENCE
        idle = self.served and self.request is None
        return now - self.since > (IDLE_PATIENCE if idle else REQUEST_PATIENCE)
