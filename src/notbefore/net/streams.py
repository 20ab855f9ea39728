"""An event loop that closes the streams that a library has left open.

The SDK of Event Hubs forgets a connection that it could not open completely: after a timeout, an
error, or a cancellation. The event loop keeps such a connection open for as long as it lives.
"""

import asyncio
from typing import Any, cast
from weakref import WeakSet


class StreamsLoop(asyncio.SelectorEventLoop):
    """Knows its open streams."""

    def __init__(self) -> None:
        super().__init__()
        self._open_streams: WeakSet[asyncio.Transport] = WeakSet()

    async def create_connection(self, *arguments: Any, **options: Any) -> Any:
        """Open a connection, and remember it if it is a stream."""
        transport, protocol = await super().create_connection(*arguments, **options)
        if isinstance(protocol, asyncio.StreamReaderProtocol):
            self._open_streams.add(transport)
        return transport, protocol

    def abort_streams(self) -> None:
        """Close all streams without a farewell."""
        for transport in self._open_streams:
            transport.abort()
        self._open_streams.clear()


async def abort_streams() -> None:
    """Close all streams of the running loop, which is a ``StreamsLoop``."""
    loop = cast("StreamsLoop", asyncio.get_running_loop())
    loop.abort_streams()
    await asyncio.sleep(0)  # the loop closes the sockets in its next turn
