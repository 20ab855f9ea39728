"""What a sink that fails leaves in the log: a line, then counts."""

import logging

import pytest

from notbefore.courier.failure_log import EVERY, Failure, FailureLog


@pytest.fixture
def seconds() -> list[float]:
    return [0.0]


@pytest.fixture
def failures(seconds: list[float], caplog: pytest.LogCaptureFixture) -> FailureLog:
    caplog.set_level(logging.INFO, "notbefore")
    return FailureLog(lambda: seconds[0])


def fail(failures: FailureLog, cause: str, sink: str = "hook", level: int = logging.WARNING) -> None:
    failures.failed(Failure(sink, level, f"sink {sink} failed ({cause})", cause))


def test_a_sink_is_logged_once_and_then_counted_once_a_minute_until_it_accepts_again(
    failures: FailureLog, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    failures.delivered("hook")
    for number in range(500):
        seconds[0] = number / 10
        fail(failures, f"503: request {number}")
        failures.tick()
    fail(failures, "timeout", sink="mail")
    fail(failures, "404", level=logging.ERROR)
    seconds[0] = EVERY
    failures.tick()
    failures.tick()
    fail(failures, "timeout")
    failures.delivered("hook")
    fail(failures, "timeout")
    assert caplog.messages == [
        "sink hook failed (503: request 0)",
        "sink mail failed (timeout)",
        "sink hook failed (404)",
        "sink hook: 499 more deliveries failed (the last one: 503: request 499)",
        "sink hook: 1 more delivery failed (the last one: timeout)",
        "sink hook accepts messages again",
        "sink hook failed (timeout)",
    ]
