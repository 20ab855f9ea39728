"""AMQP over WebSockets as Azure offers it: a bridge in front of the Event Hub look-alike."""

import asyncio
import ssl
import threading
from typing import Final, Self

from aiohttp import WSMsgType, web

PATH: Final = "/$servicebus/websocket"
SUBPROTOCOL: Final = "AMQPWSB10"


class Bridge:
    """``wss://`` on a port of its own, and behind it a TCP port here."""

    def __init__(self, behind: int, tls: ssl.SSLContext) -> None:
        self.port = 0
        self.asked: list[str] = []  # the paths
        self._behind, self._tls = behind, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self.asked.append(request.path)
        socket = web.WebSocketResponse(protocols=[SUBPROTOCOL])
        await socket.prepare(request)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._behind)

        async def back() -> None:
            while data := await reader.read(65536):
                await socket.send_bytes(data)
            await socket.close()

        task = asyncio.ensure_future(back())
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                writer.write(message.data)
                await writer.drain()
        writer.close()
        task.cancel()
        return socket
