"""The courier's process: ``python -m notbefore.courier``, started by the agent with the socket to it as file 0.

It keeps no file: what it has to know comes over the socket (``courier.orders``). It ends when its agent does, and is
killed when it does not take its turn in time.
"""

import logging
import os
import signal
import socket
import sys
from importlib import import_module
from typing import Final

from notbefore import __version__
from notbefore.courier.main import Courier
from notbefore.courier.orders import DONE, Channel, Hello, Orders, unseal, wait
from notbefore.courier.redact import Redactor
from notbefore.errors import ConfigError
from notbefore.logs import set_up
from notbefore.store import SCHEMA_VERSION

PR_SET_PDEATHSIG: Final = 1  # of prctl(2)


def _channel() -> Channel:
    """The socket that the agent has made the standard input of this process."""
    if sys.platform == "win32":  # there a socket is handed over as text
        end = socket.fromshare(sys.stdin.buffer.read())
    else:
        end = socket.socket(fileno=os.dup(0))
    # libraries and programs look at their standard input when they start: they get another one
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Channel(end)


def _end_with_agent() -> None:
    """Have the kernel end this process when the agent ends, also while it is stopped; elsewhere the socket says so."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only there

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_frame(channel: Channel) -> bytes:
    while True:
        for frame in channel.receive():
            return frame
        wait(60.0, channel)


def _check(orders: Orders) -> None:
    """Raise an error if this version cannot work in place of the agent's."""
    from notbefore.config.load import load  # noqa: PLC0415 - a courier of the same version does without
    from notbefore.config.sinks import check_installed  # noqa: PLC0415 - as above

    for config in orders.sinks.values():
        import_module(f"notbefore.courier.sinks.{config.kind}")
        check_installed(config.settings)
    # it is all there, up to the command that starts the agent, and that takes the configuration
    options = import_module("notbefore.commands.main").parsed(orders.command)
    load(options.config, orders.variables, {}, sending=False)


def main() -> int:
    """Deliver what the agent gives; returns the exit code. Raises ``ConnectionError`` once the agent has ended."""
    channel = _channel()
    _end_with_agent()
    problem = ""
    try:
        orders = unseal(_first_frame(channel))
        if another := orders.version != __version__:
            _check(orders)
    except SystemExit:
        problem = f"it does not understand: notbefore {' '.join(orders.command)}"
    except (ImportError, ConfigError, ValueError) as error:
        another, problem = True, f"{type(error).__name__}: {error}"
    channel.send(Hello(__version__, SCHEMA_VERSION, problem))
    if another:
        return DONE
    for number in (signal.SIGTERM, signal.SIGINT):  # they are for the agent, which ends its courier
        signal.signal(number, lambda *_: None)
    redact = Redactor()
    set_up(orders.log_format, orders.log_level, redact)
    # it logs each failure; the sink takes these lines as the cause, which is logged once a minute
    logging.getLogger("apprise").propagate = orders.log_level == "debug"
    try:
        return Courier(channel, orders, redact).run()
    finally:
        channel.close()  # the agent sees the end of a process that a thread keeps from ending


if __name__ == "__main__":
    try:
        code = main()
    except ConnectionError:  # the agent has ended
        code = DONE
    except Exception as error:  # noqa: BLE001 - a bug; its text may hold a secret
        sys.stderr.write(f"notbefore courier: {type(error).__name__}: this should not have happened\n")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads that hang in a sink are not waited for
