"""When a delivery is tried again."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.delivery.retry import LONGEST, LONGEST_ASKED, RetryPlan, SendOutcome, ceiling, outcome_of_status, plan
from support.azure import T0

BUSY = SendOutcome(accepted=False)


def test_what_was_accepted_is_delivered_and_what_was_refused_for_good_is_dead() -> None:
    assert plan(SendOutcome(accepted=True), 1, T0, 0.5) == RetryPlan("delivered")
    assert plan(SendOutcome(accepted=False, permanent=True, retry_after=5.0), 1, T0, 0.5) == RetryPlan("dead")


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1), (2, 2), (5, 16), (9, 256), (10, 300), (10_000, 300)])
def test_the_pause_doubles_up_to_five_minutes(attempt: int, seconds: float) -> None:
    assert ceiling(attempt) == seconds
    assert plan(BUSY, attempt, T0, 1.0).at == T0 + timedelta(seconds=seconds)


@pytest.mark.parametrize(("asked", "seconds"), [(30.0, 30), (0.0, 1), (1e9, LONGEST_ASKED)])
def test_the_receiver_is_obeyed_up_to_an_hour(asked: float, seconds: float) -> None:
    assert plan(SendOutcome(accepted=False, retry_after=asked), 1, T0, 1.0).at == T0 + timedelta(seconds=seconds)


@given(st.integers(1, 10**6), st.floats(0, 1), st.none() | st.floats(0, 1e12))
def test_nothing_that_may_succeed_is_ever_given_up(attempt: int, dice: float, asked: float | None) -> None:
    following = plan(SendOutcome(accepted=False, retry_after=asked), attempt, T0, dice)
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
def test_a_status_is_an_outcome(status: int, *, accepted: bool, permanent: bool) -> None:
    assert outcome_of_status(status, 7.0).accepted == accepted
    assert outcome_of_status(status, 7.0).permanent == permanent


def test_a_busy_servers_wish_is_kept() -> None:
    assert outcome_of_status(429, 7.0).retry_after == 7.0
    assert outcome_of_status(200, 7.0).retry_after is None
