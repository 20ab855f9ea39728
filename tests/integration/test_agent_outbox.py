"""The outbox in the agent's process, as its courier uses it: over a socket."""

import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from notbefore.core.delivery import DeliveryResult
from notbefore.store import agent_outbox
from notbefore.store.agent_outbox import AgentOutbox, OutboxInMemory, answer, receive, send
from notbefore.store.outbox import INTERRUPTED, CourierTurn, OutboxMoved
from notbefore.store.schema import connect
from support.box import Box, delivered, delivery, ids

BIG = b'"' + b"x" * 1_000_000 + b'"'


class Agent:
    """Answers its courier from an outbox, in a thread, until the courier has gone."""

    def __init__(self, directory: Path) -> None:
        self.box = Box(directory)
        self.here = True
        self._db = connect(self.box.path, "rw")
        self._channel, theirs = socket.socketpair()
        self.courier = AgentOutbox(theirs)
        self._theirs = theirs
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        try:
            while True:
                asked = receive(self._channel)
                send(self._channel, answer(OutboxInMemory(self._db) if self.here else None, asked))
        except OSError:
            self._channel.close()

    def turn(self, *results: DeliveryResult, now: float = 1.0, room: int = 100) -> list[str]:
        return ids(self.courier.exchange(CourierTurn(results, {"chat": room}, now)))

    def close(self) -> None:
        self._theirs.close()
        self._thread.join()
        self._db.close()
        self.box.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with closing(Agent(tmp_path)) as made:
        yield made


def test_the_courier_takes_and_reports_deliveries(agent: Agent) -> None:
    first, second = delivery(record=BIG), delivery("other", sink="hub")
    agent.box.put(first, second)
    assert agent.courier.sinks_with_work() == {"chat", "hub"}
    (leased,) = agent.courier.exchange(CourierTurn((), {"chat": 1}, 1.0))
    assert msgspec.structs.replace(leased, attempts=0) == first
    assert agent.turn() == []
    assert agent.turn(delivered(leased)) == []
    assert agent.courier.sinks_with_work() == {"hub"}
    assert agent.box.count("delivered") == 1


def test_what_nobody_holds_is_due_again(agent: Agent) -> None:
    held, lost = delivery("a"), delivery("b")
    agent.box.put(held, lost)
    assert agent.turn() == ids([held, lost])
    agent.courier.release_leases(2.0, held=[held.delivery_id])
    assert agent.turn() == [lost.delivery_id]
    agent.courier.release_leases(2.0)
    assert agent.turn() == ids([held, lost])


def test_a_new_courier_takes_over_and_runs_no_command_again(agent: Agent) -> None:
    message, command = delivery(), delivery("other", sink="command")
    agent.box.put(message, command)
    agent.courier.exchange(CourierTurn((), {"chat": 1, "command": 1}, 1.0))
    (interrupted,) = agent.courier.release_leases(2.0, ["command"])
    assert (interrupted.delivery_id, interrupted.error) == (command.delivery_id, INTERRUPTED)
    assert agent.turn(now=2.0) == [message.delivery_id]
    assert agent.courier.release_leases(3.0) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda courier: courier.release_leases(1.0),
        lambda courier: courier.release_leases(1.0, held=["x"]),
        lambda courier: courier.exchange(CourierTurn((), {}, 1.0)),
        AgentOutbox.sinks_with_work,
    ],
)
def test_an_outbox_that_is_in_a_file_again_has_moved(agent: Agent, use: Callable[[AgentOutbox], object]) -> None:
    agent.box.put(delivery())
    agent.here = False
    with pytest.raises(OutboxMoved, match="in a file again"):
        use(agent.courier)
    assert agent.box.count("accepted") == 1


def test_an_agent_that_has_ended_is_an_error_of_the_database(agent: Agent) -> None:
    agent._theirs.shutdown(socket.SHUT_WR)
    agent._thread.join()
    with pytest.raises(sqlite3.OperationalError, match="the agent does not answer"):
        agent.courier.sinks_with_work()


def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_outbox, "PATIENCE", 0.05)
    agents, couriers = socket.socketpair()
    with closing(Box(tmp_path)) as box, agents, couriers, closing(connect(box.path, "rw")) as db:
        box.put(delivery())
        courier = AgentOutbox(couriers)
        with pytest.raises(sqlite3.OperationalError, match="does not answer: timed out"):
            courier.sinks_with_work()
        late = answer(None, receive(agents))  # of a moment in which the outbox was in a file

        def answer_both() -> None:
            asked = receive(agents)
            send(agents, late)
            send(agents, answer(OutboxInMemory(db), asked))

        agents.settimeout(10)
        couriers.settimeout(10)
        with ThreadPoolExecutor(1) as pool:  # which has ended before the database is closed
            answering = pool.submit(answer_both)
            assert courier.sinks_with_work() == {"chat"}
        answering.result()


def test_a_message_may_come_in_pieces_and_end_too_early() -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            for piece in (b"\0\0", b"\0\5he", b"llo", b"\0\0\0\0", b"\0\0\0\2h"):
                there.sendall(piece)
        assert (receive(here), receive(here)) == (b"hello", b"")
        with pytest.raises(ConnectionError):
            receive(here)
