"""The color that marks a message: that of its severity, or green for good news. Pure."""

from typing import Final

from notbefore.core.event_types import Severity
from notbefore.core.message import Message

COLORS: Final[dict[Severity, str]] = {
    "critical": "#c4314b",
    "warning": "#e8a33d",
    "info": "#3a7bd5",
}
OVER: Final = "#2e9e5b"


def color_of(message: Message) -> str:
    """Return the color of a message, ``#rrggbb``."""
    if message.is_good_news:
        return OVER
    return COLORS[message.shown_severity]
