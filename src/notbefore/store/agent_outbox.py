"""The outbox in the agent's process, where neither the state file nor a spare one can be written.

The agent answers its courier, which asks over a socket: a request and a reply for each turn, as MessagePack after its
length. What is there ends with the agent.
"""

import socket
import sqlite3
import struct
from collections.abc import Collection
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.delivery import Delivery
from notbefore.store.outbox import CourierTurn, Outbox, OutboxMoved

PATIENCE: Final = 5.0  # seconds for a reply: the agent has other work as well
_LENGTH: Final = struct.Struct("!I")


class _Request(Struct, frozen=True):
    """One of these; none: which sinks have work."""

    number: int
    turn: CourierTurn | None = None
    release: float | None = None  # Unix seconds: release the leases now, with these
    run_once: list[str] = []
    held: list[str] = []


class _Reply(Struct, frozen=True):
    number: int
    here: bool  # the outbox is in the agent's process
    deliveries: list[Delivery] = []
    sinks: set[str] = set()


class AgentOutbox:
    """The courier's side: methods of ``Outbox``. They raise ``OutboxMoved`` when it is in a file again."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.settimeout(PATIENCE)
        self._number = 0

    def release_leases(self, now: float, run_once: Collection[str] = (), held: Collection[str] = ()) -> list[Delivery]:
        """See ``Outbox``."""
        return self._ask(_Request(self._next(), release=now, run_once=list(run_once), held=list(held))).deliveries

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """See ``Outbox``."""
        return self._ask(_Request(self._next(), turn=turn)).deliveries

    def sinks_with_work(self) -> set[str]:
        """See ``Outbox``."""
        return self._ask(_Request(self._next())).sinks

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, request: _Request) -> _Reply:
        try:
            send(self._channel, msgspec.msgpack.encode(request))
            while True:
                reply = msgspec.msgpack.decode(receive(self._channel), type=_Reply)
                if reply.number == request.number:  # else it is one that nobody waited for any more
                    break
        except OSError as error:
            raise sqlite3.OperationalError(f"the agent does not answer: {error}") from None
        if not reply.here:
            raise OutboxMoved("the outbox is in a file again")
        return reply


class OutboxInMemory(Outbox):
    """The outbox over a connection that is open already, and is used by one thread at a time."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @property
    def moved(self) -> bool:
        """Never: who has the connection knows where the outbox is."""
        return False


def answer(outbox: Outbox | None, line: bytes) -> bytes:
    """The agent's side: the reply to a request; ``None``: the outbox is in a file. Raises ``sqlite3.Error``."""
    asked = msgspec.msgpack.decode(line, type=_Request)
    if outbox is None:
        reply = _Reply(asked.number, here=False)
    elif asked.turn is not None:
        reply = _Reply(asked.number, here=True, deliveries=outbox.exchange(asked.turn))
    elif asked.release is not None:
        left = outbox.release_leases(asked.release, asked.run_once, asked.held)
        reply = _Reply(asked.number, here=True, deliveries=left)
    else:
        reply = _Reply(asked.number, here=True, sinks=outbox.sinks_with_work())
    return msgspec.msgpack.encode(reply)


def send(channel: socket.socket, message: bytes) -> None:
    """Send one message; raises ``OSError``."""
    channel.sendall(_LENGTH.pack(len(message)) + message)


def receive(channel: socket.socket) -> bytes:
    """Receive one message; raises ``OSError``, also where the other process has ended."""
    return _exactly(channel, _LENGTH.unpack(_exactly(channel, _LENGTH.size))[0])


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = channel.recv(size - len(found))
        if not data:
            raise ConnectionError("it has ended")
        found += data
    return bytes(found)
