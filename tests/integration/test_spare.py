"""The spare state file: what is delivered while the state file cannot be written, and what becomes of it after that."""

import os
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.change import Change
from notbefore.core.delivery import Delivery, DeliveryResult, Routing, Terms, deliveries
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.errors import StoreError
from notbefore.store import spare as module
from notbefore.store.agent_outbox import AgentOutbox, receive, send
from notbefore.store.connection import Connection
from notbefore.store.courier_outbox import CourierOutbox
from notbefore.store.disk import DiskThread
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.schema import transaction
from notbefore.store.spare import file_in_use, spare_path
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME, StoredChange
from support.agent import eventually
from support.azure import ME, document, item, now

FOR_EVER = Routing(sinks={"hub": Terms(expire_after=1e10, expire_on_end=False)})
ROOM = {"hub": 100}


def stored(change: Change) -> StoredChange:
    line = Record.of(change, None).line()
    return StoredChange(change, line, deliveries(change, line, FOR_EVER, Vm(name=ME)))


class Agent:
    """A store that is given one document after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / FILE_NAME
        self.store = Store(directory)
        self.state = self.store.load()

    def sees(self, *names: str) -> None:
        second = (self.state.tracked.incarnation or 0) + 1
        result = diff(self.state.tracked, document(*map(item, names), incarnation=second), now(second))
        totals = self.state.totals
        for change in result.changes:
            totals = totals.plus(change)
        self.state = replace(self.state, tracked=result.tracked, totals=totals)
        self.store.commit(self.state, [stored(change) for change in result.changes])

    def restarts(self) -> None:
        """It is killed: nothing is closed in order, and the locks are gone with the process."""
        self.store._lock.release()
        self.store = Store(self.directory)
        self.state = self.store.load()

    def history(self) -> int:
        return len(self.store.history(None, 1000).records)


class Receiver:
    """A courier with a receiver that accepts everything; it notes what it has accepted, in order."""

    def __init__(self, agent: Agent, run_once: Collection[str] = (), agent_outbox: AgentOutbox | None = None) -> None:
        self.outbox = CourierOutbox(agent.path, agent.store.spare_path, agent_outbox)
        self.outbox.release_leases(time.time(), run_once)
        self.accepted: list[str] = []
        self.under_way: list[Delivery] = []
        self._results: list[DeliveryResult] = []

    def leases(self) -> None:
        """One turn: report what was accepted before, take what is due."""
        self.under_way += self.outbox.exchange(CourierTurn(self._results, ROOM, time.time()))
        self._results = []

    def accepts(self) -> None:
        """The receiver accepts what is under way; it is reported at the next turn."""
        self.accepted += [one.event_key for one in self.under_way]
        self._results += [DeliveryResult(one.delivery_id, "delivered", time.time()) for one in self.under_way]
        self.under_way = []

    def works(self) -> None:
        for _ in range(3):
            self.leases()
            self.accepts()
        self.leases()


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "state")
    yield made
    made.store.close()


@pytest.fixture
def receiver(agent: Agent) -> Iterator[Receiver]:
    made = Receiver(agent)
    yield made
    made.outbox.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process writes, for longer than anybody waits for it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def counts(agent: Agent) -> dict[str, int]:
    with closing(OutboxReader(agent.path, DiskThread(), agent.store.spare_path)) as reader:
        reader.refresh()
        return {result: count for (_, result), count in reader.view.counts.items()}


def rows(path: Path) -> list[Delivery]:
    with closing(Outbox(path)) as outbox:
        return outbox.rows()


def test_a_change_is_delivered_while_the_state_file_cannot_be_written(agent: Agent, receiver: Receiver) -> None:
    with locked(agent.path):
        agent.sees("a")
        assert agent.store.degraded == "database is locked"
        receiver.works()
        assert receiver.accepted == ["a"]
        agent.sees("a", "b")
        receiver.works()
        assert receiver.accepted == ["a", "b"]
        agent.store.retry()
        assert agent.store.degraded
        assert agent.history() == 2
    agent.store.retry()
    assert agent.store.degraded is None
    receiver.works()
    agent.sees("a", "b", "c")
    receiver.works()
    assert receiver.accepted == ["a", "b", "c"]
    assert (rows(agent.path), agent.history()) == ([], 3)
    assert counts(agent) == {"accepted": 3, "delivered": 3}
    assert list(agent.store.spare_path.parent.parent.iterdir()) == []


@contextmanager
def courier_channel(agent: Agent) -> Iterator[AgentOutbox]:
    """What a courier asks where the outbox is in its agent's process, which answers in a thread."""
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with suppress(OSError):
            while True:
                send(ours, agent.store.serve(receive(ours)))

    with ours, ThreadPoolExecutor(1) as pool:
        pool.submit(answer)
        with theirs:
            yield AgentOutbox(theirs)


