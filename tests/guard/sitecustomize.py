"""No process of the tests asks Azure's address: this machine may be a VM of Azure. Python imports this by its name."""

import sys
from typing import Any


def _guard(event: str, values: tuple[Any, ...]) -> None:
    if event == "socket.connect" and values[1][:1] == ("169.254.169.254",):
        raise AssertionError("a test asks 169.254.169.254: give it an endpoint of its own")


sys.addaudithook(_guard)
