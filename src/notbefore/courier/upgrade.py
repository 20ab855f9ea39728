"""``UpgradeCheck`` asks the installed version whether it can take over from the running one."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from notbefore.core.text import escaped

CHECK_SECONDS: Final = 60.0  # for the whole check; a loaded VM needs some seconds
MAX_PROBLEM: Final = 500  # characters of its output


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
                [*installed_command(), "check-config", *arguments],
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
        if self._process.returncode == 0:
            return ""
        self._output.seek(0)
        lines = self._output.read(64 * 1024).decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "")
        code = self._process.returncode
        return escaped(f"`notbefore check-config` fails (exit code {code}): {said}")[:MAX_PROBLEM]

    def end(self) -> None:
        """Kill the check, unless it has ended."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._output.close()


def installed_command() -> list[str]:
    """Return the command by which this process was started, without its arguments."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" and os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, "-P", "-m", "notbefore"]
