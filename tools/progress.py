"""Shows the progress of a command of the set-up: ``python tools/progress.py TITLE COMMAND ...``.

It shows the title, the seconds so far, and the number of packages that pip has processed. On a
terminal this is one line that changes; otherwise it is a new line every ten seconds. The output of
the command is shown if the command fails, or is written to ``--log FILE``.
"""

import argparse
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

INTERVAL: Final = 0.5  # seconds between two checks
LINE_EVERY: Final = 10.0  # seconds between two lines, if the output is not a terminal
CLEAR_LINE: Final = "\r\x1b[K"
# pip prints one of these for each package: it is fetched, installed, or for another platform
PACKAGE: Final = re.compile(
    r"(?:Collecting|Requirement already satisfied:|Ignoring) ([A-Za-z0-9._-]+)"
)
INSTALLING: Final = "Installing collected packages"  # pip prints it when it has all of them
INTERRUPTED: Final = 130  # exit code


class Work:
    """A running command, and the lines that it has written so far."""

    def __init__(self, command: list[str]) -> None:
        self._total = packages_in(command)
        self._packages: set[str] = set()
        self._installs = False
        self.lines: list[str] = []
        self.started = time.monotonic()  # seconds
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            package = PACKAGE.match(line)
            if package is not None:
                self._packages.add(package[1].lower())
            if line.startswith(INSTALLING):
                self._installs = True

    def finish(self) -> int:
        """Wait until the command ends, and return its exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    @property
    def state(self) -> str:
        """The progress in words, or empty if it is not known."""
        count = len(self._packages)
        if self._installs:
            return "unpacking the packages"
        if count > 0:
            return f"package {count} of {max(self._total, count)}"
        return ""


def packages_in(command: list[str]) -> int:
    """Return the number of packages in the file that follows ``--requirement``."""
    if "--requirement" not in command:
        return 0
    file = Path(command[command.index("--requirement") + 1])
    return sum("==" in line for line in file.read_text(encoding="utf-8").splitlines())


def show(title: str, work: Work) -> int:
    """Show the progress until the command ends; return its exit code."""
    is_terminal = sys.stdout.isatty()
    next_line = work.started
    while work.process.poll() is None:
        now = time.monotonic()
        text = f"{title} ... {now - work.started:.0f} s"
        if work.state:
            text = f"{text}, {work.state}"
        if is_terminal:
            sys.stdout.write(f"{CLEAR_LINE}{text}")
        elif now >= next_line:
            next_line = now + LINE_EVERY
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        time.sleep(INTERVAL)

    code = work.finish()
    result = "done" if code == 0 else "failed"
    if is_terminal:
        sys.stdout.write(CLEAR_LINE)
    sys.stdout.write(f"{title}: {result} after {time.monotonic() - work.started:.0f} s\n")
    return code


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description="run a command, and show how far it is")
    parser.add_argument("--log", type=Path, help="write the output here, and show none")
    parser.add_argument("title")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    work = Work(options.command)
    try:
        code = show(options.title, work)
    except KeyboardInterrupt:
        work.process.kill()
        return INTERRUPTED
    if options.log is not None:
        options.log.write_text("".join(work.lines), encoding="utf-8")
    elif code != 0:
        sys.stdout.writelines(work.lines)
    return code


if __name__ == "__main__":
    sys.exit(main())
