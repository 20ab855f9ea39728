"""Seconds in words, as titles and messages have them."""

import pytest

from notbefore.core.duration import countdown
from support.azure import at


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(840, "in 14 min"), (119, "in 119 s"), (120, "in 2 min"), (0.5, "now"), (-0.5, "now"), (-180, "3 min ago")],
)
def test_a_countdown_says_how_long_it_is_to_a_time_or_how_long_ago_it_was(seconds: float, text: str) -> None:
    assert countdown(at(seconds), at(0)) == text
