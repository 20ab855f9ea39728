"""When a delivery is tried again."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.courier.retry import LONGEST, LONGEST_ASKED, RetryPlan, ceiling, error_of_status, plan
from notbefore.errors import SendError
from support.azure import T0

BUSY = SendError("busy")


def test_what_was_accepted_is_delivered_and_what_was_refused_for_good_is_dead() -> None:
    assert plan(None, 1, T0, 0.5) == RetryPlan("delivered")
    assert plan(SendError("no", permanent=True, retry_after=5.0), 1, T0, 0.5) == RetryPlan("dead")


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1), (2, 2), (5, 16), (9, 256), (10, 300), (10_000, 300)])
def test_the_pause_doubles_up_to_five_minutes(attempt: int, seconds: float) -> None:
    assert ceiling(attempt) == seconds
    assert plan(BUSY, attempt, T0, 1.0).at == T0 + timedelta(seconds=seconds)


@pytest.mark.parametrize(("asked", "seconds"), [(30.0, 30), (0.0, 1), (1e9, LONGEST_ASKED)])
def test_the_receiver_is_obeyed_up_to_an_hour(asked: float, seconds: float) -> None:
    assert plan(SendError("busy", retry_after=asked), 1, T0, 1.0).at == T0 + timedelta(seconds=seconds)


@given(st.integers(1, 10**6), st.floats(0, 1), st.none() | st.floats(0, 1e12))
def test_nothing_that_may_succeed_is_ever_given_up(attempt: int, dice: float, asked: float | None) -> None:
    following = plan(SendError("busy", retry_after=asked), attempt, T0, dice)
    assert following.state == "retry"
    assert following.at is not None
    assert timedelta(0) <= following.at - T0 <= timedelta(seconds=max(LONGEST, LONGEST_ASKED))


@pytest.mark.parametrize(
    ("status", "accepted", "permanent"),
    [
        (200, True, False),
        (204, True, False),
        (301, False, True),
        (400, False, True),
        (401, False, True),
        (404, False, True),
        (408, False, False),
        (425, False, False),
        (429, False, False),
        (500, False, False),
        (503, False, False),
        (600, False, True),
    ],
)
def test_a_status_says_whether_it_was_accepted_and_whether_a_refusal_is_for_good(
    status: int, *, accepted: bool, permanent: bool
) -> None:
    error = error_of_status(status, "the cause", 7.0)
    assert (error is None) == accepted
    assert accepted or (str(error), error is not None and error.permanent) == ("the cause", permanent)


def test_a_busy_servers_wish_is_kept() -> None:
    error = error_of_status(429, "later", 7.0)
    assert error is not None
    assert error.retry_after == 7.0