def test_what_a_spare_file_holds_that_can_no_longer_be_written_goes_on_from_memory_in_order(agent: Agent) -> None:
    agent.sees("a")
    with courier_channel(agent) as channel:
        receiver = Receiver(agent, agent_outbox=channel)
        with locked(agent.path):
            agent.sees("a", "b")
            agent.sees("b", "c")  # `a` is canceled: its end waits for its beginning
            receiver.leases()
            assert len(receiver.under_way) == 3
            with locked(agent.store.spare_path):
                agent.sees("c", "d")
            assert agent.store.in_memory
            receiver.accepts()
            receiver.outbox.use_agent()
            receiver.works()
            assert receiver.accepted == ["a", "b", "c", "a", "d", "b"]  # ends are less urgent
            agent.store.retry()
            assert agent.store.in_memory
            agent.sees("c", "d", "e")
        agent.store.retry()
        assert agent.store.degraded is None
        assert not agent.store.spare_path.exists()
        receiver.works()
        assert receiver.accepted == ["a", "b", "c", "a", "d", "b", "e"]
        assert (rows(agent.path), agent.history()) == ([], 7)
        assert counts(agent) == {"accepted": 7, "delivered": 7}
        receiver.outbox.close()


def test_a_spare_file_that_memory_has_replaced_is_merged_before_what_came_later(agent: Agent) -> None:
    with locked(agent.path):
        agent.sees("a")
        with locked(agent.store.spare_path):
            agent.sees("a", "b")
        assert agent.store.in_memory
    agent.store.retry()
    assert agent.store.degraded is None
    assert not agent.store.spare_path.exists()
    assert [one.event_key for one in rows(agent.path)] == ["a", "b"]
    assert agent.history() == 2
    receiver = Receiver(agent)
    receiver.works()
    assert receiver.accepted == ["a", "b"]
    assert counts(agent) == {"accepted": 2, "delivered": 2}
    receiver.outbox.close()


