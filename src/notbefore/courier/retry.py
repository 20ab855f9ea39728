"""When a delivery is tried again: ``plan(error, attempt, now, dice)``. Pure: clock and dice are arguments.

Exponential with full jitter, so that a fleet that was cut off together does not come back together. What the receiver
asks for (Retry-After) is obeyed. A refusal that would be the same tomorrow is not tried again, but kept as dead.
"""

from datetime import datetime, timedelta
from typing import Final, Literal

from msgspec import Struct

from notbefore.core.duration import back_off
from notbefore.errors import SendError

FIRST: Final = 1.0  # seconds: the ceiling of the first pause
LONGEST: Final = 300.0  # seconds: the ceiling of all later ones
LONGEST_ASKED: Final = 3600.0  # seconds: what a Retry-After may ask for at most

RETRYABLE: Final = frozenset({408, 425, 429})  # of the 4xx: try again; every other 4xx is a refusal for good
MAY_PASS: Final = frozenset({403, 404, 409, 421, 423})  # ... which somebody may put right while there is still time


class RetryPlan(Struct, frozen=True):
    """What becomes of the delivery; ``at`` is when it is due again, for ``retry``."""

    state: Literal["delivered", "retry", "dead"]
    at: datetime | None = None


def error_of_status(status: int, cause: str, retry_after: float | None = None) -> SendError | None:
    """What an HTTP status says of a delivery, with ``cause`` as its text; ``None``: the receiver has accepted it.

    4xx is a refusal for good, but for 408, 425 and 429; so are 1xx and 3xx: no redirect is followed.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - the class of a status is its first digit
        return None
    if 500 <= status < 600 or status in RETRYABLE:  # noqa: PLR2004 - as above
        return SendError(cause, retry_after=retry_after)
    return SendError(cause, permanent=True, may_pass=status in MAY_PASS)


def plan(error: SendError | None, attempt: int, now: datetime, dice: float) -> RetryPlan:
    """What to do after the ``attempt``-th try (from 1), which ended with ``error``; ``None``: it was accepted.

    ``dice`` is a random number from 0 to 1.
    """
    if error is None:
        return RetryPlan("delivered")
    if error.permanent:
        return RetryPlan("dead")
    pause = ceiling(attempt) * dice
    if error.retry_after is not None:
        pause = max(pause, min(error.retry_after, LONGEST_ASKED))
    return RetryPlan("retry", now + timedelta(seconds=pause))


def ceiling(attempt: int) -> float:
    """The longest pause after the ``attempt``-th try, in seconds: 1, 2, 4, ... 300."""
    return back_off(attempt, FIRST, LONGEST)
