"""Child processes that are connected to this one by a socket: how they start, and how they end."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from notbefore.courier.frames import FrameSocket

if sys.platform == "win32":

    def start_child(
        module: str,
        end: socket.socket,
        variables: Mapping[str, str],
        _lock: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a module as a process, and send it the data of ``end``.

        A socket cannot be its standard input. The process has a console of its own, so that Ctrl-C
        reaches only the agent. The process ends when its socket is closed.
        """
        process = subprocess.Popen(  # noqa: S603 - our own module
            _command(module),
            env={**variables, "PYTHONIOENCODING": "utf-8"},  # of its log, as that of the agent
            stdin=subprocess.PIPE,
            creationflags=subprocess.CREATE_NO_WINDOW,
        )
        if process.stdin is not None:
            with process.stdin as pipe:
                pipe.write(end.share(process.pid))
        return process

else:

    def start_child(
        module: str,
        end: socket.socket,
        variables: Mapping[str, str],
        lock: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a module as a process, with ``end`` as its standard input.

        It has a process group of its own, so that Ctrl-C reaches only the agent. It ends when its
        socket is closed. ``lock``: a file descriptor that it inherits; the programs that it starts
        do not.
        """
        inherited: list[int] = []
        if lock is not None:
            inherited.append(lock)
        return subprocess.Popen(  # noqa: S603 - our own module
            _command(module),
            env=variables,
            stdin=end.fileno(),
            pass_fds=inherited,
            process_group=0,
        )


def _command(module: str) -> list[str]:
    # -P: no module is imported from the working directory
    return [sys.executable, "-P", "-m", module]


# ---- in the child


def take_socket() -> FrameSocket:
    """Return the socket that is the standard input, and replace that by an empty one.

    Libraries and programs must not read from the socket.
    """
    if sys.platform == "win32":  # there the standard input is a pipe with the data of a socket
        end = socket.fromshare(sys.stdin.buffer.read())
    else:
        end = socket.socket(fileno=os.dup(0))

    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return FrameSocket(end)