def test_a_spare_file_that_can_be_neither_written_nor_read_is_merged_once_it_can(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(agent.path):
        agent.sees("a")
        with locked(agent.store.spare_path), monkeypatch.context() as patch:
            patch.setattr(module, "connect_for_reading", unreadable)
            agent.sees("a", "b")
        assert agent.store.in_memory
    agent.store.retry()
    assert sorted(one.event_key for one in rows(agent.path)) == ["a", "b"]
    assert counts(agent) == {"accepted": 2}


def test_the_ids_are_those_that_the_deliveries_have_always(agent: Agent, tmp_path: Path) -> None:
    other = Agent(tmp_path / "other")
    other.sees("a")
    with locked(agent.path):
        agent.sees("a")
        assert [one.delivery_id for one in rows(agent.store.spare_path)] == [
            one.delivery_id for one in rows(other.path)
        ]
    other.store.close()


def test_what_waited_before_goes_on_as_well_and_in_order(agent: Agent, receiver: Receiver) -> None:
    agent.sees("a")
    agent.sees("a", "b")
    with locked(agent.path):
        agent.sees("b")  # `a` is canceled
        receiver.works()
        assert sorted(receiver.accepted) == ["a", "a", "b"]
        assert counts(agent) == {"accepted": 3, "delivered": 3}
    agent.store.retry()
    receiver.works()
    assert len(receiver.accepted) == 3
    assert (rows(agent.path), counts(agent)) == ([], {"accepted": 3, "delivered": 3})


def test_what_is_on_its_way_when_the_file_changes_is_sent_once(agent: Agent, receiver: Receiver) -> None:
    agent.sees("a")
    receiver.leases()
    with locked(agent.path):
        agent.sees("a", "b")
        receiver.leases()
        receiver.accepts()
        receiver.leases()
        assert sorted(receiver.accepted) == ["a", "b"]
        agent.sees("a", "b", "c")
        receiver.leases()
    agent.store.retry()  # `c` is on its way
    receiver.works()
    assert sorted(receiver.accepted) == ["a", "b", "c"]
    assert (rows(agent.path), counts(agent)) == ([], {"accepted": 3, "delivered": 3})


def test_what_the_courier_did_just_before_it_looked_is_not_done_again(agent: Agent, receiver: Receiver) -> None:
    agent.sees("a")
    agent.sees("a", "b")
    receiver.leases()
    receiver.accepts()
    made = module.make(agent.store.spare_path.with_name("later.db"), agent.path, lambda *_: None)  # the agent copies
    made.close()
    receiver.leases()  # and the courier, which has not seen it yet, reports `a` and `b`
    made.path.replace(agent.store.spare_path)
    receiver.works()
    assert receiver.accepted == ["a", "b"]
    assert rows(agent.store.spare_path) == []


def test_a_killed_agent_goes_on_from_the_spare_file(agent: Agent, receiver: Receiver) -> None:
    with locked(agent.path):
        agent.sees("a")
        receiver.works()
        agent.restarts()
        assert list(agent.state.tracked.events) == ["a"]
        agent.sees("a", "b")
        receiver.works()
        assert receiver.accepted == ["a", "b"]
    agent.restarts()
    assert agent.store.degraded is None
    assert not agent.store.spare_path.exists()
    assert list(agent.state.tracked.events) == ["a", "b"]
    receiver.works()
    assert (receiver.accepted, agent.history()) == (["a", "b"], 2)
    assert (rows(agent.path), counts(agent)) == ([], {"accepted": 2, "delivered": 2})


def test_an_agent_that_is_killed_before_it_removed_a_spare_file_takes_it_over_once(
    agent: Agent, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(agent.path):
        agent.sees("a")
        receiver.works()
        agent.sees("a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(module, "remove", lambda _: None)
        agent.store.retry()
    assert agent.store.spare_path.exists()
    agent.restarts()
    assert not agent.store.spare_path.exists()
    receiver.works()
    assert (receiver.accepted, agent.history(), counts(agent)) == (["a", "b"], 2, {"accepted": 2, "delivered": 2})


def test_a_start_on_a_disk_that_is_full_reads_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Agent(tmp_path / "state")
    first.sees("a")
    first.store.close()

    def full(_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("notbefore.store.state_file.StateFile.open", only_for("run", full))
        second = Agent(tmp_path / "state")
        assert second.store.degraded
        assert list(second.state.tracked.events) == ["a"]
        with closing(CourierOutbox(second.path, second.store.spare_path)) as outbox:
            assert [one.event_key for one in outbox.exchange(CourierTurn([], ROOM, time.time()))] == ["a"]
    second.store.retry()
    assert second.store.degraded is None
    second.store.close()


def only_for(part: str, fails: Any) -> Any:
    """``StateFile.open`` that fails but for files with ``part`` in their path."""
    from notbefore.store.state_file import StateFile  # noqa: PLC0415 - before it is replaced

    real = StateFile.open
    return lambda self: real(self) if part in self.path.parts else fails(self)


def test_the_spare_file_is_ours_alone(agent: Agent) -> None:
    with locked(agent.path):
        agent.sees("a")
        spare = agent.store.spare_path
        assert stat.S_IMODE(spare.parent.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in spare.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("trap", ["a directory of others", "a link", "a file"])
def test_nothing_is_written_where_somebody_else_prepared_it(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture, trap: str
) -> None:
    directory = agent.store.spare_path.parent
    if trap == "a directory of others":
        directory.mkdir(mode=0o777)
        directory.chmod(0o777)
    elif trap == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    else:
        directory.write_text("")
    with locked(agent.path):
        for names in (["a"], ["a", "b"], ["a", "b", "c"]):
            agent.sees(*names)
        assert caplog.text.count("nor can the spare state file") == 1
        assert agent.history() == 3
    agent.store.retry()
    assert agent.store.degraded is None
    assert len(rows(agent.path)) == 3
    assert trap != "a link" or list((tmp_path / "elsewhere").iterdir()) == []


def test_what_an_agent_that_was_killed_left_of_a_spare_file_is_removed_at_the_next_start(agent: Agent) -> None:
    agent.sees("a")
    left = agent.store.spare_path.parent
    left.mkdir(mode=0o700)
    for name in ("unfinished.db", "unfinished.db-journal"):
        (left / name).write_bytes(b"a part")
    agent.restarts()
    assert not left.exists()


def test_a_spare_file_that_another_user_has_put_there_is_neither_read_nor_removed(agent: Agent) -> None:
    with locked(agent.path):
        agent.sees("a", "b")
        forged = agent.store.spare_path
        agent.store.close()
    forged.parent.chmod(0o777)  # as if it was another user's: nobody but its owner can use one of ours
    agent.restarts()
    assert agent.state.tracked.events == {}
    assert forged.exists()
    agent.sees("c")
    receiver = Receiver(agent)
    receiver.works()
    assert receiver.accepted == ["c"]


def test_a_spare_file_that_is_no_database_is_removed(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.sees("a")
    agent.store.spare_path.parent.mkdir(mode=0o700)
    agent.store.spare_path.write_bytes(b"no database" * 1000)
    agent.restarts()
    assert "cannot be used" in caplog.text
    assert not agent.store.spare_path.exists()
    assert list(agent.state.tracked.events) == ["a"]


def test_commands_find_the_outbox_where_it_is(agent: Agent) -> None:
    agent.sees("a")
    assert file_in_use(agent.directory) == agent.path
    with locked(agent.path):
        agent.sees("a", "b")
        assert file_in_use(agent.directory) == agent.store.spare_path == spare_path(agent.directory)
        with closing(Outbox(file_in_use(agent.directory))) as outbox:
            assert outbox.drop([one.delivery_id for one in outbox.rows() if one.event_key == "a"]) == 1
    agent.store.retry()
    assert file_in_use(agent.directory) == agent.path
    assert [one.event_key for one in rows(agent.path)] == ["b"]


def test_the_courier_follows_a_state_file_that_is_deleted(agent: Agent, receiver: Receiver) -> None:
    agent.sees("a")
    agent.sees("a", "b")
    receiver.leases()
    agent.path.unlink()
    with pytest.raises(sqlite3.OperationalError):  # it is tried again in the next turn
        receiver.outbox.exchange(CourierTurn([], ROOM, time.time()))
    agent.store.look_after()
    receiver.accepts()
    receiver.works()
    agent.sees("a", "b", "c")
    receiver.works()
    assert receiver.accepted == ["a", "b", "c"]
    assert (rows(agent.path), counts(agent)) == ([], {"accepted": 3, "delivered": 3})


def test_a_repetition_and_a_thread_outlive_both_changes_of_the_file(agent: Agent) -> None:
    agent.sees("a")
    with closing(CourierOutbox(agent.path, agent.store.spare_path)) as outbox:
        (one,) = outbox.exchange(CourierTurn([], ROOM, time.time()))
        delivered = DeliveryResult(one.delivery_id, "delivered", time.time() - 5, thread="t", repeat=1.0)
        outbox.exchange(CourierTurn([delivered], {}, time.time()))
        with locked(agent.path):
            agent.sees("a", "b")
            taken = outbox.exchange(CourierTurn([], ROOM, time.time()))
            found = sorted((row.event_key, row.state, row.thread) for row in taken)
            assert found == [("a", "repeating", "t"), ("b", "pending", None)]
        agent.store.retry()
        results = [DeliveryResult(row.delivery_id, "delivered", time.time(), repeat=9e9) for row in taken]
        outbox.exchange(CourierTurn(results, {}, time.time()))
    assert sorted((row.event_key, row.state) for row in rows(agent.path)) == [("a", "repeating"), ("b", "repeating")]
    agent.sees("b")
    assert [(row.event_key, row.kind) for row in rows(agent.path)] == [("b", "announced"), ("a", "canceled")]


def test_what_was_counted_before_the_state_file_could_be_read_is_added_to(
    agent: Agent, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.sees("a")
    receiver.works()
    agent.store.close()

    def fails(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def fails_to_connect(_: Path) -> None:
        raise StoreError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr("notbefore.store.state_file.StateFile.open", only_for("run", fails))
        patch.setattr("notbefore.store.state_file.connect_for_reading", fails_to_connect)
        patch.setattr("notbefore.store.spare.connect_for_reading", fails_to_connect)
        agent.store = Store(agent.directory)
        agent.state = agent.store.load()
        assert (agent.store.degraded, agent.state.tracked.events) == ("disk I/O error", {})
        agent.sees("b")
        receiver.works()
        assert counts(agent) == {"accepted": 1, "delivered": 1}
    agent.store.retry()
    assert agent.store.degraded is None
    assert counts(agent) == {"accepted": 2, "delivered": 2}
    assert receiver.accepted == ["a", "b"]


def test_what_was_delivered_before_the_state_file_could_not_be_read_is_neither_sent_nor_counted_again(
    agent: Agent, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.sees("a")
    receiver.works()

    def fails_to_connect(_: Path) -> None:
        raise StoreError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr("notbefore.store.spare.connect_for_reading", fails_to_connect)
        with locked(agent.path):
            agent.sees("a", "b")  # the agent cannot see that `a` was delivered, and puts it in again
            assert [row.event_key for row in rows(agent.store.spare_path)] == ["a", "b"]
            receiver.works()
    agent.store.retry()
    assert agent.store.degraded is None
    assert counts(agent) == {"accepted": 2, "delivered": 2}
    assert receiver.accepted == ["a", "b"]


KILLED = """
import os, signal, sys
from pathlib import Path
from notbefore.store import spare
from notbefore.store.state import Store
step = sys.argv[2]
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if step == "before":
    spare._take_over = die
else:
    spare.remove = die
Store(Path(sys.argv[1]))
"""


def test_a_disk_that_stops_answering_while_its_outbox_is_copied_holds_up_nobody(
    agent: Agent, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, closed_by = threading.Event(), list[str]()

    class Opened(Connection):
        def close(self) -> None:
            closed_by.append(threading.current_thread().name)
            super().close()

    def hangs(path: Path) -> sqlite3.Connection:
        answers.wait()
        return sqlite3.connect(path, check_same_thread=False, factory=Opened)

    monkeypatch.setattr(module, "connect_for_reading", hangs)
    with locked(agent.path):  # the courier hangs in the disk, and holds the lock: the agent's own thread does not hang
        begun = time.monotonic()
        agent.sees("a")
        assert time.monotonic() - begun < 5  # what benchmarks/kills.py calls late; the disk never answers
        receiver.works()
        assert receiver.accepted == ["a"]
    answers.set()
    eventually(lambda: closed_by == ["disk"])  # it may hang again, in that thread and in no other


def test_a_courier_that_waits_for_the_disk_goes_on_as_soon_as_the_agent_has_given_it_up(
    agent: Agent, receiver: Receiver
) -> None:
    answers = threading.Event()
    receiver.outbox._disk.post(answers.wait)
    with locked(agent.path), ThreadPoolExecutor() as pool:
        seen = pool.submit(agent.sees, "a")
        receiver.leases()  # fails where it only waits for the disk
        seen.result()
        receiver.works()
        assert receiver.accepted == ["a"]
    answers.set()


@pytest.mark.parametrize("merged_first", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_command_that_was_interrupted_is_not_run_again_wherever_its_successor_begins(
    agent: Agent, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, *, copied: bool, merged_first: bool
) -> None:
    agent.sees("a")
    receiver.leases()  # `a` is under way, and its courier is killed
    agent.store._written = ()  # it was written a while ago
    if not copied:
        monkeypatch.setattr(module, "connect_for_reading", unreadable)
    with locked(agent.path):
        agent.sees("a", "b")
        if not merged_first:
            successor = Receiver(agent, run_once=["hub"])
            successor.works()
    agent.store.retry()
    if merged_first:
        successor = Receiver(agent, run_once=["hub"])
    successor.works()
    successor.outbox.close()
    assert successor.accepted == ["b"]
    assert [(one.event_key, one.state) for one in rows(agent.path)] == [("a", "dead")]


def unreadable(path: Path) -> sqlite3.Connection:
    raise StoreError(f"{path} cannot be read")


@pytest.mark.parametrize("step", ["before", "after"])
def test_kill_9_while_a_spare_file_is_taken_over_loses_and_doubles_nothing(
    agent: Agent, receiver: Receiver, step: str
) -> None:
    with locked(agent.path):
        agent.sees("a")
        agent.sees("a", "b")
        receiver.leases()
    agent.store.close()
    run = subprocess.run([sys.executable, "-c", KILLED, str(agent.directory), step], env=os.environ, check=False)
    assert run.returncode < 0
    receiver.accepts()
    agent.store = Store(agent.directory)
    agent.state = agent.store.load()
    receiver.works()
    assert receiver.accepted == ["a", "b"]
    assert (agent.history(), rows(agent.path), counts(agent)) == (2, [], {"accepted": 2, "delivered": 2})


def test_a_transaction_that_waited_for_the_merge_is_done_in_the_state_file(agent: Agent) -> None:
    with locked(agent.path):
        agent.sees("a")
        outbox = Outbox(agent.store.spare_path)
    agent.store.retry()
    with pytest.raises(sqlite3.OperationalError, match="not in use"), outbox.transaction():
        pass
    outbox.close()
    with closing(sqlite3.connect(agent.path, isolation_level=None)) as db, transaction(db):
        assert db.execute("SELECT count(*) FROM outbox").fetchone() == (1,)
