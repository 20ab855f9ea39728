"""The courier in this process: what it makes of sinks that misbehave, and of an outbox that is out of reach."""

import errno
import os
import platform
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub, SinkConfig, Slack, Webhook
from notbefore.core.delivery import Delivery
from notbefore.core.duration import Duration
from notbefore.courier.main import AgentPipe, Courier
from notbefore.courier.message import Message, Receipt, Sink
from notbefore.courier.orders import DONE, HUNG, LOST_STATE, Orders
from notbefore.courier.redact import Redactor
from notbefore.courier.sinks import make
from notbefore.courier.worker import SendAttempt, Worker
from notbefore.errors import ConfigError, SendError
from notbefore.store import outbox_intake
from notbefore.store.lock import CourierLock
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.private import open_file
from notbefore.store.schema import transaction
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME
from support.agent import eventually
from support.messages import message
from support.peers import HttpPeer, Say

RECORD = message().line


class Recording:
    """A sink that does what a test asks for, and remembers."""

    def __init__(self, act: Callable[[Message], Receipt]) -> None:
        self.sent: list[str] = []
        self.closed = False
        self._act = act

    def send(self, message: Message) -> Receipt:
        self.sent.append(message.delivery_id)
        return self._act(message)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    Store(tmp_path).close()
    with closing(Outbox(tmp_path / FILE_NAME)) as found:
        yield found


def put(outbox: Outbox, *ids: str, sink: str = "chat", record: bytes = RECORD, event: str = "") -> None:
    now = time.time()
    with transaction(outbox._db) as db:
        rows = [
            Delivery(i, event or f"e-{i}", sink, "announced", "info", now, now, now + 1e6, True, record) for i in ids
        ]
        outbox_intake.put(db, rows)


def orders(outbox: Outbox, *names: str, linger: float = 0.0) -> Orders:
    slack = SinkConfig(slack=Slack(url=Secret("x"), timeout=Duration("200ms")))
    names = names or ("chat",)
    return Orders(str(outbox.path), dict.fromkeys(names, slack), linger=linger, deadline_grace=0.1)


@contextmanager
def courier(
    outbox: Any,
    given: Orders,
    make: Callable[[str], Sink],
    line: AgentPipe = AgentPipe(),  # noqa: B008 - frozen
) -> Iterator[Courier]:
    with closing(Courier(outbox, given, make, Redactor(["s3cret"]), line)) as found:
        yield found


def raising(error: Exception) -> Callable[[Message], Receipt]:
    def act(_message: Message) -> Receipt:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SendError("no"), "pending"),
        (SendError("never", permanent=True), "dead"),
        (RuntimeError("a bug with s3cret"), "pending"),
        (ConfigError("the secret's file is away"), "pending"),
    ],
)
def test_whatever_a_sink_raises_is_written_down(outbox: Outbox, error: Exception, state: str) -> None:
    put(outbox, "a")
    with courier(outbox, orders(outbox), lambda _name: Recording(raising(error))) as found:
        assert found.run() == DONE
    (row,) = outbox.rows()
    assert (row.state, row.attempts) == (state, 1)
    assert row.error
    assert "s3cret" not in row.error


def test_a_record_that_cannot_be_read_is_a_dead_letter(outbox: Outbox) -> None:
    put(outbox, "a", record=b"nonsense")
    with courier(outbox, orders(outbox), lambda _name: Recording(lambda _: Receipt())) as found:
        found.run()
    assert [row.state for row in outbox.rows()] == ["dead"]


def test_a_sink_that_cannot_be_made_is_tried_again(outbox: Outbox) -> None:
    put(outbox, "a")
    made: list[str] = []

    def make(name: str) -> Sink:
        made.append(name)
        raise ConfigError("the file is away")

    with courier(outbox, orders(outbox), make) as found:
        found.run()
    assert (made, outbox.rows()[0].error) == (["chat"], "the file is away")


