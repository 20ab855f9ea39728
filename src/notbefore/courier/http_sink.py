"""``HttpSink``: the common part of the sinks that send messages by HTTP."""

from notbefore.config.sinks import Messages
from notbefore.courier.sink import Sink
from notbefore.net.http import Http


class HttpSink(Sink):
    """A sink with its connections, which are kept for the next message."""

    def __init__(self, messages: Messages, http: Http) -> None:
        self._messages = messages
        self._http = http

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
