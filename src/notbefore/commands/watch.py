"""``watch``: show the listed events until Ctrl-C, for ``notbefore events --watch``.

A terminal shows the current table, with the time to NotBefore. Other outputs get a line for each
change, or with ``--json`` an object.
"""

import shutil
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from msgspec import Struct

from notbefore.commands.client import AgentClient
from notbefore.commands.listing import UNKNOWN, Listing, ask
from notbefore.commands.options import print_json
from notbefore.core.text import escaped, rfc3339
from notbefore.errors import NotBeforeError

INTERVAL: Final = 1.0  # seconds between two questions, as the agent asks IMDS
HOME: Final = "\x1b[H"  # of the terminal: moves the cursor to the first line
CLEAR_LINE: Final = "\x1b[K"  # from the cursor on
CLEAR_REST: Final = "\x1b[J"  # of the screen
CLEAR_SCREEN: Final = "\x1b[2J"
COUNTDOWN: Final = "DUE"  # the column that changes all the time
Rows = dict[str, tuple[str, ...]]


class WatchedList(Struct, frozen=True):
    """The list after a change."""

    time: str  # of this line, by the clock of this machine
    events: list[dict[str, Any]]  # each as `events` prints it, with --fleet as `events --fleet`
    problem: str  # why the list may be outdated; else empty


def watch(client: AgentClient, *, fleet: bool, as_json: bool) -> NoReturn:
    """Show the events, again and again.

    Raises ``NotBeforeError`` if the first question is not answered. Later, it shows the error and
    continues, because an agent may restart.
    """
    view: _Screen | _Objects | _Lines = _Lines()
    if as_json:
        view = _Objects()
    elif sys.stdout.isatty():
        view = _Screen()

    listing = ask(client, fleet=fleet)
    while True:
        view.show(listing)
        sys.stdout.flush()
        time.sleep(INTERVAL)
        try:
            listing = ask(client, fleet=fleet)
        except NotBeforeError as error:
            listing = listing._replace(problem=str(error))


class _Screen:
    """The current table on a terminal, cut to its size."""

    def __init__(self) -> None:
        sys.stdout.write(CLEAR_SCREEN)
        self._shown = ""

    def show(self, listing: Listing) -> None:
        """Draw the listing where the last one is, if it differs."""
        size = shutil.get_terminal_size()
        lines = [*listing.lines]
        if listing.problem:
            lines.insert(0, escaped(f"{UNKNOWN}: {listing.problem}"))
        visible = [line[: size.columns] for line in lines[: size.lines - 1]]
        text = "".join(f"{line}{CLEAR_LINE}\n" for line in visible)
        if text != self._shown:
            sys.stdout.write(f"{HOME}{text}{CLEAR_REST}")
            self._shown = text


class _Objects:
    """One JSON object for each change: the events, and why they may be outdated."""

    def __init__(self) -> None:
        self._shown: tuple[Rows, str] | None = None

    def show(self, listing: Listing) -> None:
        """Print the listing, if it differs from the last one by more than the countdown."""
        content = (_rows(listing), listing.problem)
        if content != self._shown:
            self._shown = content
            print_json([WatchedList(_now(), listing.items, listing.problem)])


class _Lines:
    """One line for each event that is new, has changed or is gone."""

    def __init__(self) -> None:
        self._rows: Rows = {}
        self._problem = ""

    def show(self, listing: Listing) -> None:
        """Print the differences to the last listing."""
        if listing.problem != self._problem:
            self._problem = listing.problem
            knowledge = "it is known again what is scheduled"
            if listing.problem:
                knowledge = f"{UNKNOWN}: {listing.problem}"
            sys.stderr.write(f"notbefore: {escaped(knowledge)}\n")

        rows = _rows(listing)
        for event_id, row in rows.items():
            if event_id not in self._rows:
                _print_line("new", row)
            elif row != self._rows[event_id]:
                _print_line("changed", row)
        for event_id, row in self._rows.items():
            if event_id not in rows:
                _print_line("gone", row)
        self._rows = rows


def _rows(listing: Listing) -> Rows:
    """Return the rows of the table by event, without the countdown."""
    countdown = listing.head.index(COUNTDOWN)
    rows: Rows = {}
    for item, row in zip(listing.items, listing.rows, strict=True):
        rows[item["event_id"]] = (*row[:countdown], *row[countdown + 1 :])
    return rows


def _print_line(change: str, row: tuple[str, ...]) -> None:
    sys.stdout.write(escaped("  ".join((_now(), change, *row))) + "\n")


def _now() -> str:
    return rfc3339(datetime.now(UTC))
