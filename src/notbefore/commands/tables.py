"""How commands print: tables for people, JSON for scripts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TextIO

from msgspec import Struct

from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.core.text import escaped

NOTHING: Final = "Nothing is scheduled."


class Listing(Struct, frozen=True):
    """How one of the agent's answers is printed."""

    path: str  # where the agent gives the answer
    head: tuple[str, ...]
    listed: Callable[[dict[str, Any]], list[dict[str, Any]]]  # in the order in which they are shown
    remarks: Callable[[dict[str, Any]], list[str]]  # lines above the table
    row: Callable[[dict[str, Any]], tuple[str, ...]]


def show_listing(listing: Listing, answer: dict[str, Any], out: TextIO, *, as_json: bool = False) -> None:
    """Print an answer: the remarks and the table, or one JSON object a line."""
    listed = listing.listed(answer)
    if as_json:
        print_json(listed, out)
        return
    out.writelines(f"{escaped(text)}\n" for text in listing.remarks(answer))
    table(listing.head, [listing.row(one) for one in listed], out)


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


def remarks(answer: dict[str, Any]) -> list[str]:
    """Sentences above the listed events. That nothing is scheduled is said only where it is known."""
    if answer["unreadable"]:
        return [f"{answer['unreadable']} listed events cannot be read: the agent's log says why."]
    if answer["silence"]:
        return ["What was listed when IMDS last answered:"] if answer["events"] else []
    return [] if answer["events"] else [NOTHING]
