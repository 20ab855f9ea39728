"""What an HTTP status says of a delivery. When it is tried again is decided by ``core.outbox``."""

from typing import Final

from notbefore.errors import SendError

RETRYABLE: Final = frozenset({408, 425, 429})  # of the 4xx: try again; every other 4xx is a refusal for good
MAY_PASS: Final = frozenset({403, 404, 409, 421, 423})  # ... which somebody may put right while there is still time


def error_of_status(status: int, cause: str, retry_after: float | None = None) -> SendError | None:
    """What an HTTP status says of a delivery, with ``cause`` as its text; ``None``: the receiver has accepted it.

    4xx is a refusal for good, but for 408, 425 and 429; so are 1xx and 3xx: no redirect is followed.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - the class of a status is its first digit
        return None
    if 500 <= status < 600 or status in RETRYABLE:  # noqa: PLR2004 - as above
        return SendError(cause, retry_after=retry_after)
    return SendError(cause, permanent=True, may_pass=status in MAY_PASS)
