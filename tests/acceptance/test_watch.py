"""``notbefore events --watch`` shows a table on a terminal, and elsewhere a line per change."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from notbefore.simulator.server import Simulator
from support.agent import NOWHERE, RunningAgent, eventually, notbefore
from support.azure import FUTURE, ID, body, item, listed
from support.json_output import parsed_output


@pytest.fixture
def agent(imds: Simulator, tmp_path: Path) -> Iterator[RunningAgent]:
    # an answer that is three intervals late is a silence: a busy machine causes none of 9 s
    with RunningAgent(imds.endpoint, tmp_path / "state", interval="3s") as running:
        yield running


@contextmanager
def watching(agent: RunningAgent, *words: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run `notbefore events --watch`."""
    url = f"http://127.0.0.1:{agent.port}"
    command = [sys.executable, "-m", "notbefore", "events", "--watch", "--url", url, *words]
    process = subprocess.Popen(command, **{"stdout": subprocess.PIPE, **streams})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_of(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """Wait for so many lines of output."""
    assert process.stdout is not None
    return [process.stdout.readline().decode().rstrip("\n") for _ in range(count)]


def test_pipe_gets_a_line_for_each_change(agent: RunningAgent, imds: Simulator) -> None:
    with watching(agent) as process:
        imds.set_document(listed("e"))
        (new,) = lines_of(process, 1)
        imds.set_document(body(item("e", EventStatus="Started", NotBefore=""), incarnation=2))
        (changed,) = lines_of(process, 1)
        imds.set_document(body(incarnation=3))
        (gone,) = lines_of(process, 1)

    assert "  new  e  Freeze  Scheduled  self  2058-03-01T12:00:00Z  " in new
    assert "  changed  e  Freeze  Started  self  " in changed
    assert "  gone  e  Freeze  Started  self  " in gone


def test_json_is_an_object_for_each_change(agent: RunningAgent, imds: Simulator) -> None:
    with watching(agent, "--json") as process:
        (empty,) = parsed_output("events --watch", *lines_of(process, 1))
        imds.set_document(body(item(NotBefore=FUTURE)))
        (listing,) = parsed_output("events --watch", *lines_of(process, 1))

    assert empty["events"] == []
    assert [event["event_id"] for event in listing["events"]] == [ID]
    assert listing["problem"] == ""


def test_watch_names_stopped_agent_and_continues(agent: RunningAgent, imds: Simulator) -> None:
    with watching(agent, stderr=subprocess.PIPE) as process:
        imds.set_document(listed("e"))
        lines_of(process, 1)
        agent.stop()

        assert process.stderr is not None
        problem = process.stderr.readline().decode()
        assert "it is not known what is scheduled now: no agent answers at" in problem
        assert process.poll() is None


def test_watch_fails_at_once_without_an_agent() -> None:
    done = notbefore("events", "--watch", "--url", NOWHERE)

    assert done.returncode == 1
    assert done.stdout == ""
    assert "no agent answers" in done.stderr


class Terminal:
    """A terminal, and the text that was written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.text = ""

    def shows(self, text: str) -> bool:
        """Return whether the present picture has this text.

        A picture begins where the cursor moves to the first line.
        """
        while select.select([self.master], [], [], 0)[0]:
            self.text += os.read(self.master, 65_536).decode()
        return text in self.text.rpartition("\x1b[H")[2]


def test_terminal_shows_the_present_table(
    agent: RunningAgent, imds: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "10")
    terminal = Terminal()
    with watching(agent, stdout=terminal.slave):
        eventually(lambda: terminal.shows("Nothing is scheduled."))
        imds.set_document(listed(*[f"e{number}" for number in range(20)]))
        eventually(lambda: terminal.shows("e7"))
        imds.set_document(body(incarnation=2))
        eventually(lambda: terminal.shows("Nothing is scheduled."))

    lines = terminal.text.replace("\x1b[K", "").split("\r\n")
    assert max(len(line) for line in lines) <= 100 + len("\x1b[2J\x1b[H")
    assert "e9" not in terminal.text
    os.close(terminal.master)
    os.close(terminal.slave)
