"""Run an executable of the user's, and end it with all that it started.

It is the leader of a process group, and so is everything that it starts, unless that asks for a group of its own. The
group is ended when the time is over, when the command fails, and when the process that runs it dies, in whatever way.
After exit code 0, what it left in the background keeps running.
"""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from notbefore.errors import SendError

NOT_RUNNABLE: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR)
MAX_VARIABLE: Final = 10_000  # characters; what is longer is no variable, and never cut: the record has it whole
MAX_OUTPUT: Final = 200  # characters: the end of its output
TAIL: Final = 4 * MAX_OUTPUT  # bytes of its output that are kept
DRAIN_SECONDS: Final = 1.0  # for the last of its output, once it has ended
INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER")
_PREFIX: Final = "azure.scheduled_event."
# the leader of the command's group waits for the end of a pipe, whose other end is held by who runs the command: the
# group ends however that one dies. (PR_SET_PDEATHSIG would end the command alone, and not what it has started.)
_GUARD: Final = ("/bin/sh", "-c", "read -r _; kill -s KILL 0")


def run(command: Sequence[str], line: bytes, environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """Run it with ``line`` on its standard input; returns its exit code (negative: a signal) and the end of its output.

    Raises ``SendError`` where it cannot be started, or is not done after ``timeout`` seconds.
    """
    with _Output() as output, _Group() as group:
        try:
            process = group.start(command, stdin=subprocess.PIPE, stdout=output.end, stderr=output.end, env=environment)
        except OSError as error:
            raise SendError(f"{command[0]}: {error.strerror}", permanent=error.errno in NOT_RUNNABLE) from None
        output.close_end()
        try:
            process.communicate(line + b"\n", timeout)
        except subprocess.TimeoutExpired:
            raise SendError(f"not done after {timeout:g} s: ended") from None
        return process.returncode, output.tail()


def ending(code: int, output: str) -> str:
    """How it ended, in words."""
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what}: {output}" if output else what


class _Group:
    """A command and what it starts: all of it ends when this block fails, when the command does, or this process."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def __enter__(self) -> Self:
        if os.name == "posix":
            with suppress(OSError):  # no shell: the group ends with the command alone
                self._guard = subprocess.Popen(  # noqa: S603 - constant
                    _GUARD,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={},
                    process_group=0,
                )
                self._number = self._guard.pid
        return self

    def start(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        """Start the command in the group; raises ``OSError``."""
        if os.name == "posix":
            settings["process_group"] = self._number
        self._process = subprocess.Popen(command, **settings)  # noqa: S603 - it is the user's own command, and no shell reads it
        self._number = self._number or self._process.pid
        return self._process

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode != 0:
            self._end(self._process)
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(self._number, signal.SIGKILL)
            else:
                process.kill()  # what it started keeps running there
        process.wait()
        if process.stdin is not None:  # open where its time was over before it had read everything
            with suppress(OSError):
                process.stdin.close()


class _Output:
    """The end of what a command writes, read as it comes: it never waits for us, and fills no disk.

    What it leaves in the background may continue to write: a thread reads that until this process ends.
    """

    def __init__(self) -> None:
        self._read, self.end = os.pipe()
        self._kept = bytearray()
        self._ended = threading.Event()
        self._open = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._drain, name="command-output", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close_end()

    def close_end(self) -> None:
        """Close our copy of the end that the command writes to."""
        if self._open:
            self._open = False
            os.close(self.end)

    def _drain(self) -> None:
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while data := pipe.read(64 * 1024):
                self._kept += data
                del self._kept[:-TAIL]
        self._ended.set()

    def tail(self) -> str:
        """The last characters, on one line; the pipe may stay open where something is left in the background."""
        self._ended.wait(DRAIN_SECONDS)
        return " ".join(bytes(self._kept).decode(errors="replace").split())[-MAX_OUTPUT:]


def variables(record: Mapping[str, Any], own: dict[str, str]) -> dict[str, str]:
    """The environment of a command: nothing of ours but what it needs to run, and the record's plain values.

    A value of more than ``MAX_VARIABLE`` characters is left out: half a list of VMs is worse than none.
    """
    passed = {name: os.environ[name] for name in INHERITED if name in os.environ}
    found = dict(own)
    for name, value in record.items():
        if name.startswith(_PREFIX):
            key = name.removeprefix(_PREFIX).upper().replace(".", "_")
            found.setdefault(f"EVENT_{key}", ",".join(value) if isinstance(value, list) else str(value))
    # a NUL cannot be in a variable, and is in no name that means something; the whole record is on standard input
    return passed | {
        f"NOTBEFORE_{name}": value.replace("\0", "") for name, value in found.items() if len(value) <= MAX_VARIABLE
    }
