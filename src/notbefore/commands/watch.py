"""``notbefore events --watch``: what is listed, drawn anew each second; countdowns go on while the agent is silent."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

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


def watch(agent: AgentClient, out: TextIO) -> int:
    """Draw until Ctrl-C; returns 0. Without a terminal, the table is printed when what is listed changes.

    Raises ``NotBeforeError`` where no agent answers at the start.
    """
    picture = Picture(agent)
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

    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent
        self.answer = agent.ask("/api/v1/events")
        self._answered = time.time()
        self._trouble = ""

    def ask(self) -> None:
        """Ask again; what was known stays where no answer comes."""
        try:
            self.answer = self._agent.ask("/api/v1/events")
        except ConfigError:
            raise
        except NotBeforeError as error:
            self._trouble = self._trouble or f"since {_clock(time.time())}: {escaped(str(error))}"
        else:
            self._answered, self._trouble = time.time(), ""

    def lines(self, size: os.terminal_size, now: float, *, colours: bool) -> list[str]:
        """Return the picture at ``now`` (Unix seconds), as many lines and columns as fit."""
        events = by_urgency(self.answer["events"])
        vm = (self.answer["vm"] or {}).get("name") or "this VM"
        title = f"Scheduled events of {escaped(vm)}: {len(events)} listed. {_clock(now)}   Ctrl-C ends"
        lines = [(title, BOLD), *([(self._trouble, RED)] if self._trouble else []), ("", "")]
        lines += [
            (text, "" if text == NOTHING else YELLOW) for text in remarks(self.answer, datetime.fromtimestamp(now, UTC))
        ]
        left = [_left(event, now - self._answered) for event in events]
        table = columns(HEAD, [_row(event, seconds) for event, seconds in zip(events, left, strict=True)])
        styles = ["", *(_style(event, seconds) for event, seconds in zip(events, left, strict=True))]
        lines += zip(table, styles, strict=False)
        room = size.lines - 1
        if len(lines) > room:
            lines[room - 1 :] = [(f"... and {len(lines) - room + 1} more: make the window higher", DIM)]
        return [_styled(_cut(text, size.columns), style if colours else "") for text, style in lines]


def _follow(picture: Picture, out: TextIO) -> int:
    shown: object = None
    with suppress(KeyboardInterrupt):
        while True:
            events = by_urgency(picture.answer["events"])
            said = remarks(picture.answer, datetime.now(UTC))
            listed = [(event["event_id"], event["event_status"], event["not_before"]) for event in events]
            if (said, listed) != shown:
                shown = (said, listed)
                rows = [_row(event, _left(event, 0.0)) for event in events]
                out.writelines(f"{line}\n" for line in (_clock(time.time()), *said, *columns(HEAD, rows)))
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


def _row(event: dict[str, Any], left: float | None) -> tuple[str, ...]:
    return (
        event["event_type"],
        event["event_status"],
        event["scope"],
        span(float(round(left))).replace(".0s", "s") if left is not None else "-",
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


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{PLAIN}" if style and text else text


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"
