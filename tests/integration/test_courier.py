"""The courier in this process: what it makes of sinks that misbehave."""

import logging
import threading
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from notbefore.config.secret import Secret
from notbefore.config.sinks import Command, SinkConfig, Slack, Webhook
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.courier import sink_thread, supervisor
from notbefore.courier.orders import Orders
from notbefore.courier.sink import Receipt, Sink
from notbefore.courier.sinks import make
from notbefore.errors import ConfigError, SendError
from support.agent import PATIENCE, eventually
from support.owner import CourierThreads, Owner
from support.peers import Answer, HttpPeer


class Recording(Sink):
    """A sink that does what a test asks for, and remembers."""

    def __init__(self, act: Callable[[Message], Receipt] = lambda _: Receipt()) -> None:
        self.sent: list[str] = []
        self.closed = False
        self._act = act

    def send(self, message: Message) -> Receipt:
        self.sent.append(message.delivery_id)
        return self._act(message)

    def close(self) -> None:
        self.closed = True


COMMAND = SinkConfig(command=Command(command=("/bin/true",), timeout=Duration("60s")))


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_thread, "GRACE", 0.1)
    monkeypatch.setattr(sink_thread, "QUICK", 20.0)  # on a busy machine as well
    monkeypatch.setattr(sink_thread, "SLOW", 20.0)


def orders(*names: str, timeout: str = "60s") -> Orders:
    slack = SinkConfig(slack=Slack(url=Secret("x"), timeout=Duration(timeout)))
    return Orders(dict.fromkeys(names or ("chat",), slack))


def waiting(
    over: threading.Event, begun: threading.Event | None = None
) -> Callable[[Message], Receipt]:
    def act(_message: Message) -> Receipt:
        if begun is not None:
            begun.set()
        over.wait(60)
        return Receipt()

    return act


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SendError("no"), "pending"),
        (SendError("never", permanent=True), "dead"),
        (RuntimeError("something with s3cret"), "pending"),
        (TypeError("a bug with s3cret"), "pending"),
        (ConfigError("the secret's file is away"), "pending"),
    ],
)
def test_exception_of_a_sink_is_recorded_without_secrets(
    owner: Owner, error: Exception, state: str
) -> None:
    owner.add("a")
    with CourierThreads(
        owner, orders(), lambda _name: Recording(Mock(side_effect=error))
    ) as courier:
        courier.until(lambda: owner.results)

    (row,) = owner.rows

    assert row.state == state
    assert bool(row.error)
    assert "s3cret" not in row.error


def test_unreadable_record_is_a_dead_letter(owner: Owner) -> None:
    owner.add("a", record=b"nonsense")

    with CourierThreads(owner, orders(), lambda _name: Recording()) as courier:
        courier.to_end()

    assert owner.left == {"a": "dead"}


