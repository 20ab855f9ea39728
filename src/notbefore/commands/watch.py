"""``notbefore events --watch``: what is listed, drawn anew each second; countdowns go on while nobody answers."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from msgspec import Struct

from notbefore.commands.client import AgentClient
from notbefore.commands.tables import NOTHING, columns, remarks
from notbefore.core.duration import span
from notbefore.core.text import escaped
from notbefore.errors import ConfigError, NotBeforeError

EVERY: Final = 1.0  # seconds
SOON: Final = 900.0  # seconds to NotBefore, from where on a countdown is coloured
HEAD: Final = ("TYPE", "STATUS", "SCOPE", "IN", "NOT BEFORE", "EXPECTED", "RESOURCES", "EVENT ID")
BOLD, RED, YELLOW, DIM, PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor; and back
TOP, END_OF_LINE, BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Board(Struct, frozen=True):
    """What is drawn of an answer. ``row`` and ``style`` are given the seconds to NotBefore."""

    path: str
    head: tuple[str, ...]
    listed: Callable[[dict[str, Any]], list[dict[str, Any]]]  # in the order in which they are shown
    title: Callable[[dict[str, Any]], str]
    remarks: Callable[[dict[str, Any], datetime], list[str]]  # lines above them
    nothing: str  # the one that says that there are none
    row: Callable[[dict[str, Any], float | None], tuple[str, ...]]
    style: Callable[[dict[str, Any], float | None], str]


def watch(agent: AgentClient, out: TextIO, board: Board | None = None) -> int:
    """Draw until Ctrl-C; returns 0. Without a terminal, the table is printed when what is listed changes.

    Raises ``NotBeforeError`` where no agent answers at the start.
    """
    picture = Picture(agent, board or OF_AGENT)
    if not out.isatty():
        return _follow(picture, out)
    colours = in_colour(os.environ)
    with _screen(out), suppress(KeyboardInterrupt):
        while True:
            lines = picture.lines(shutil.get_terminal_size(), time.time(), colours=colours)
            out.write(TOP + "".join(f"{line}{END_OF_LINE}\n" for line in lines) + BELOW)
            out.flush()
            time.sleep(EVERY)
            picture.ask()
    return 0


def in_colour(environment: Mapping[str, str]) -> bool:
    """Return whether a terminal is to be written to in colour (https://no-color.org)."""
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def by_urgency(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is started, then by NotBefore."""
    return sorted(events, key=lambda event: (event["event_status"] != "Started", event["not_before"] or "9"))


class Picture:
    """What the agent said last, and when; the constructor asks it and raises ``NotBeforeError``."""

    def __init__(self, agent: AgentClient, board: Board) -> None:
        self._agent = agent
        self.board = board
        self.answer = agent.ask(board.path)
        self._answered = time.time()
        self._trouble = ""

    def ask(self) -> None:
        """Ask again; what was known stays where no answer comes."""
        try:
            self.answer = self._agent.ask(self.board.path)
        except ConfigError:
            raise
        except NotBeforeError as error:
            self._trouble = self._trouble or f"since {_clock(time.time())}: {escaped(str(error))}"
        else:
            self._answered, self._trouble = time.time(), ""

    def lines(self, size: os.terminal_size, now: float, *, colours: bool) -> list[str]:
        """Return the picture at ``now`` (Unix seconds), as many lines and columns as fit."""
        board = self.board
        events = board.listed(self.answer)
        title = f"{escaped(board.title(self.answer))} {_clock(now)}   Ctrl-C ends"
        lines = [(title, BOLD), *([(self._trouble, RED)] if self._trouble else []), ("", "")]
        said = board.remarks(self.answer, datetime.fromtimestamp(now, UTC))
        lines += [(escaped(text), "" if text == board.nothing else YELLOW) for text in said]
        left = [_left(event, now - self._answered) for event in events]
        table = columns(board.head, [board.row(event, seconds) for event, seconds in zip(events, left, strict=True)])
        styles = ["", *(board.style(event, seconds) for event, seconds in zip(events, left, strict=True))]
        lines += zip(table, styles, strict=False)
        room = size.lines - 1
        if len(lines) > room:
            lines[room - 1 :] = [(f"... and {len(lines) - room + 1} more: make the window higher", DIM)]
        return [_styled(_cut(text, size.columns), style if colours else "") for text, style in lines]


def _follow(picture: Picture, out: TextIO) -> int:
    shown: object = None
    board = picture.board
    with suppress(KeyboardInterrupt):
        while True:
            events = board.listed(picture.answer)
            said = board.remarks(picture.answer, datetime.now(UTC))
            listed = [board.row(event, None) for event in events]  # without the countdowns
            if (said, listed) != shown:
                shown = (said, listed)
                rows = [board.row(event, _left(event, 0.0)) for event in events]
                lines = (_clock(time.time()), *map(escaped, said), *columns(board.head, rows))
                out.writelines(f"{line}\n" for line in lines)
                out.flush()
            time.sleep(EVERY)
            picture.ask()
    return 0


@contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    out.write(OPEN)
    try:
        yield
    finally:
        out.write(CLOSE)
        out.flush()


def _left(event: dict[str, Any], passed: float) -> float | None:
    """Seconds to NotBefore, ``passed`` seconds after the agent answered."""
    seconds = event["seconds_to_not_before"]
    return None if seconds is None else seconds - passed


def whole_seconds(left: float | None) -> str:
    """Return a countdown for a column of a table."""
    return span(float(round(left))).replace(".0s", "s") if left is not None else "-"


def _row(event: dict[str, Any], left: float | None) -> tuple[str, ...]:
    return (
        event["event_type"],
        event["event_status"],
        event["scope"],
        whole_seconds(left),
        event["not_before"] or "-",
        span(event["expected_duration_seconds"]),
        ", ".join(event["resources"]),
        event["event_id"],
    )


def _style(event: dict[str, Any], left: float | None) -> str:
    if event["scope"] == "peer":
        return DIM
    if event["event_status"] == "Started":
        return RED
    return YELLOW if left is not None and left < SOON else ""


def _title(answer: dict[str, Any]) -> str:
    vm = (answer["vm"] or {}).get("name") or "this VM"
    return f"Scheduled events of {vm}: {len(answer['events'])} listed."


OF_AGENT: Final = Board(
    path="/api/v1/events",
    head=HEAD,
    listed=lambda answer: by_urgency(answer["events"]),
    title=_title,
    remarks=remarks,
    nothing=NOTHING,
    row=_row,
    style=_style,
)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{PLAIN}" if style and text else text


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"
