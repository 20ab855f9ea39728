"""``Simulator``: IMDS on loopback, as strict as the real one about header and api-version, with faults to order.

Several VMs at once: ``http://HOST:PORT`` is the first one, ``http://HOST:PORT/vm/NAME`` each; all see the same events.
Under ``/simulator/`` it takes orders (JSON); see ``handler.Handler.do_POST``.
"""

import threading
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Self

from notbefore.simulator.handler import Handler
from notbefore.simulator.state import State


class Simulator(State):
    """The state, and the server around it. ``with Simulator() as sim:`` serves at ``sim.endpoint``."""

    def __init__(
        self, vms: Sequence[str] = ("WestNO_0",), *, listen: tuple[str, int] = ("127.0.0.1", 0), speed: float = 1.0
    ) -> None:
        super().__init__(vms, speed)
        self._server = _Server(listen, Handler)
        self._server.state = self

    @property
    def endpoint(self) -> str:
        """What an agent's ``imds.endpoint`` is to be, for the first VM."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def endpoint_of(self, vm: str) -> str:
        """The endpoint of one of the VMs."""
        return f"{self.endpoint}/vm/{vm}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="simulator", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    state: State
