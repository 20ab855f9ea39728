"""The set-up of ``make`` shows its progress."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from support.agent import PATIENCE, run

ROOT: Final = Path(__file__).parents[2]
PIP: Final = """
import sys, time
from pathlib import Path

def wait_until_shown(step):
    deadline = time.monotonic() + 60
    while step not in Path(sys.argv[-1]).read_text() and time.monotonic() < deadline:
        time.sleep(0.05)

print("Collecting a==1 (from -r pins.txt)", flush=True)
wait_until_shown("package 1 of 4")
print("Collecting b==1 (from -r pins.txt)", flush=True)
print("Collecting c==1 (from -r pins.txt)", flush=True)
print("Requirement already satisfied: a in .venv (from -r pins.txt)", flush=True)
print("Ignoring d: markers do not match your environment", flush=True)
wait_until_shown("package 4 of 4")
print("Installing collected packages: a, b, c", flush=True)
wait_until_shown("unpacking the packages")
"""


PROGRESS: Final = (sys.executable, str(ROOT / "tools" / "progress.py"))
IN_A_TERMINAL: Final = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"


def run_with_progress(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its progress, without a terminal."""
    return run(*PROGRESS, *words)


def run_in_a_terminal(*words: str, output: Path) -> int:
    """Run a command with its progress in a terminal; return its exit code.

    The file ``output`` always has what the terminal has shown so far.
    """
    command = [sys.executable, "-c", IN_A_TERMINAL, *PROGRESS, *words]
    with output.open("wb") as file:
        return subprocess.run(command, stdout=file, timeout=PATIENCE, check=False).returncode


def test_terminal_shows_the_progress_of_pip(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1 \\\n    --hash=sha256:0\nb==1\nc==1\nd==1 ; win32\n", encoding="utf-8")
    output = tmp_path / "output"
    pip = [sys.executable, "-c", PIP, "--requirement", str(pins), str(output)]

    exit_code = run_in_a_terminal("installing", *pip, output=output)

    assert exit_code == 0
    shown = output.read_text(encoding="utf-8")
    states = [text.partition(" s, ")[2].strip() for text in shown.split("\x1b[K")]
    steps = ("package 1 of 4", "package 4 of 4", "unpacking the packages")
    assert [step for step in steps if step not in states] == []
    assert "installing: done after " in shown


def test_file_gets_a_line_at_the_beginning_and_one_at_the_end() -> None:
    before = time.monotonic()
    result = run_with_progress("building", sys.executable, "-c", "import time; time.sleep(1)")
    elapsed = time.monotonic() - before

    begin, *_, end = result.stdout.splitlines()  # between them, a line every ten seconds
    assert re.fullmatch(r"building \.\.\. \d+ s", begin)
    took = re.fullmatch(r"building: done after (\d+) s", end)
    assert took is not None
    assert 1 <= int(took[1]) <= round(elapsed)


def test_failed_command_shows_its_output_and_keeps_its_exit_code() -> None:
    result = run_with_progress(
        "building", sys.executable, "-c", "print('no compiler'); raise SystemExit(7)"
    )

    assert result.returncode == 7
    assert "building: failed after " in result.stdout
    assert result.stdout.endswith("no compiler\n")


def test_log_gets_the_output_instead(tmp_path: Path) -> None:
    log = tmp_path / "build.log"

    result = run_with_progress(
        "--log", str(log), "building", sys.executable, "-c", "print('x' * 100_000)"
    )

    assert result.returncode == 0
    assert log.read_text(encoding="utf-8") == "x" * 100_000 + "\n"
    assert "xxx" not in result.stdout