def hold(outbox: Outbox, delivery_id: str, sink: str = "chat") -> None:
    """It was delivered, and is to be repeated now."""
    put(outbox, delivery_id, sink=sink)
    with transaction(outbox._db) as db:
        db.execute("UPDATE outbox SET state = 'repeating' WHERE delivery_id = ?", (delivery_id,))


def test_a_repetition_that_is_refused_is_reported_as_one(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    hold(outbox, "a")
    refusing = Recording(raising(SendError("401", permanent=True)))
    with courier(outbox, orders(outbox), lambda _name: refusing) as found:
        found.run()
    (row,) = outbox.rows()
    assert (row.state, row.error) == ("repeating", "401")
    assert "did not accept the repetition of `announced` of event e-a (401): it will be tried again" in caplog.text
    assert "for good" not in caplog.text


def test_a_repetition_ends_with_its_sink(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    hold(outbox, "a", sink="gone")
    with courier(outbox, orders(outbox), lambda _name: Recording(lambda _: Receipt())) as found:
        found.run()
    assert outbox.rows() == []
    assert caplog.text == ""


def test_what_hangs_is_given_up_and_what_waited_behind_it_is_sent(outbox: Outbox) -> None:
    put(outbox, "a", "b", "c")
    over = threading.Event()
    sinks: list[Recording] = []

    def act(message: Message) -> Receipt:
        if message.delivery_id == "b" and len(sinks) == 1:
            over.wait(20)
        return Receipt()

    def make(_name: str) -> Sink:
        sinks.append(Recording(act))
        return sinks[-1]

    with courier(outbox, orders(outbox), make) as found:
        assert found.run() == HUNG
        assert len(sinks) == 2
        assert sinks[1].sent == ["c"]
        (row,) = outbox.rows()
        assert (row.delivery_id, row.error) == ("b", "no end after 0.3 s: given up")
        over.set()


def test_what_was_given_up_and_arrives_after_all_is_not_sent_again(outbox: Outbox) -> None:
    put(outbox, "late", "other")
    over, heard, sinks = threading.Event(), threading.Event(), list[Recording]()

    class Listening(Courier):
        def _report(self, attempt: SendAttempt) -> None:
            super()._report(attempt)
            if attempt.delivery.delivery_id == "late":
                heard.set()

    def act(message: Message) -> Receipt:
        if message.delivery_id == "late" and len(sinks) == 1:
            over.wait(20)
        elif message.delivery_id == "other":
            over.set()
            heard.wait(20)  # else the courier may have left before: then the next one sends it again
        return Receipt()

    def make(_name: str) -> Sink:
        sinks.append(Recording(act))
        return sinks[-1]

    given = msgspec.structs.replace(orders(outbox, linger=0.5), deadline_grace=1.0)
    with closing(Listening(outbox, given, make, Redactor())) as found:
        found.run()
    assert outbox.rows() == []


class Broken:
    """A sink that takes two at once, and fails the first time."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def send(self, message: Message) -> Receipt:
        raise NotImplementedError

    def send_many(self, messages: Sequence[Message]) -> list[Receipt | SendError]:
        self.calls.append([message.delivery_id for message in messages])
        return [SendError("the link is lost") if len(self.calls) == 1 else Receipt() for _ in messages]

    def close(self) -> None:
        pass


def test_what_follows_a_failure_of_its_event_is_held_back_and_other_events_are_not() -> None:
    sink, done = Broken(), list[SendAttempt]()
    ended = threading.Event()

    def report(attempt: SendAttempt) -> None:
        done.append(attempt)
        if len(done) == len(rows):
            ended.set()

    names = (("e-1", "announced"), ("e-1", "started"), ("e-1", "finished"), ("e-2", "announced"))
    rows = [
        Delivery(f"{event}-{kind}", event, "hub", kind, "info", 0.0, 0.0, 1e12, expires_with_event=False, record=RECORD)  # type: ignore[arg-type]  # the kinds are as they should be
        for event, kind in names
    ]
    worker = Worker("hub", lambda: sink, report, batch=2)
    worker.give(rows)
    assert ended.wait(20)
    worker.leave()
    assert sink.calls == [["e-1-announced", "e-1-started"], ["e-2-announced"]]
    taken = {attempt.delivery.delivery_id: attempt.receipt is not None for attempt in done}
    assert taken == {"e-1-announced": False, "e-1-started": False, "e-1-finished": False, "e-2-announced": True}


def test_a_sink_that_asks_for_a_pause_is_left_alone_with_all_that_is_due(outbox: Outbox) -> None:
    def act(message: Message) -> Receipt:
        if message.delivery_id == "0":
            return Receipt()
        raise SendError("429", retry_after=60.0)

    put(outbox, *map(str, range(30)))
    asking, other = Recording(act), Recording(lambda _: Receipt())
    put(outbox, "x", sink="other")
    begun = time.time()
    sinks = {"chat": asking, "other": other}
    with courier(outbox, orders(outbox, *sinks), lambda name: sinks[name]) as found:
        assert found.run() == DONE
    assert len(asking.sent) < 5  # what was just being given to it may go out yet
    assert other.sent == ["x"]
    left = outbox.rows("pending")
    assert [row.delivery_id for row in left] == [str(number) for number in range(1, 30)]
    assert all(row.due >= begun + 60 for row in left)  # for the next courier as well


def test_a_sink_is_used_again_once_the_pause_is_over(outbox: Outbox) -> None:
    answers = iter([SendError("429", retry_after=0.5)])

    def act(_message: Message) -> Receipt:
        for error in answers:
            raise error
        return Receipt()

    put(outbox, *map(str, range(20)))
    sink = Recording(act)
    with courier(outbox, orders(outbox, linger=2.0), lambda _name: sink) as found:
        assert found.run() == DONE
    assert outbox.rows() == []
    assert len(sink.sent) == 21


def test_a_secret_that_was_changed_is_used_from_the_next_refusal_on(outbox: Outbox, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old", encoding="utf-8")

    class Rotating(HttpPeer):
        def answer(self, handler: Any, say: Say) -> None:
            key.write_text("new", encoding="utf-8")
            super().answer(handler, say)

    put(outbox, "a", "b", "c")
    with Rotating() as peer:
        peer.answers.extend((Say(200), Say(401), Say(200), Say(401)))
        settings = Webhook(url=Secret(peer.url), headers={"Key": Secret(str(key), "file")}, allow_private=True)
        given = Orders(str(outbox.path), {"chat": SinkConfig(webhook=settings)}, linger=0.0)
        with courier(outbox, given, lambda name: make(name, given.sinks[name], given.messages)) as found:
            found.run()
        assert [request.headers["key"] for request in peer.requests] == ["old", "old", "new", "new"]
        assert [request.headers["x-notbefore-delivery-id"] for request in peer.requests] == ["a", "b", "b", "c"]
    (row,) = outbox.rows()
    assert (row.delivery_id, row.state) == ("c", "dead")  # the new one is refused as well: that is an answer


class HangingBatch(Broken):
    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self._over = over

    def send_many(self, messages: Sequence[Message]) -> list[Receipt | SendError]:
        self._over.wait(60)
        return super().send_many(messages)


def test_what_follows_in_an_event_that_hangs_is_given_back_with_it(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventHub, "BATCH", 2)
    put(outbox, "a", "b", "c", sink="hub", event="e")
    over = threading.Event()
    settings = EventHub(connection_string=Secret("x"), timeout=Duration("200ms"))
    given = Orders(str(outbox.path), {"hub": SinkConfig(event_hub=settings)}, linger=0.0, deadline_grace=0.1)
    with courier(outbox, given, lambda _name: HangingBatch(over)) as found:
        deadline = threading.Timer(20, found.stop)
        deadline.start()
        assert found.run() == HUNG
        deadline.cancel()
        assert [(row.delivery_id, row.error) for row in outbox.rows()] == [
            (name, "no end after 0.3 s: given up") for name in "abc"
        ]
        over.set()


def test_a_courier_with_many_threads_that_hang_leaves_though_it_is_busy(outbox: Outbox) -> None:
    over, done = threading.Event(), list[str]()

    def hang(message: Message) -> Receipt:
        over.wait(20)
        done.append(message.sink)
        return Receipt()

    names = [f"hanging-{number}" for number in range(4)]
    for name in (*names, "busy"):
        put(outbox, name, sink=name)
    given = orders(outbox, *names)
    slow = SinkConfig(slack=Slack(url=Secret("x"), timeout=Duration("60s")))
    given = msgspec.structs.replace(given, sinks=given.sinks | {"busy": slow})
    with courier(outbox, given, lambda _name: Recording(hang)) as found:
        assert found.run() == HUNG
        assert done == []
        over.set()


class Flaky:
    """An outbox that is out of reach for a while."""

    def __init__(self, outbox: Outbox, failures: int) -> None:
        self._outbox, self._failures = outbox, failures
        self.release_leases, self.sinks_with_work = outbox.release_leases, outbox.sinks_with_work

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        if turn.results and self._failures:
            self._failures -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return self._outbox.exchange(turn)


def test_a_courier_that_cannot_begin_tries_again(outbox: Outbox) -> None:
    put(outbox, "a")
    sink, flaky, failures = Recording(lambda _: Receipt()), Flaky(outbox, 0), [1, 2]

    def release(now: float, run_once: Any = ()) -> list[Delivery]:
        if failures:
            raise sqlite3.OperationalError(f"database is locked ({failures.pop()})")
        return outbox.release_leases(now, run_once)

    flaky.release_leases = release  # type: ignore[assignment]
    with courier(flaky, orders(outbox), lambda _name: sink) as found:
        assert found.run() == DONE
    assert (sink.sent, outbox.rows()) == (["a"], [])


def test_what_was_accepted_and_cannot_be_written_is_not_sent_again(outbox: Outbox) -> None:
    put(outbox, "a")
    sink = Recording(lambda _: Receipt())
    with courier(Flaky(outbox, 2), orders(outbox), lambda _name: sink) as found:
        assert found.run() == DONE
    assert (sink.sent, outbox.rows()) == (["a"], [])


def test_an_outbox_that_stays_out_of_reach_ends_the_courier(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notbefore.courier.main.STATE_PATIENCE", 1.0)
    put(outbox, "a")
    with courier(Flaky(outbox, 10**6), orders(outbox), lambda _name: Recording(lambda _: Receipt())) as found:
        assert found.run() == LOST_STATE


def test_once_asked_to_stop_it_judges_no_sink_that_it_does_not_know(outbox: Outbox) -> None:
    put(outbox, "a", sink="new")
    with courier(outbox, orders(outbox), lambda _name: Recording(lambda _: Receipt())) as found:
        found.stop()
        found.run()
    assert [row.state for row in outbox.rows()] == ["pending"]


@pytest.mark.alone
def test_asked_to_leave_it_waits_for_what_is_under_way_and_not_for_what_hangs(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notbefore.courier.main.STOP_SECONDS", 1e6)
    over = threading.Event()

    def hang(_message: Message) -> Receipt:
        over.wait(60)
        return Receipt()

    def finish(_message: Message) -> Receipt:
        writer.send(b"l")
        eventually(lambda: found._leaving)
        return Receipt()

    put(outbox, "a", sink="hanging")
    put(outbox, "b", "c", sink="slow")
    reader, writer = socket.socketpair()
    sinks = {"hanging": Recording(hang), "slow": Recording(finish)}
    given = msgspec.structs.replace(orders(outbox, *sinks, linger=600.0), deadline_grace=1e6)
    with closing(reader), closing(writer), courier(outbox, given, lambda name: sinks[name], AgentPipe(reader)) as found:
        assert found.run() == DONE
        over.set()
    assert [row.delivery_id for row in outbox.rows()] == ["a", "c"]  # the rest is for the successor


def test_it_leaves_when_its_agent_is_gone(outbox: Outbox) -> None:
    reader, writer = socket.socketpair()
    writer.close()
    beats: list[float] = []
    line = AgentPipe(reader, lambda: beats.append(time.monotonic()))
    with courier(outbox, orders(outbox, linger=600.0), lambda _name: Recording(lambda _: Receipt()), line) as found:
        assert found.run() == DONE
    reader.close()
    assert beats


HOLDER = """
import sys, time
from pathlib import Path
from notbefore.store.lock import CourierLock
with CourierLock(Path(sys.argv[1])) as lock:
    lock.acquire(5, lambda: None)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_courier_that_does_not_leave_is_ended_by_its_successor(tmp_path: Path) -> None:
    beats: list[int] = []
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        with CourierLock(tmp_path) as lock:
            lock.acquire(0.3, lambda: beats.append(1))
        assert holder.wait(20) == -signal.SIGKILL
    assert beats


ZOMBIE = HOLDER.replace("(Path(sys.argv[1]))", "(Path(sys.argv[1]), Path(sys.argv[2]))").replace(
    "time.sleep(60)",
    """
    import ctypes, threading
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall(60, 0)  # ends the main thread alone: so looks a killed process that waits for a disk
""",
)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the number of a system call")
def test_couriers_that_were_killed_and_wait_for_the_disk_are_not_waited_for(tmp_path: Path) -> None:
    other, holders = tmp_path / "other", []
    other.mkdir()
    for _ in range(2):
        holders.append(subprocess.Popen([sys.executable, "-c", ZOMBIE, tmp_path, other], stdout=subprocess.PIPE))
        assert holders[-1].stdout
        assert holders[-1].stdout.readline() == b"held\n"
    with CourierLock(tmp_path, other) as lock:
        lock.acquire(3600, lambda: None)
        assert (other / "courier-2.lock").read_text().strip() == str(os.getpid())
    for holder in holders:
        with holder:
            holder.kill()


def test_where_no_lock_can_be_made_the_directory_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("notbefore.store.lock.open_file", read_only)
    with CourierLock(tmp_path) as lock, CourierLock(tmp_path) as second:
        lock.acquire(0.0, lambda: None)
        assert not second._is_taken(0.0)


def test_while_the_disk_hangs_the_lock_of_the_spare_file_is_taken_as_soon_as_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, other = threading.Event(), tmp_path / "other"

    def hangs(path: Path) -> int:
        if path.parent == tmp_path:
            answers.wait()
        return open_file(path)

    monkeypatch.setattr("notbefore.store.lock.open_file", hangs)
    with CourierLock(tmp_path, other) as lock:
        lock.acquire(3600, lambda: other.mkdir(exist_ok=True))
    assert (other / "courier-1.lock").exists()
    answers.set()


@pytest.mark.parametrize(
    ("severity", "not_before", "age", "state"),
    [
        ("critical", 600.0, 400.0, "pending"),  # NotBefore is ahead
        ("critical", -600.0, 10.0, "pending"),  # within five minutes of the change
        ("critical", -600.0, 400.0, "dead"),
        ("warning", 600.0, 10.0, "dead"),
    ],
)
def test_a_refusal_that_may_pass_is_final_for_what_is_critical_only_when_the_time_is_over(
    outbox: Outbox, severity: Any, not_before: float, age: float, state: str
) -> None:
    now = time.time()
    row = Delivery(
        "a", "e", "chat", "announced", severity, now - age, now - age, now + 1e6,
        expires_with_event=True, record=RECORD, not_before=now + not_before,
    )  # fmt: skip
    with transaction(outbox._db) as db:
        outbox_intake.put(db, [row])
    with HttpPeer() as peer:
        peer.default = Say(403, body=b"no such channel")
        settings = Webhook(url=Secret(peer.url), allow_private=True)
        given = Orders(str(outbox.path), {"chat": SinkConfig(webhook=settings)}, linger=0.0)
        with courier(outbox, given, lambda name: make(name, given.sinks[name], given.messages)) as found:
            found.run()
    (left,) = outbox.rows()
    assert (left.state, left.error) == (state, "403: no such channel")
