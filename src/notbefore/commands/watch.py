"""``Board``: what is listed, as a table. ``show`` prints it once, ``watch`` draws it anew each second.

Countdowns go on while nobody answers.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from msgspec import Struct

from notbefore.commands.client import AgentClient
from notbefore.commands.tables import columns, print_json, table
from notbefore.core.text import escaped, shortened
from notbefore.errors import ConfigError, NotBeforeError

EVERY: Final = 1.0  # seconds
SOON: Final = 900.0  # seconds to NotBefore, from where on a countdown is coloured
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


def show(board: Board, answer: dict[str, Any], out: TextIO, *, as_json: bool = False) -> None:
    """Print an answer: the remarks and the table, or one JSON object a line."""
    listed = board.listed(answer)
    if as_json:
        print_json(listed, out)
        return
    out.writelines(f"{escaped(text)}\n" for text in board.remarks(answer, datetime.now(UTC)))
    table(board.head, [board.row(one, _left(one, 0.0)) for one in listed], out)


def watch(board: Board, agent: AgentClient, out: TextIO) -> int:
    """Draw until Ctrl-C; returns 0. Without a terminal, the table is printed when what is listed changes.

    Raises ``NotBeforeError`` where no agent answers at the start.
    """
    picture = Picture(agent, board)
    if not out.isatty():
        return _follow(picture, out)
    colours = in_colour(os.environ)
    with _screen(out), _until_ctrl_c() as pressed:
        while not pressed:
            lines = picture.lines(shutil.get_terminal_size(), time.time(), colours=colours)
            out.write(TOP + "".join(f"{line}{END_OF_LINE}\n" for line in lines) + BELOW)
            out.flush()
            time.sleep(EVERY)
            picture.ask()
    return 0


def in_colour(environment: Mapping[str, str]) -> bool:
    """Return whether a terminal is to be written to in colour (https://no-color.org)."""
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


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
        rows = columns(board.head, [board.row(event, seconds) for event, seconds in zip(events, left, strict=True)])
        styles = ["", *(board.style(event, seconds) for event, seconds in zip(events, left, strict=True))]
        lines += zip(rows, styles, strict=False)
        room = size.lines - 1
        if len(lines) > room:
            lines[room - 1 :] = [(f"... and {len(lines) - room + 1} more: enlarge the window", DIM)]
        return [_styled(shortened(text, size.columns), style if colours else "") for text, style in lines]


def _follow(picture: Picture, out: TextIO) -> int:
    shown: object = None
    board = picture.board
    with _until_ctrl_c() as pressed:
        while not pressed:
            said = board.remarks(picture.answer, datetime.now(UTC))
            listed = [board.row(event, None) for event in board.listed(picture.answer)]  # without the countdowns
            if (said, listed) != shown:
                shown = (said, listed)
                out.write(f"{_clock(time.time())}\n")
                show(board, picture.answer, out)
                out.flush()
            time.sleep(EVERY)
            picture.ask()
    return 0


@contextmanager
def _until_ctrl_c() -> Iterator[list[int]]:
    """Yield a list that has an item once Ctrl-C was pressed: its exception can be lost within a generator's end."""
    pressed: list[int] = []

    def note(number: int, _frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        with suppress(KeyboardInterrupt):
            yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


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


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{PLAIN}" if style and text else text


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"
