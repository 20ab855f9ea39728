"""How commands print: tables for people, JSON for scripts."""

from collections.abc import Iterable, Sequence
from typing import TextIO

from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.core.text import escaped


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], out: TextIO) -> None:
    """Print columns with a head; without rows, nothing."""
    if not rows:
        return
    cells = [head, *(tuple(map(escaped, row)) for row in rows)]  # a name may hold anything, also what moves the cursor
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    out.writelines(f"{line.rstrip()}\n" for line in lines)


def due(left: float | None) -> str:
    """Return how far NotBefore is, for a column of a table: ``in 14m05s``, ``43s ago``, ``-`` where it is not known."""
    if left is None:
        return "-"
    text = span(float(round(abs(left)))).replace(".0s", "s")
    return f"in {text}" if left >= 0 else f"{text} ago"


def print_json(items: Iterable[object], out: TextIO) -> None:
    """Print one JSON object a line."""
    out.writelines(json_line(item).decode() + "\n" for item in items)
