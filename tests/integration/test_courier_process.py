"""The agent's hand on its courier, where couriers cannot be started or die."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from notbefore.config.secret import Secret
from notbefore.config.sinks import Command, SinkConfig, Slack
from notbefore.core.delivery import Delivery
from notbefore.courier.courier_process import environment
from notbefore.courier.orders import MAX_ORDERS, Orders
from notbefore.courier.supervisor import CourierManager
from notbefore.errors import ConfigError
from notbefore.metrics.process import CourierFigures
from notbefore.process.clock import Clock
from notbefore.store import outbox_intake
from notbefore.store.outbox import Outbox
from notbefore.store.schema import transaction
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME
from support.agent import eventually
from support.messages import message


@pytest.fixture(params=["posix_spawn", "popen"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to start a courier: the light one, and the one for systems without it."""
    if request.param == "popen":
        monkeypatch.delattr(os, "posix_spawn")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """One that the couriers of these tests do not use: their outbox is in a file."""
    with closing(Store(tmp_path / "other")) as store:
        yield store


def dispatcher(path: Path, store: Store, due: float | None = 0.0) -> CourierManager:
    return CourierManager(Orders(str(path)), store, Clock(), lambda: due, lambda: None)


def test_a_courier_that_cannot_be_started_is_tried_again_later(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    hand = dispatcher(tmp_path / FILE_NAME, store)
    for _ in range(5):
        hand.tick()
    assert 0 < hand.patience <= 60
    assert "cannot be started" in caplog.text
    assert not hand.figures.running
    assert sum(hand.figures.starts.values()) == 0


def test_couriers_that_die_are_replaced_after_growing_pauses(tmp_path: Path, store: Store) -> None:
    Store(tmp_path).close()
    hand = dispatcher(tmp_path / FILE_NAME, store)

    def two_died() -> bool:
        hand.tick()
        if hand._courier is not None:
            os.kill(hand._courier.pid, signal.SIGKILL)
        return hand.figures.starts["crashed"] >= 2

    eventually(two_died)
    assert hand.figures.starts["due"] == 1
    hand.stop(lambda _seconds: False)
    assert not hand.figures.running


def test_a_courier_that_was_killed_and_waits_for_the_disk_is_replaced(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = dispatcher(tmp_path / FILE_NAME, store)
    hand.tick()
    assert hand._courier is not None
    first = hand._courier.pid
    os.kill(first, signal.SIGSTOP)  # it neither ends nor shows a sign of life
    monkeypatch.setattr("notbefore.courier.courier_process.is_zombie", lambda process: process == first)

    def replaced() -> bool:
        hand.tick()
        return hand.figures.running and hand.figures.starts["crashed"] == 1

    eventually(replaced)
    hand.stop(lambda _seconds: True)


def test_couriers_may_die_as_often_as_they_like(tmp_path: Path, store: Store) -> None:
    hand = dispatcher(tmp_path / FILE_NAME, store, due=None)
    for _ in range(2_000):
        hand._pause()
    assert hand._not_before


def test_nothing_due_starts_nothing(tmp_path: Path, store: Store) -> None:
    hand = dispatcher(tmp_path / FILE_NAME, store, due=None)
    hand.tick()
    hand.stop(lambda _seconds: False)
    assert (hand.patience, hand.descriptors) == (60, [])


def test_whoever_is_impatient_ends_the_courier_at_once(tmp_path: Path, store: Store) -> None:
    Store(tmp_path).close()
    hand = dispatcher(tmp_path / FILE_NAME, store)
    hand.tick()
    assert hand.figures.running
    hand.stop(lambda _seconds: True)
    assert not hand.figures.running


def test_orders_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path, store: Store) -> None:
    sinks = {"a": SinkConfig(slack=Slack(url=Secret("x"), body="y" * MAX_ORDERS))}
    with pytest.raises(ConfigError):
        CourierManager(Orders(str(tmp_path), sinks), store, Clock(), lambda: None, lambda: None)


@pytest.mark.parametrize("found", [None, b"no database"])
def test_a_courier_without_a_database_says_so_and_waits_for_one(
    tmp_path: Path, store: Store, found: bytes | None
) -> None:
    if found is not None:
        (tmp_path / FILE_NAME).write_bytes(found)
    hand = dispatcher(tmp_path / FILE_NAME, store)

    def in_trouble() -> bool:
        hand.tick()
        return hand.in_trouble

    eventually(in_trouble)
    hand.stop(lambda _seconds: True)
    assert hand.figures.starts == {**CourierFigures().starts, "due": 1}


def test_a_courier_is_started_before_something_is_due_where_it_soon_will_be(tmp_path: Path, store: Store) -> None:
    Store(tmp_path).close()
    poked: list[int] = []
    hand = CourierManager(Orders(str(tmp_path / FILE_NAME)), store, Clock(), lambda: None, lambda: poked.append(1))
    hand.prepare()
    hand.tick()
    assert (hand.figures.running, poked) == (True, [1])
    hand.stop(lambda _seconds: True)
    hand.tick()
    assert not hand.figures.running


def test_a_courier_takes_its_orders_delivers_and_leaves_when_asked(tmp_path: Path, store: Store) -> None:
    got = tmp_path / "got"
    sinks = {"hook": SinkConfig(command=Command(command=("/bin/sh", "-c", f"cat >> {got}")))}
    Store(tmp_path).close()
    now = time.time()
    with closing(Outbox(tmp_path / FILE_NAME)) as outbox:
        line = message().line
        row = Delivery("id", "e", "hook", "started", "info", now, now, now + 1e6, expires_with_event=False, record=line)
        with transaction(outbox._db) as db:
            outbox_intake.put(db, [row])
        poked: list[int] = []
        hand = CourierManager(
            Orders(str(tmp_path / FILE_NAME), sinks),
            store,
            Clock(),
            lambda: now if outbox.rows() else None,
            lambda: poked.append(1),
        )

        def delivered() -> bool:
            hand.tick()
            return got.exists() and not outbox.rows()

        eventually(delivered)
        assert hand.descriptors
        hand.reconfigure(Orders(str(tmp_path / FILE_NAME)))

        def left() -> bool:
            hand.tick()
            return not hand.figures.running

        eventually(left)
    assert got.read_bytes() == line + b"\n"
    assert hand.figures.starts == {**CourierFigures().starts, "due": 1}


def test_a_courier_that_shows_no_life_is_ended(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).close()
    monkeypatch.setattr("notbefore.courier.supervisor.MISSED_SIGNS", 2)
    hand = dispatcher(tmp_path / FILE_NAME, store)
    hand.tick()
    child = hand._courier
    assert child
    os.kill(child.pid, signal.SIGSTOP)

    def ended() -> bool:
        hand.tick()
        return hand._courier is not child

    eventually(ended)
    hand.stop(lambda _seconds: True)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_courier_is_given_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS", "NOTBEFORE_X__Y", "TOKEN")
    for name in (*names, "HTTPS_PROXY"):
        monkeypatch.setenv(name, "x")
    found = environment(Orders("s", hidden=("TOKEN",)))
    assert not {*names} & found.keys()
    assert found["HTTPS_PROXY"] == "x"
