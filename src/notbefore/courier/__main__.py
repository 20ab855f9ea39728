"""The courier's process: ``python -m notbefore.courier``, started by the agent with the socket to
it as file 0.

It keeps no file: all that it needs to know comes over the socket (``courier.orders``). Its agent
ends it; it also ends when the agent ends.
"""

import logging
import os
import signal
import socket
import sys
from typing import Final

from notbefore import __version__
from notbefore.courier.main import Courier
from notbefore.courier.orders import Channel, Hello, Orders, unseal, wait
from notbefore.logs import set_up
from notbefore.net.redact import Redactor
from notbefore.store import SCHEMA_VERSION

PR_SET_PDEATHSIG: Final = 1  # of prctl(2)


def _channel() -> Channel:
    """Return the channel over the socket that the agent made the standard input of this process."""
    if sys.platform == "win32":  # there the standard input is a pipe with the data of a socket
        end = socket.fromshare(sys.stdin.buffer.read())
    else:
        end = socket.socket(fileno=os.dup(0))
    # libraries and programs must not read the socket as their standard input: they get an empty one
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Channel(end)


def _read(frame: bytes) -> Orders | None:
    """Return the orders; ``None`` if an agent of another version gave them."""
    try:
        orders = unseal(frame)
    except ValueError:  # another version may have other sinks
        return None
    return orders if orders.version == __version__ else None


def main() -> None:
    """Send the deliveries of the agent. Raises ``ConnectionError`` once the agent has ended."""
    channel = _channel()
    while not (frames := list(channel.receive())):
        wait(60.0, channel)
    orders = _read(frames[0])
    channel.send(Hello(__version__, SCHEMA_VERSION))
    if orders is None:
        return
    if (
        sys.platform == "linux"
    ):  # the kernel kills it when the agent ends; elsewhere only the closed socket ends it
        import ctypes  # noqa: PLC0415 - only on Linux

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # only the agent handles them, and ends its courier
        signal.signal(number, lambda *_: None)
    redact = Redactor()
    set_up(orders.log_format, orders.log_level, redact)
    # apprise logs each failure: the sink makes an error of these lines, which the worker logs once
    # a minute at most
    logging.getLogger("apprise").propagate = orders.log_level == "debug"
    Courier(channel, orders, redact).run()


if __name__ == "__main__":
    code = 0
    try:
        main()
    except ConnectionError:  # the agent has ended
        pass
    except Exception as error:  # noqa: BLE001 - a bug; its text may contain a secret
        sys.stderr.write(
            f"notbefore courier: unforeseen error ({type(error).__name__}): please report it\n"
        )
        code = 1
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads that hang in a sink
