"""``Duration``: a time span in Prometheus's notation; and seconds as texts. Pure.

``back_off``: how long to wait before the next attempt.
"""

import re
from datetime import datetime
from typing import Final

_MINUTE: Final = 60
_HOUR: Final = 3_600
_DAY: Final = 86_400
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TENTHS_BELOW: Final = 10  # seconds below which tenths of a measured time matter
_WHOLE_SECONDS_BELOW: Final = 120  # within two minutes each second counts
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)", re.ASCII)


class Duration(str):
    """A span of time, written as in Prometheus: ``500ms``, ``1s``, ``1m30s``, ``1h``.

    Raises ``ValueError``.
    """

    __slots__ = ("seconds",)

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or not text or _DURATION.sub("", text):
            raise ValueError(f"expected a duration such as 500ms, 1s, 5m or 1h, got {text!r}")
        self.seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


def back_off(attempt: int, first: float, longest: float) -> float:
    """Return the seconds to wait after failure number ``attempt`` in a row (from 1).

    They are ``first``, doubled up to ``longest``.
    """
    return min(first * 2.0 ** min(attempt - 1, 30), longest)


def span(seconds: float | None) -> str:
    """Return seconds for a column of a table: ``-`` when unknown, ``7.2s``, ``14m05s``, ``3h10m``,
    ``6d04h``.
    """
    if seconds is None:
        return "-"
    whole = round(abs(seconds))
    if whole < _TENTHS_BELOW:
        return f"{_tenths(seconds)}s"

    sign = "-" if seconds < 0 else ""
    if whole >= _DAY:
        return f"{sign}{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"
    if whole >= _HOUR:
        return f"{sign}{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    if whole >= _MINUTE:
        return f"{sign}{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    return f"{sign}{whole}s"


def words(seconds: float) -> str:
    """Return seconds for a sentence: ``4.2 s``, ``90 s``, ``14 min``, ``3 h 10 min``,
    ``6 d 4 h``.
    """
    if seconds < _TENTHS_BELOW:
        return f"{_tenths(seconds)} s"
    whole = round(seconds)
    if whole < _WHOLE_SECONDS_BELOW:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        return _with_rest(f"{whole // _HOUR} h", whole % _HOUR // _MINUTE, "min")
    return _with_rest(f"{whole // _DAY} d", whole % _DAY // _HOUR, "h")


def _tenths(seconds: float) -> str:
    return f"{seconds:.1f}".removesuffix(".0")


def _with_rest(text: str, rest: int, unit: str) -> str:
    if rest == 0:
        return text
    return f"{text} {rest} {unit}"


def countdown(time: datetime, now: datetime) -> str:
    """Return ``in 14 min``, ``now`` or ``3 min ago``; in whole seconds."""
    seconds = round((time - now).total_seconds())
    if seconds == 0:
        return "now"
    if seconds > 0:
        return f"in {words(seconds)}"
    return f"{words(-seconds)} ago"
