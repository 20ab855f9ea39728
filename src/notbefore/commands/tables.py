"""How commands print: tables for people, JSON for scripts."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TextIO

from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.core.text import escaped

NOTHING: Final = "Nothing is scheduled."
STALE: Final = timedelta(minutes=2)  # longer than the longest pause between two polls


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], out: TextIO) -> None:
    """Print columns with a head; without rows, nothing."""
    out.writelines(f"{line}\n" for line in columns(head, rows))


def columns(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table, the head first; none without rows."""
    if not rows:
        return []
    cells = [head, *(tuple(map(escaped, row)) for row in rows)]  # a name may hold anything, also what moves the cursor
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def due(left: float | None) -> str:
    """Return how far NotBefore is, for a column of a table: ``in 14m05s``, ``43s ago``, ``-`` where it is not known."""
    if left is None:
        return "-"
    text = span(float(round(abs(left)))).replace(".0s", "s")
    return f"in {text}" if left >= 0 else f"{text} ago"


def print_json(items: Iterable[object], out: TextIO) -> None:
    """Print one JSON object a line."""
    out.writelines(json_line(item).decode() + "\n" for item in items)


def remarks(answer: dict[str, Any], now: datetime) -> list[str]:
    """Sentences above the listed events. That nothing is scheduled is said only where it is known."""
    last, unreadable, events = answer["last_successful_poll"], answer["unreadable"], answer["events"]
    said = [f"{unreadable} listed events cannot be read: the agent's log says why."] if unreadable else []
    if last is None:
        return [*said, "IMDS has not answered yet: it is not known what is scheduled now."]
    if now - datetime.fromisoformat(last) > STALE:
        return [*said, f"IMDS has not answered since {last}: it is not known what is scheduled now."]
    return said if said or events else [NOTHING]
