"""``Duration``: a span of time as Prometheus writes it."""

import re
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)", re.ASCII)


class Duration:
    """A span of time, written as in Prometheus: ``500ms``, ``1s``, ``1m30s``, ``1h``. Raises ``ValueError``."""

    __slots__ = ("seconds", "text")

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or not text or _DURATION.sub("", text):
            raise ValueError(f"expected a duration such as 500ms, 1s, 5m or 1h, got {text!r}")
        self.text = text
        self.seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and other.seconds == self.seconds

    def __hash__(self) -> int:
        return hash(self.seconds)

    def __repr__(self) -> str:
        return f"Duration({self.text!r})"

    def __str__(self) -> str:
        return self.text


def span(seconds: float | None) -> str:
    """Seconds for people: ``-`` when unknown, ``7.2s``, ``14m05s``, ``3h10m``, ``6d04h``."""
    if seconds is None:
        return "-"
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    for unit, size, below, part in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{sign}{whole // size}{unit}{whole % size // part:02d}{below}"
    return f"{seconds:.1f}s"
