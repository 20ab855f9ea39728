"""The agent's hand on its courier, where couriers cannot be started or die."""

import sys
from pathlib import Path

import pytest

from notbefore.delivery.orders import MAX_ORDERS, Orders
from notbefore.delivery.secret import Secret
from notbefore.delivery.settings import SinkConfig, Slack
from notbefore.dispatcher import Dispatcher
from notbefore.errors import ConfigError
from notbefore.events.figures import Figures
from notbefore.store.store import FILE_NAME, Store
from support.agent import eventually


@pytest.fixture
def figures() -> Figures:
    return Figures()


def dispatcher(path: Path, figures: Figures, due: float | None = 0.0) -> Dispatcher:
    return Dispatcher(Orders(str(path)), figures, lambda: due, lambda: None)


def test_a_courier_that_cannot_be_started_is_tried_again_later(
    tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    hand = dispatcher(tmp_path / FILE_NAME, figures)
    for _ in range(5):
        hand.tick()
    assert 0 < hand.patience <= 60
    assert "cannot be started" in caplog.text
    assert not figures.courier_running
    assert sum(figures.courier_starts.values()) == 0


def test_couriers_that_die_are_replaced_after_growing_pauses(tmp_path: Path, figures: Figures) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database")
    hand = dispatcher(tmp_path / FILE_NAME, figures)

    def two_died() -> bool:
        hand.tick()
        return figures.courier_starts["crashed"] >= 2

    eventually(two_died)
    assert figures.courier_starts["due"] == 1
    hand.stop(lambda _seconds: False)
    assert not figures.courier_running


def test_couriers_may_die_as_often_as_they_like(tmp_path: Path, figures: Figures) -> None:
    hand = dispatcher(tmp_path / FILE_NAME, figures, due=None)
    for _ in range(2_000):
        hand._pause()
    assert hand._not_before


def test_nothing_due_starts_nothing(tmp_path: Path, figures: Figures) -> None:
    hand = dispatcher(tmp_path / FILE_NAME, figures, due=None)
    hand.tick()
    hand.stop(lambda _seconds: False)
    assert (hand.patience, hand.descriptors) == (60, [])


def test_whoever_is_impatient_ends_the_courier_at_once(tmp_path: Path, figures: Figures) -> None:
    Store(tmp_path).close()
    hand = dispatcher(tmp_path / FILE_NAME, figures)
    hand.tick()
    assert figures.courier_running
    hand.stop(lambda _seconds: True)
    assert not figures.courier_running


def test_orders_that_cannot_be_told_are_refused_before_anything_starts(tmp_path: Path, figures: Figures) -> None:
    sinks = {"a": SinkConfig(slack=Slack(url=Secret("x"), body="y" * MAX_ORDERS))}
    with pytest.raises(ConfigError):
        Dispatcher(Orders(str(tmp_path), sinks), figures, lambda: None, lambda: None)


def test_a_courier_without_a_database_says_so_and_ends(tmp_path: Path, figures: Figures) -> None:
    hand = dispatcher(tmp_path / FILE_NAME, figures)

    def died() -> bool:
        hand.tick()
        return figures.courier_starts["crashed"] >= 1

    eventually(died)
    hand.stop(lambda _seconds: True)