def test_refused_repetition_is_reported_as_a_repetition(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    act = Mock(side_effect=chain([Receipt(repeat=0.0)], repeat(SendError("401", permanent=True))))
    owner.add("a")
    with CourierThreads(owner, orders(), lambda _name: Recording(act)) as courier:
        courier.until(lambda: len(owner.results) == 2)

    assert owner.left == {"a": "repeating"}

    text = (
        "sink chat did not accept the repetition of `announced` of event e-a (401): it will be"
        " tried again"
    )
    assert text in caplog.text
    assert "for good" not in caplog.text


def test_failing_sink_is_logged_once_a_minute_until_it_accepts_again(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "notbefore")
    failures = [ValueError("unforeseen"), ValueError("again"), SendError("404", permanent=True)]
    act = Mock(side_effect=chain(failures, repeat(Receipt())))
    owner.add("a", "b", "c", "d")

    with CourierThreads(owner, orders(), lambda _name: Recording(act)) as courier:
        courier.until(lambda: list(owner.left.values()) == ["dead"])

    assert [
        (record.message.partition("event")[0], bool(record.exc_info)) for record in caplog.records
    ] == [
        ("sink chat did not accept `announced` of ", True),
        ("sink chat refused `announced` of ", False),
        ("sink chat accepts messages again", False),
    ]


def test_hung_delivery_fails_and_those_behind_it_are_due_again(owner: Owner) -> None:
    owner.add("a", "b", "c")
    owner.add("d", sink="run", once=True)
    over = threading.Event()

    def act(message: Message) -> Receipt:
        if message.delivery_id in "bd":
            over.wait(20)
        return Receipt()

    both = orders(timeout="1s").sinks | {
        "run": SinkConfig(command=Command(command=("true",), timeout=Duration("1s")))
    }
    with CourierThreads(owner, Orders(both), lambda _name: Recording(act)) as courier:
        courier.until(lambda: courier.replaced)
        outcomes = {result.delivery_id: result.outcome for result in owner.results}

        assert outcomes.pop("c") in ("returned", "accepted")
        assert outcomes == {"a": "accepted", "b": "failed", "d": "refused"}

        errors = {result.error for result in owner.results if result.delivery_id in "bd"}
        assert errors == {"no result after 1.1 s: given up"}

        over.set()
        courier.to_end()

    assert owner.left == {"d": "dead"}


def test_hung_delivery_that_arrives_after_all_is_not_sent_again(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", PATIENCE)  # as long as something is under way
    owner.add("late", sink="slow")
    owner.add("other", sink="other")
    over = threading.Event()

    def act(message: Message) -> Receipt:
        over.wait(20)
        if message.delivery_id == "other":
            eventually(lambda: len(owner.results) >= 2)
        return Receipt()

    given = Orders(orders("slow", timeout="200ms").sinks | orders("other").sinks)
    with CourierThreads(owner, given, lambda _name: Recording(act)) as courier:
        courier.until(lambda: owner.results)

        assert [(result.delivery_id, result.outcome) for result in owner.results] == [
            ("late", "failed")
        ]

        over.set()
        courier.until(lambda: owner.endings)

    assert owner.left == {}


def test_courier_waits_for_a_running_command_when_another_sink_hangs(owner: Owner) -> None:
    over = threading.Event()
    hung = threading.Event()
    sinks = {
        "runs": Recording(waiting(over)),
        "hangs": Recording(waiting(hung)),
        "other": Recording(),
    }
    given = Orders(
        orders("hangs", timeout="200ms").sinks | orders("other").sinks | {"runs": COMMAND}
    )
    owner.add("x", sink="hangs")
    owner.add("y", sink="runs", once=True)

    with CourierThreads(owner, given, lambda name: sinks[name]) as courier:
        courier.until(lambda: [result for result in owner.results if result.delivery_id == "x"])
        owner.add("z", sink="other")  # the others are served meanwhile

        courier.until(lambda: sinks["other"].sent == ["z"])

        assert not owner.endings

        over.set()
        courier.until(lambda: owner.endings)
        hung.set()

    assert owner.left == {"x": "pending"}


def test_sink_that_asks_for_a_pause_gets_no_delivery_until_then(owner: Owner) -> None:
    def act(message: Message) -> Receipt:
        if message.delivery_id == "0":
            return Receipt()
        raise SendError("429", retry_after=60.0)

    owner.add(*map(str, range(30)))
    owner.add("x", sink="other")
    sinks = {"chat": Recording(act), "other": Recording()}
    with CourierThreads(owner, orders(*sinks), lambda name: sinks[name]) as courier:
        courier.to_end()

    assert sinks["chat"].sent == ["0", "1"]
    assert sinks["other"].sent == ["x"]
    assert owner.left == dict.fromkeys(map(str, range(1, 30)), "pending")
    assert sum(row.attempts for row in owner.rows) == 1  # what was given back has not failed
    assert owner.next_due() > 50


def test_changed_secret_is_used_from_the_next_refusal_on(owner: Owner, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old", encoding="utf-8")

    class Rotating(HttpPeer):
        def answer(self, handler: Any, answer: Answer) -> None:
            key.write_text("new", encoding="utf-8")
            super().answer(handler, answer)

    owner.add("a", "b", "c")
    with Rotating() as peer:
        peer.answers.extend((Answer(200), Answer(401), Answer(200), Answer(401)))
        settings = Webhook(
            url=Secret(peer.url), headers={"Key": Secret(str(key), "file")}, allow_private=True
        )
        given = Orders({"chat": SinkConfig(webhook=settings)})

        with CourierThreads(
            owner, given, lambda name: make(name, given.sinks[name], given.messages)
        ) as courier:
            courier.until(lambda: len(owner.results) == 3)
            owner.ahead = 10.0
            courier.to_end()

        assert [request.headers["key"] for request in peer.requests] == [
            "old",
            "old",
            "new",
            "new",
            "new",
        ]
        assert [request.headers["x-notbefore-delivery-id"] for request in peer.requests] == [
            "a",
            "b",
            "c",
            "b",
            "b",
        ]

    assert owner.left == {}


@pytest.mark.parametrize("runs_once", [False, True])
def test_replaced_courier_waits_two_seconds_or_for_its_command(
    owner: Owner, *, runs_once: bool
) -> None:
    begun = threading.Event()
    over = threading.Event()
    given = Orders({"chat": COMMAND}) if runs_once else orders()
    owner.add("a", once=runs_once)
    with CourierThreads(owner, given, lambda _name: Recording(waiting(over, begun))) as courier:
        courier.until(begun.is_set)
        left = time.monotonic()
        courier.supervisor.reconfigure(given)
        if runs_once:
            courier.until(lambda: time.monotonic() > left + 2.5)
            assert not owner.endings
            over.set()

        courier.until(lambda: owner.endings)

        assert time.monotonic() - left >= 2.0

        over.set()

    left_over = [] if runs_once else ["a"]

    assert list(owner.left) == left_over


# ---- events side by side

WAITING_COMMAND = """
echo "begin $NOTBEFORE_DELIVERY_ID" >> log
while [ ! -e release ]; do sleep 0.02; done
echo "end $NOTBEFORE_DELIVERY_ID" >> log
"""


class WaitingCommands:
    """A sink whose commands write when they begin and end. They wait until they are released."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        script = f"cd {directory}\n{WAITING_COMMAND}"
        settings = Command(command=("/bin/sh", "-c", script), timeout=Duration("60s"))
        self.orders = Orders({"run": SinkConfig(command=settings)})

    def make(self, name: str) -> Sink:
        return make(name, self.orders.sinks[name], self.orders.messages)

    def release(self) -> None:
        (self._directory / "release").touch()

    @property
    def log(self) -> list[str]:
        path = self._directory / "log"
        if not path.exists():
            return []
        return path.read_text(encoding="utf-8").splitlines()


def test_slow_command_does_not_delay_that_of_another_event(owner: Owner, tmp_path: Path) -> None:
    commands = WaitingCommands(tmp_path)
    owner.add("freeze", sink="run", once=True)

    with CourierThreads(owner, commands.orders, commands.make) as courier:
        courier.until(lambda: commands.log == ["begin freeze"])

        owner.add("preempt", sink="run", once=True)
        courier.until(lambda: commands.log == ["begin freeze", "begin preempt"])
        commands.release()
        courier.to_end()

    assert owner.left == {}


def test_commands_of_one_event_run_in_order(owner: Owner, tmp_path: Path) -> None:
    commands = WaitingCommands(tmp_path)
    owner.add("announced", "started", sink="run", event="freeze", once=True)
    owner.add("other", sink="run", once=True)
    with CourierThreads(owner, commands.orders, commands.make) as courier:
        courier.until(lambda: {"begin announced", "begin other"} <= {*commands.log})
        commands.release()
        courier.to_end()

    log = commands.log

    assert log.index("end announced") < log.index("begin started")
    assert owner.left == {}


def test_commands_side_by_side_are_bounded(owner: Owner, tmp_path: Path) -> None:
    commands = WaitingCommands(tmp_path)
    owner.add(*map(str, range(Command.SIDE_BY_SIDE + 2)), sink="run", once=True)

    with CourierThreads(owner, commands.orders, commands.make) as courier:
        courier.until(lambda: len(commands.log) == Command.SIDE_BY_SIDE)
        turns_later = time.monotonic() + 2.5
        courier.until(lambda: time.monotonic() > turns_later)
        began = len(commands.log)
        commands.release()
        courier.to_end()

    assert began == Command.SIDE_BY_SIDE
    assert owner.left == {}


def test_slow_receiver_does_not_delay_another_event(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_thread, "SLOW", 0.5)
    over = threading.Event()
    sent: list[str] = []

    def act(message: Message) -> Receipt:
        sent.append(message.delivery_id)
        if message.delivery_id.startswith("slow"):
            over.wait(PATIENCE)
        return Receipt()

    owner.add("slow-1")
    with CourierThreads(owner, orders(), lambda _name: Recording(act)) as courier:
        courier.until(lambda: sent == ["slow-1"])
        owner.add("slow-2")
        courier.until(lambda: sent == ["slow-1", "slow-2"])
        owner.add("preempt")
        courier.until(lambda: sent == ["slow-1", "slow-2", "preempt"])
        over.set()
        courier.to_end()

    assert owner.left == {}


def test_slow_attempt_returns_what_waits_behind_it(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_thread, "SLOW", 0.5)
    over = threading.Event()
    sent: list[str] = []

    def act(message: Message) -> Receipt:
        sent.append(message.delivery_id)
        if message.delivery_id == "0":
            over.wait(PATIENCE)
        return Receipt()

    with CourierThreads(owner, orders(), lambda _name: Recording(act)) as courier:
        owner.add("quick")  # from now on the sink is given several at a time
        courier.until(lambda: owner.results)
        owner.add(*map(str, range(10)))
        courier.until(lambda: sent[-1] == "0")
        owner.add("preempt", severity="critical")
        courier.until(lambda: len(sent) == 12)
        over.set()
        courier.to_end()

    assert sent[:3] == ["quick", "0", "preempt"]
    assert owner.left == {}
