"""The courier's process: ``python -m notbefore.courier``. The agent starts it, with the socket that
connects them as its standard input.

It keeps no file: everything that it needs comes over the socket (``courier.orders``). Its agent
ends it; it also ends when the agent ends.
"""

import ctypes
import logging
import os
import signal
import sys
from types import FrameType
from typing import Final

from notbefore import __version__
from notbefore.courier.child import take_socket
from notbefore.courier.frames import FrameSocket, wait_for_frame
from notbefore.courier.main import Courier
from notbefore.courier.orders import Hello, Orders, unseal
from notbefore.logs import set_up
from notbefore.net.redact import Redactor
from notbefore.store import SCHEMA_VERSION

PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
ORDERS_SECONDS: Final = 60.0  # how long to wait for the orders before looking again


def main() -> None:
    """Send the deliveries of the agent. Raises ``ConnectionError`` once the agent has ended."""
    # the standard output has the agent's records: a library must not write there
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    frames = take_socket()
    orders = _read(_first_frame(frames))
    frames.send(Hello(__version__, SCHEMA_VERSION))
    if orders is None:
        return

    _end_with_agent()
    redact = Redactor()
    set_up(orders.log_format, orders.log_level, redact)
    # apprise logs each failure. The sink turns these lines into an error, which is logged once a
    # minute at most
    logging.getLogger("apprise").propagate = orders.log_level == "debug"
    Courier(frames, orders, redact).run()


def _first_frame(frames: FrameSocket) -> bytes:
    while True:
        for frame in frames.receive():
            return frame
        wait_for_frame(ORDERS_SECONDS, frames)


def _read(frame: bytes) -> Orders | None:
    """Return the orders; ``None`` if an agent of another version gave them."""
    try:
        orders = unseal(frame)
    except ValueError:  # another version may have other sinks
        return None
    if orders.version != __version__:
        return None
    return orders


def _end_with_agent() -> None:
    """Let only the agent end this process: by its own end, or by killing this process."""
    if sys.platform == "linux":  # elsewhere only the closed socket ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # the agent gets these signals too, and handles them
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal. A program that the courier starts does not inherit this, unlike SIG_IGN."""


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
