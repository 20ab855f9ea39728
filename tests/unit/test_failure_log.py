"""What a sink that fails leaves in the log: a line for each cause, then counts."""

import logging

import pytest

from notbefore.courier.failure_log import EVERY, MAX_CAUSES, Failure, FailureLog


@pytest.fixture
def seconds() -> list[float]:
    return [0.0]


@pytest.fixture
def failures(seconds: list[float], caplog: pytest.LogCaptureFixture) -> FailureLog:
    caplog.set_level(logging.INFO, "notbefore")
    return FailureLog(lambda: seconds[0])


def fail(failures: FailureLog, cause: str, sink: str = "hook", level: int = logging.WARNING) -> None:
    failures.failed(Failure(sink, level, f"sink {sink} failed ({cause})", cause))


def test_a_cause_is_logged_once_and_then_counted_once_a_minute(
    failures: FailureLog, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(500):
        seconds[0] = number / 10
        fail(failures, f"503: request {number} of 4bf92f3577b34da6")
        failures.tick()
    assert len(caplog.messages) == 1
    seconds[0] = EVERY
    failures.tick()
    failures.tick()
    assert caplog.messages[1:] == [
        "sink hook: 499 more deliveries failed like the one before (503: request 499 of 4bf92f3577b34da6)"
    ]


def test_another_cause_another_sink_and_another_level_have_lines_of_their_own(
    failures: FailureLog, caplog: pytest.LogCaptureFixture
) -> None:
    fail(failures, "timeout")
    fail(failures, "refused")
    fail(failures, "timeout", sink="mail")
    fail(failures, "timeout", level=logging.ERROR)
    assert len(caplog.messages) == 4


def test_what_differs_each_time_is_no_flood_either(failures: FailureLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(26 * 26):
        fail(failures, "".join(chr(ord("a") + digit) for digit in divmod(number, 26)))
    assert len(caplog.messages) == MAX_CAUSES + 1


def test_a_sink_that_accepts_again_says_so_and_starts_anew(
    failures: FailureLog, caplog: pytest.LogCaptureFixture
) -> None:
    failures.delivered("hook")
    assert caplog.messages == []
    for _ in range(3):
        fail(failures, "timeout")
    failures.delivered("hook")
    fail(failures, "timeout")
    assert caplog.messages == [
        "sink hook failed (timeout)",
        "sink hook: 2 more deliveries failed like the one before (timeout)",
        "sink hook accepts messages again",
        "sink hook failed (timeout)",
    ]
