"""``Duration``: a time span in Prometheus's notation.

Texts for tables (``span``) and for sentences (``words``).

``back_off``: how long to wait before the next attempt.
"""

import re
from datetime import datetime
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TENTHS_BELOW: Final = 10  # seconds below which tenths of a measured time matter
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
    """Seconds to wait after failure number ``attempt`` in a row (from 1): ``first``, doubled up to
    ``longest``.
    """
    return min(first * 2.0 ** min(attempt - 1, 30), longest)


def span(seconds: float | None) -> str:
    """Seconds for a column of a table: ``-`` when unknown, ``7.2s``, ``14m05s``, ``3h10m``,
    ``6d04h``.
    """
    if seconds is None:
        return "-"
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    for unit, size, below, part in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{sign}{whole // size}{unit}{whole % size // part:02d}{below}"
    if whole >= _TENTHS_BELOW:
        return f"{sign}{whole}s"
    return f"{seconds:.1f}".removesuffix(".0") + "s"


def words(seconds: float) -> str:
    """Seconds for a sentence: ``4.2 s``, ``90 s``, ``14 min``, ``3 h 10 min``, ``6 d 4 h``."""
    if seconds < _TENTHS_BELOW:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for size, unit, below, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole // 60} min" if whole >= 120 else f"{whole} s"  # noqa: PLR2004 - within two minutes each second counts


def countdown(time: datetime, now: datetime) -> str:
    """``in 14 min``, ``now``, ``3 min ago``; in whole seconds."""
    seconds = round((time - now).total_seconds())
    if seconds == 0:
        return "now"
    if seconds > 0:
        return f"in {words(seconds)}"
    return f"{words(-seconds)} ago"
