"""The courier's process: ``python -m notbefore.courier``, started by the agent with its orders on standard input.

Standard input: one line of JSON (``delivery.orders.Orders``), then single bytes: ``w`` there is work, ``l`` leave (a
successor waits), ``t`` stop, ``m`` the outbox is in the agent's process (``store.agent_outbox``). Its end means that
the agent is gone. Standard output: a byte each second as a sign of life, ``.``, or ``!`` where the outbox cannot be
used.
"""

import logging
import os
import signal
import socket
import sqlite3
import sys
import threading
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from notbefore.courier.main import AgentPipe, Courier
from notbefore.courier.message import Sink
from notbefore.courier.orders import ALIVE, LOST_STATE, OTHER_VERSION, TROUBLE, Origin, unseal
from notbefore.courier.redact import Redactor, known_secrets
from notbefore.courier.sinks import make
from notbefore.errors import StoreError
from notbefore.logs import set_up
from notbefore.store.agent_outbox import AgentOutbox
from notbefore.store.courier_outbox import CourierOutbox
from notbefore.store.lock import CourierLock

PREDECESSOR_PATIENCE: Final = 15.0  # seconds until a courier that does not leave is killed


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)  # not more: what follows is for later
        if not byte:
            break
        line += byte
    return bytes(line)


def _control() -> socket.socket:
    """What the agent writes after the orders, as a socket: on Windows ``select`` cannot wait for standard input."""
    reader, writer = socket.socketpair()
    control = os.dup(0)
    # Libraries and programs look at their standard input when they start. On Windows that would wait for this thread,
    # which reads it; so they get another one.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def forward() -> None:
        with closing(writer), suppress(OSError):
            while data := os.read(control, 4096):
                writer.sendall(data)

    threading.Thread(target=forward, name="control", daemon=True).start()
    return reader


def _agent(channel: int | None) -> AgentOutbox | None:
    if channel is None:
        return None
    os.set_inheritable(channel, False)  # noqa: FBT003 - by position only
    return AgentOutbox(socket.socket(fileno=channel))


def main() -> int:
    """Deliver until there has been nothing to do for a while; returns the exit code."""
    line = _read_line(0)
    if Origin.read(line) != Origin.here():
        return OTHER_VERSION
    orders = unseal(line)
    redact = Redactor(known_secrets(orders.sinks))
    set_up(orders.log_format, orders.log_level, redact)
    # it logs each failure; the sink takes these lines as the cause, which is logged once (``FailureLog``)
    logging.getLogger("apprise").propagate = orders.log_level == "debug"
    path = Path(orders.state_file)
    if hasattr(os, "set_blocking"):  # Windows has it from Python 3.12 on
        os.set_blocking(1, False)

    def say(what: bytes) -> None:
        with suppress(OSError):  # the agent is gone, or does not read now
            os.write(1, what)

    def sink(name: str) -> Sink:
        config = orders.sinks[name]
        for secret in known_secrets({name: config}):  # a file may hold another one by now
            redact.add(secret)
        return make(name, config, orders.messages)

    spare = Path(orders.spare_file) if orders.spare_file is not None else None
    with CourierLock(path.parent, spare.parent if spare is not None else None) as lock:
        sign, trouble = partial(say, ALIVE), partial(say, TROUBLE)
        lock.acquire(PREDECESSOR_PATIENCE, sign)
        with closing(CourierOutbox(path, spare, _agent(orders.channel))) as outbox:
            if orders.in_agent:
                outbox.use_agent()
            pipe = AgentPipe(_control(), sign, outbox.use_agent, trouble)
            courier = Courier(outbox, orders, sink, redact, pipe)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: courier.stop())
            return courier.run()


if __name__ == "__main__":
    try:
        code = main()
    except (StoreError, sqlite3.Error, OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"notbefore courier: {error}\n")
        code = LOST_STATE
    except Exception as error:  # noqa: BLE001 - a bug; its text may hold a secret
        sys.stderr.write(f"notbefore courier: {type(error).__name__}: this should not have happened\n")
        code = LOST_STATE
    sys.stderr.flush()
    os.close(1)  # the agent sees the end of a process that a disk keeps from ending
    os._exit(code)  # threads that hang in a sink are not waited for
