"""When a delivery is tried again: ``plan(outcome, attempt, now, dice)``. Pure: clock and dice are arguments.

Exponential with full jitter, so that a fleet that was cut off together does not come back together. What the receiver
asks for (Retry-After) is obeyed. A refusal that would be the same tomorrow is not tried again, but kept as dead.
"""

from datetime import datetime, timedelta
from typing import Final, Literal

from msgspec import Struct

FIRST: Final = 1.0  # seconds: the ceiling of the first pause
LONGEST: Final = 300.0  # seconds: the ceiling of all later ones
LONGEST_ASKED: Final = 3600.0  # seconds: what a Retry-After may ask for at most

RETRYABLE: Final = frozenset({408, 425, 429})  # of the 4xx: try again; every other 4xx is a refusal for good
MAY_PASS: Final = frozenset({403, 404, 409, 421, 423})  # ... which somebody may put right while there is still time


class SendOutcome(Struct, frozen=True):
    """What came of one attempt. ``retry_after`` is in seconds, as the receiver said."""

    accepted: bool
    permanent: bool = False
    may_pass: bool = False  # a permanent refusal that somebody may put right soon
    retry_after: float | None = None


class RetryPlan(Struct, frozen=True):
    """What becomes of the delivery; ``at`` is when it is due again, for ``retry``."""

    state: Literal["delivered", "retry", "dead"]
    at: datetime | None = None


def outcome_of_status(status: int, retry_after: float | None = None) -> SendOutcome:
    """The outcome that an HTTP status stands for: 2xx accepted; 4xx refused for good, but for 408, 425, 429."""
    if 200 <= status < 300:  # noqa: PLR2004 - the class of a status is its first digit
        return SendOutcome(accepted=True)
    if 500 <= status < 600 or status in RETRYABLE:  # noqa: PLR2004 - as above
        return SendOutcome(accepted=False, retry_after=retry_after)
    return SendOutcome(
        accepted=False, permanent=True, may_pass=status in MAY_PASS
    )  # 1xx and 3xx too: no redirect is followed


def plan(outcome: SendOutcome, attempt: int, now: datetime, dice: float) -> RetryPlan:
    """What to do after the ``attempt``-th try (from 1). ``dice`` is a random number from 0 to 1."""
    if outcome.accepted:
        return RetryPlan("delivered")
    if outcome.permanent:
        return RetryPlan("dead")
    pause = ceiling(attempt) * dice
    if outcome.retry_after is not None:
        pause = max(pause, min(outcome.retry_after, LONGEST_ASKED))
    return RetryPlan("retry", now + timedelta(seconds=pause))


def ceiling(attempt: int) -> float:
    """The longest pause after the ``attempt``-th try, in seconds: 1, 2, 4, ... 300."""
    return min(FIRST * 2.0 ** min(attempt - 1, 30), LONGEST)
