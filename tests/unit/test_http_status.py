"""What an HTTP status says of a delivery."""

import pytest

from notbefore.courier.http_status import error_of_status


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
