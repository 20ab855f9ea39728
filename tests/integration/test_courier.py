"""The courier, as a thread of this process, serves sinks that misbehave."""

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
from notbefore.config.sinks import Command, Email, Messages, SinkConfig, Slack, Webhook
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.courier import sink_thread, supervisor
from notbefore.courier.orders import Orders
from notbefore.courier.plugins import ForeignSink
from notbefore.courier.sink import Receipt, Sink
from notbefore.courier.sinks import make
from notbefore.errors import ConfigError, SendError
from support.agent import PATIENCE, eventually
from support.owner import CourierThreads, Owner
from support.peers import Answer, HttpPeer


class Recording(Sink):
    """A sink that calls a function of the test, and records the ids that it was asked to send."""

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
def _time_limits_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_thread, "GRACE", 0.1)
    monkeypatch.setattr(sink_thread, "QUICK", 20.0)
    monkeypatch.setattr(sink_thread, "SLOW", 20.0)


def orders(*names: str, timeout: str = "60s") -> Orders:
    slack = SinkConfig(slack=Slack(url=Secret("x"), timeout=Duration(timeout)))
    return Orders(dict.fromkeys(names or ("chat",), slack))


def waiting(
    released: threading.Event, started: threading.Event | None = None
) -> Callable[[Message], Receipt]:
    """Return a function for ``Recording`` that accepts a message once it is released."""

    def act(_message: Message) -> Receipt:
        if started is not None:
            started.set()
        released.wait(60)
        return Receipt()

    return act


@pytest.mark.parametrize(
    ("error", "state"),
    [
        pytest.param(SendError("no"), "pending", id="temporary"),
        pytest.param(SendError("never", permanent=True), "dead", id="permanent"),
        pytest.param(RuntimeError("something with s3cret"), "pending", id="unforeseen"),
        pytest.param(TypeError("a bug with s3cret"), "pending", id="bug"),
        pytest.param(ConfigError("the secret's file is away"), "pending", id="missing secret"),
    ],
)
def test_exception_of_a_sink_is_recorded_without_secrets(
    owner: Owner, error: Exception, state: str
) -> None:
    sink = Recording(Mock(side_effect=error))
    owner.add("a")

    with CourierThreads(owner, orders(), lambda _name: sink) as courier:
        courier.until(lambda: owner.results)

    (row,) = owner.rows
    assert row.state == state
    assert row.error != ""
    assert "s3cret" not in row.error


