"""The agents of a demo: each on a port that is free, the usual one where it can be had."""

import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final

from notbefore.commands.client import USUAL_PORT, AgentClient
from notbefore.commands.main import CANNOT_START
from notbefore.errors import NotBeforeError

ATTEMPTS: Final = 3


def start_agent(
    stack: ExitStack, start: Callable[[str], subprocess.Popen[Any]], patience: float
) -> tuple[subprocess.Popen[Any], AgentClient]:
    """Start an agent, and wait until it is ready; returns its process and a client of it.

    ``start`` gets the address to listen at, HOST:PORT. Where another program takes the port between its choice and its
    use, another port is tried. Raises ``NotBeforeError`` when the agent is not ready after ``patience`` seconds, or
    ends for another reason. ``stack`` keeps the port from other demos.
    """
    for _ in range(ATTEMPTS):
        listen = f"127.0.0.1:{_take_port(stack)}"
        process, client = start(listen), AgentClient(f"http://{listen}")
        if _is_ready(process, client, patience):
            return process, client
        if process.poll() != CANNOT_START:
            break
    raise NotBeforeError("the agent did not start: see its log above")


def _is_ready(process: subprocess.Popen[Any], client: AgentClient, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(NotBeforeError):
            client.ask("/readyz")
            return True
        time.sleep(0.05)
    return False


def _take_port(stack: ExitStack) -> int:
    """Return the usual port where it is free, else another. Until the end, no other demo chooses it.

    Two demos that begin at once would find the same port free, and take the agent of the other for their own. So each
    holds the UDP port of the same number, which nothing else needs.
    """
    for wanted in (USUAL_PORT, 0):
        with suppress(OSError), socket.socket() as probe, ExitStack() as held:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", wanted))
            port: int = probe.getsockname()[1]
            held.enter_context(socket.socket(type=socket.SOCK_DGRAM)).bind(("127.0.0.1", port))
            stack.push(held.pop_all())
            return port
    raise NotBeforeError("no free port on 127.0.0.1")
