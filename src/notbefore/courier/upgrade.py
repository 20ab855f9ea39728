"""Another version of the package on disk: it is noticed, and asked whether it can take over."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import notbefore
from notbefore.core.text import escaped

CHECK_SECONDS: Final = 60.0  # for the whole check; a loaded VM needs some seconds
MAX_PROBLEM: Final = 500  # characters of its output
OUTPUT_BYTES: Final = 64 * 1024  # bytes of its output that are read


def _command() -> list[str]:
    """Return the command by which this process was started, without its arguments."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" and os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, "-P", "-m", "notbefore"]


# found at the start of the process: pip writes the script last, so it may be missing later
_COMMAND: Final = _command()


def package_on_disk() -> tuple[int, ...]:
    """Return values that differ when another package is installed; none if there is no package.

    A new file may have the inode of the one that it replaces, but not also its time of change.
    """
    try:
        status = Path(notbefore.__file__).stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns


class UpgradeCheck:
    """Runs the installed ``notbefore check-config`` on the configuration of this process.

    It imports what the new process would import and reads the same file, variables and options. So
    a package that is half installed fails here, while the running process still works.

    ``arguments``: of the command that the service manager will start, for ``check-config``. Raises
    ``OSError`` if the command cannot be started. Only ``end`` waits.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - ``end`` closes it
        self._deadline = time.monotonic() + CHECK_SECONDS
        self._timed_out = False
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command that started this process
                [*_COMMAND, "check-config", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._output,
            )
        except OSError:
            self._output.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether there is a result. A check that takes too long is ended."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() >= self._deadline:
            self._timed_out = True
            self._process.kill()
        return False

    @property
    def problem(self) -> str:
        """Why the installed version cannot take over, in words; empty if it can."""
        if self._timed_out:
            return f"`notbefore check-config` took more than {CHECK_SECONDS:.0f} s"
        code = self._process.returncode
        if code == 0:
            return ""
        problem = f"`notbefore check-config` fails (exit code {code}): {self._last_line()}"
        return escaped(problem)[:MAX_PROBLEM]

    def end(self) -> None:
        """Kill the check, unless it has ended."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._output.close()

    def _last_line(self) -> str:
        """Return the last line of its output that is not blank."""
        self._output.seek(0)
        text = self._output.read(OUTPUT_BYTES).decode(errors="replace")
        for line in reversed(text.split("\n")):
            if line.strip():
                return line
        return ""
