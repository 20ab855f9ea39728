"""The set-up of ``make`` shows its progress."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PIP: Final = """
import sys, time
for name in "abc":
    print(f"Collecting {name}==1 (from -r pins.txt)", flush=True)
    time.sleep(0.8)
print("Requirement already satisfied: a in .venv (from -r pins.txt)", flush=True)
print("Ignoring d: markers do not match your environment", flush=True)
time.sleep(0.8)
print("Installing collected packages: a, b, c", flush=True)
time.sleep(0.8)
"""


def run_with_progress(*words: str, terminal: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command with its progress, in a terminal or not."""
    command = [sys.executable, str(ROOT / "tools" / "progress.py"), *words]
    if terminal:
        program = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
        command = [sys.executable, "-c", program, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_terminal_shows_the_progress_of_pip(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1 \\\n    --hash=sha256:0\nb==1\nc==1\nd==1 ; win32\n", encoding="utf-8")
    pip = [sys.executable, "-c", PIP, "--requirement", str(pins)]

    result = run_with_progress("installing", *pip, terminal=True)

    assert result.returncode == 0
    states = [text.partition(" s, ")[2].strip() for text in result.stdout.split("\x1b[K")]
    steps = ("package 1 of 4", "package 4 of 4", "unpacking the packages")
    assert [step for step in steps if step not in states] == []
    assert "installing: done after " in result.stdout


def test_file_gets_a_line_at_the_beginning_and_one_at_the_end() -> None:
    before = time.monotonic()
    result = run_with_progress("building", sys.executable, "-c", "import time; time.sleep(1)")
    elapsed = time.monotonic() - before

    begin, end = result.stdout.splitlines()
    assert begin == "building ... 0 s"
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
