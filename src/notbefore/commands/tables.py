"""How commands print: tables for people, JSON for scripts."""

from collections.abc import Iterable, Sequence
from typing import TextIO

from notbefore.core.record import json_line
from notbefore.core.text import escaped


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


def print_json(items: Iterable[object], out: TextIO) -> None:
    """Print one JSON object a line."""
    out.writelines(json_line(item).decode() + "\n" for item in items)