def test_exception_of_a_plugin_is_reported_to_its_author(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = ForeignSink("gotify", Recording(Mock(side_effect=KeyError("priority"))))
    owner.add("a")

    with CourierThreads(owner, orders(), lambda _name: plugin) as courier:
        courier.until(lambda: owner.results)

    (row,) = owner.rows
    (line,) = [line for line in caplog.records if "did not accept" in line.getMessage()]
    assert row.state == "pending"
    advice = "the sink gotify is faulty, report it to the author of its package"
    assert row.error == f"{advice}: it raised KeyError: 'priority'"
    assert advice in line.getMessage()
    assert "please report it" not in line.getMessage()
    assert "KeyError: 'priority'" in caplog.text  # the traceback


def test_sink_with_an_unusable_file_names_it(owner: Owner, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("no certificate", encoding="utf-8")
    mail = Email(
        host="127.0.0.1", to=("ops@example.org",), sender="vm@example.org", ca_file=str(ca_file)
    )
    config = SinkConfig(email=mail)

    def make_sink(name: str) -> Sink:
        return make(name, config, Messages())

    owner.add("a")

    with CourierThreads(owner, orders(), make_sink) as courier:
        courier.until(lambda: owner.results)

    (row,) = owner.rows
    assert row.state == "pending"
    assert "no certificate or crl found" in row.error
    assert "report it" not in row.error


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
    assert (
        "sink chat did not accept the repetition of `announced` of event e-a (401): it will be"
        " tried again"
    ) in caplog.text
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

    failed, refused, recovered = caplog.records
    assert failed.message.startswith("sink chat did not accept `announced` of event")
    assert failed.exc_info
    assert refused.message.startswith("sink chat refused `announced` of event")
    assert not refused.exc_info
    assert recovered.message == "sink chat accepts messages again"
    assert not recovered.exc_info


def given_up(owner: Owner) -> set[str]:
    """Return the ids of the deliveries that hung."""
    return {result.delivery_id for result in owner.results if "given up" in result.error}


def test_hung_delivery_fails_and_those_behind_it_are_due_again(owner: Owner) -> None:
    owner.add("a", "b", "c")
    owner.add("d", sink="run", once=True)
    released = threading.Event()

    def act(message: Message) -> Receipt:
        if message.delivery_id in "bd":
            released.wait(20)
        return Receipt()

    run = SinkConfig(command=Command(command=("true",), timeout=Duration("1s")))
    sinks = orders(timeout="1s").sinks | {"run": run}

    with CourierThreads(owner, Orders(sinks), lambda _name: Recording(act)) as courier:
        courier.until(lambda: courier.replaced and given_up(owner) == {"b", "d"})

        outcomes = {result.delivery_id: result.outcome for result in owner.results}
        errors = {result.error for result in owner.results if result.delivery_id in "bd"}
        assert outcomes.pop("c") in ("returned", "accepted")
        assert outcomes == {"a": "accepted", "b": "failed", "d": "refused"}
        assert errors == {"no result after 1.1 s: given up"}

        released.set()
        courier.to_end()

    assert owner.left == {"d": "dead"}


def test_hung_delivery_that_is_accepted_late_is_not_sent_again(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the replaced courier may finish what it has begun
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", PATIENCE)
    owner.add("late", sink="slow")
    owner.add("other", sink="other")
    released = threading.Event()

    def act(message: Message) -> Receipt:
        released.wait(20)
        if message.delivery_id == "other":
            eventually(lambda: len(owner.results) >= 2)
        return Receipt()

    sinks = orders("slow", timeout="200ms").sinks | orders("other").sinks

    with CourierThreads(owner, Orders(sinks), lambda _name: Recording(act)) as courier:
        courier.until(lambda: owner.results)

        (result,) = owner.results
        assert result.delivery_id == "late"
        assert result.outcome == "failed"

        released.set()
        courier.until(lambda: owner.endings)

    assert owner.left == {}


def test_courier_waits_for_a_running_command_when_another_sink_hangs(owner: Owner) -> None:
    released = threading.Event()
    hanging = threading.Event()
    hung = threading.Event()

    def hang_once(message: Message) -> Receipt:
        if hanging.is_set():  # else the next courier would hang and be replaced too
            raise SendError("429", retry_after=3600.0)
        return waiting(hung, hanging)(message)

    sinks = {
        "runs": Recording(waiting(released)),
        "hangs": Recording(hang_once),
        "other": Recording(),
    }
    hangs = orders("hangs", timeout="200ms").sinks
    other = orders("other").sinks
    owner.add("x", sink="hangs")
    owner.add("y", sink="runs", once=True)

    with CourierThreads(
        owner, Orders(hangs | other | {"runs": COMMAND}), lambda name: sinks[name]
    ) as courier:
        courier.until(lambda: "x" in [result.delivery_id for result in owner.results])
        owner.add("z", sink="other")
        courier.until(lambda: "z" in [result.delivery_id for result in owner.results])

        assert sinks["other"].sent == ["z"]
        assert not owner.endings

        released.set()
        courier.until(lambda: owner.endings)
        hung.set()

    assert owner.left == {"x": "pending"}


def test_sink_that_asks_for_a_pause_gets_no_delivery_until_then(owner: Owner) -> None:
    def act(message: Message) -> Receipt:
        if message.delivery_id == "0":
            return Receipt()
        raise SendError("429", retry_after=3600.0)

    owner.add("0")
    sinks = {"chat": Recording(act), "other": Recording()}

    with CourierThreads(owner, orders(*sinks), lambda name: sinks[name]) as courier:
        courier.to_end()  # so all others of the batch are sent at once
        owner.add(*map(str, range(1, 30)))
        owner.add("x", sink="other")
        courier.to_end()

    assert sinks["chat"].sent == ["0", "1"]
    assert sinks["other"].sent == ["x"]
    assert owner.left == dict.fromkeys(map(str, range(1, 30)), "pending")
    # those that were returned did not fail
    assert sum(row.attempts for row in owner.rows) == 1
    assert owner.next_due() > 3600 - 2 * PATIENCE


class RotatingPeer(HttpPeer):
    """A receiver whose key in ``file`` is replaced when it answers."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def answer(self, handler: Any, answer: Answer) -> None:
        self._file.write_text("new", encoding="utf-8")
        super().answer(handler, answer)


def test_changed_secret_is_used_after_the_next_refusal(owner: Owner, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old", encoding="utf-8")
    owner.add("a", "b", "c")

    with RotatingPeer(key) as peer:
        peer.answers.extend((Answer(200), Answer(401), Answer(200), Answer(401)))
        headers = {"Key": Secret(str(key), "file")}
        settings = Webhook(
            url=Secret(peer.url), headers=headers, allow_private=True, timeout=Duration("60s")
        )
        hook = SinkConfig(webhook=settings)
        with CourierThreads(
            owner, Orders({"chat": hook}), lambda name: make(name, hook, Messages())
        ) as courier:
            courier.until(lambda: len(owner.results) >= 3)
            owner.ahead = 10.0
            courier.to_end()
        requests = [
            (request.headers["x-notbefore-delivery-id"], request.headers["key"])
            for request in peer.requests
        ]

    assert requests == [("a", "old"), ("b", "old"), ("c", "new"), ("b", "new"), ("b", "new")]
    assert owner.left == {}


def test_replaced_courier_waits_two_seconds_for_a_message(owner: Owner) -> None:
    started = threading.Event()
    released = threading.Event()
    sink = Recording(waiting(released, started))
    owner.add("a")

    with CourierThreads(owner, orders(), lambda _name: sink) as courier:
        courier.until(started.is_set)
        reloaded = time.monotonic()
        courier.supervisor.reconfigure(orders())
        courier.until(lambda: owner.endings)
        seconds = time.monotonic() - reloaded
        released.set()

    assert seconds >= 2.0
    assert list(owner.left) == ["a"]


def test_replaced_courier_waits_for_its_command(owner: Owner) -> None:
    started = threading.Event()
    released = threading.Event()
    sink = Recording(waiting(released, started))
    command_orders = Orders({"chat": COMMAND})
    owner.add("a", once=True)

    with CourierThreads(owner, command_orders, lambda _name: sink) as courier:
        courier.until(started.is_set)
        later = time.monotonic() + 2.5  # a message would be given up by then
        courier.supervisor.reconfigure(command_orders)
        courier.until(lambda: time.monotonic() > later)

        assert not owner.endings

        released.set()
        courier.until(lambda: owner.endings)

    assert owner.left == {}


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
        started = len(commands.log)
        commands.release()
        courier.to_end()

    assert started == Command.SIDE_BY_SIDE
    assert owner.left == {}


def test_slow_receiver_does_not_delay_another_event(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_thread, "SLOW", 0.5)
    released = threading.Event()
    sent: list[str] = []

    def act(message: Message) -> Receipt:
        sent.append(message.delivery_id)
        if message.delivery_id.startswith("slow"):
            released.wait(PATIENCE)
        return Receipt()

    owner.add("slow-1")

    with CourierThreads(owner, orders(), lambda _name: Recording(act)) as courier:
        courier.until(lambda: sent == ["slow-1"])
        owner.add("slow-2")
        courier.until(lambda: sent == ["slow-1", "slow-2"])
        owner.add("preempt")
        courier.until(lambda: sent == ["slow-1", "slow-2", "preempt"])
        released.set()
        courier.to_end()

    assert owner.left == {}


def test_slow_delivery_returns_those_that_wait_behind_it(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    sent: list[str] = []

    def act(message: Message) -> Receipt:
        sent.append(message.delivery_id)
        if message.delivery_id == "0":
            released.wait(PATIENCE)
        return Receipt()

    with CourierThreads(owner, orders(), lambda _name: Recording(act)) as courier:
        owner.add("quick")  # from now on the sink gets several deliveries at a time
        courier.until(lambda: owner.results)
        owner.add(*map(str, range(10)))
        courier.until(lambda: sent[-1] == "0")
        owner.add("preempt", severity="critical")
        monkeypatch.setattr(sink_thread, "SLOW", 0.5)  # only now, so that those behind it wait
        courier.until(lambda: len(sent) == 12)
        released.set()
        courier.to_end()

    assert sent[:3] == ["quick", "0", "preempt"]
    assert owner.left == {}
