"""``Simulator``: IMDS on loopback, as strict as the real one about header and api-version, with faults on request.

Several VMs: ``http://HOST:PORT/vm/NAME`` is the endpoint of each, ``http://HOST:PORT`` that of the first. All see the
same events.
"""

import socket
import socketserver
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import quote

from notbefore.simulator.handler import Handler
from notbefore.simulator.state import SimulatorState


class Simulator(SimulatorState):
    """The state, and the server around it. ``with Simulator() as sim:`` serves at ``sim.endpoint``."""

    def __init__(
        self, vms: Sequence[str] = ("WestNO_0",), *, listen: tuple[str, int] = ("127.0.0.1", 0), speed: float = 1.0
    ) -> None:
        super().__init__(vms, speed)
        self._server = _Server(listen, Handler)
        self._server.state = self
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """The ``imds.endpoint`` for an agent on the first VM."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def endpoint_of(self, vm: str) -> str:
        """Return the ``imds.endpoint`` for an agent on one of the VMs."""
        return f"{self.endpoint}/vm/{quote(vm, safe='')}"

    def close(self) -> None:
        """Stop serving: the port is free, every connection is closed, no client is held."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self.clear()
        self._server.server_close()
        self._server.cut()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="simulator", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """The standard library's threading server, with a list of the open connections so that they can be closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    state: SimulatorState

    def __init__(self, listen: tuple[str, int], handler: type[Handler]) -> None:
        if ":" in listen[0]:
            self.address_family = socket.AF_INET6
        self._open: set[socket.socket] = set()
        super().__init__(listen, handler)

    def server_bind(self) -> None:
        """Bind without the DNS query of HTTPServer for this machine's name, which can take many seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection, and let a thread serve it."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection, and forget it."""
        super().shutdown_request(request)
        self._open.discard(request)

    def cut(self) -> None:
        """End every connection: its thread notices."""
        for connection in list(self._open):
            with suppress(OSError):  # the client has closed it already
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing for clients that went away: many of the faults cause it."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
