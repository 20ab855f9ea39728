"""The shells complete the command with the files that the wheel installs."""

import os
import pty
import select
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, Self

import pytest

from support.agent import eventually
from support.needs import needs

COMPLETIONS: Final = Path(__file__).parents[2] / "config" / "completions"
# a function in place of the command, because the shell runs each completed line
COMMAND: Final = 'notbefore() { echo "ran:$*."; }'
COMMANDS: Final = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
}
SET_UP: Final = {
    "bash": f"{COMMAND}; source {COMPLETIONS}/notbefore",
    "zsh": f"{COMMAND}; fpath=({COMPLETIONS} $fpath); autoload -U compinit; compinit -u -D",
}
LINES: Final = {  # the keys that a person types, with \t for the tab key -> the arguments
    "notbefore hist\t--js\t": "history --json",
    "notbefore fleet mut\t": "fleet mute",
    "notbefore fleet flee\t": "fleet fleet.yml",
    "notbefore run --log-l\tdeb\tflee\t": "run --log-level debug fleet.yml",
    "notbefore outbox ret\t": "outbox retry",
    "notbefore fleet outb\tli\t--js\t": "fleet outbox list --json",
}
FISH: Final = {  # a line -> the word that completes it
    "notbefore hist": "history",
    "notbefore history --js": "--json",
    "notbefore fleet mut": "mute",
    "notbefore fleet flee": "fleet.yml",
    "notbefore run --log-l": "--log-level",
    "notbefore run --log-level deb": "debug",
    "notbefore run flee": "fleet.yml",
    "notbefore outbox ret": "retry",
    "notbefore fleet outbox li": "list",
}


class Shell:
    """A shell in a terminal, in a directory."""

    def __init__(self, name: str, directory: Path) -> None:
        self._screen, self._terminal = pty.openpty()
        self._process = subprocess.Popen(
            COMMANDS[name],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            cwd=directory,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(directory)},
        )
        self._text = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def shows(self, text: str) -> bool:
        while select.select([self._screen], [], [], 0)[0]:
            self._text += os.read(self._screen, 65_536).decode(errors="replace")
        return text in self._text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._screen)
        os.close(self._terminal)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "fleet.yml").touch()
    return tmp_path


@pytest.fixture(params=COMMANDS)
def shell(request: pytest.FixtureRequest, directory: Path) -> Iterator[Shell]:
    needs(request.param)
    with Shell(request.param, directory) as started:
        started.type(f"{SET_UP[request.param]}; echo set-''up\n")
        eventually(lambda: started.shows("set-up"))
        yield started


@pytest.mark.parametrize("line", LINES)
def test_bash_and_zsh_complete_a_line(shell: Shell, line: str) -> None:
    shell.type(f"{line}\n")

    eventually(partial(shell.shows, f"ran:{LINES[line]}."))


@pytest.mark.parametrize("line", FISH)
def test_fish_completes_a_line(directory: Path, line: str) -> None:
    needs("fish")
    script = f"source {COMPLETIONS}/notbefore.fish; complete --do-complete '{line}'"

    result = subprocess.run(
        ["fish", "--no-config", "--command", script],
        capture_output=True,
        text=True,
        cwd=directory,
        check=True,
    )

    words = [suggestion.partition("\t")[0] for suggestion in result.stdout.splitlines()]
    assert words == [FISH[line]]
