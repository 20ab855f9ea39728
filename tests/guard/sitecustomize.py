"""No process of the tests asks Azure's address: this machine may be a VM of Azure.

Python imports this by its name.
"""

import socket
from collections.abc import Callable
from typing import Any


def _guarded(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if address[:1] == ("169.254.169.254",):
            raise AssertionError("a test asks 169.254.169.254: give it an endpoint of its own")
        return connect(self, address)

    return guarded


# no audit hook: one written in Python lets another thread begin while coverage begins in this one,
# and both fail
for name in ("connect", "connect_ex"):
    setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
