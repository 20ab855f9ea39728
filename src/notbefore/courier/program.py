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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

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
GUARD: Final = ("/bin/sh", "-c", "read -r _; kill -s KILL 0")


def run(command: Sequence[str], line: bytes, environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """Run it with ``line`` on its standard input; returns its exit code (negative: a signal) and the end of its output.

    Raises ``SendError`` where it cannot be started, or is not done after ``timeout`` seconds.
    """
    read, write = os.pipe()
    kept = bytearray()
    # what it leaves in the background may continue to write: the thread reads that until this process ends
    drain = threading.Thread(target=_drain, args=(read, kept), name="command-output", daemon=True)
    drain.start()
    with _group() as group:
        try:
            process = subprocess.Popen(  # noqa: S603 - it is the user's own command, and no shell reads it
                command, stdin=subprocess.PIPE, stdout=write, stderr=write, env=environment, process_group=group
            )
        except OSError as error:
            raise SendError(f"{command[0]}: {error.strerror}", permanent=error.errno in NOT_RUNNABLE) from None
        finally:
            os.close(write)
        try:
            process.communicate(line + b"\n", timeout)
        except subprocess.TimeoutExpired:
            raise SendError(f"not done after {timeout:g} s: ended") from None
        finally:
            if process.returncode != 0:
                _end(process, group)
    drain.join(DRAIN_SECONDS)
    return process.returncode, " ".join(bytes(kept).decode(errors="replace").split())[-MAX_OUTPUT:]


def ending(code: int, output: str) -> str:
    """How it ended, in words."""
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what}: {output}" if output else what


@contextmanager
def _group() -> Iterator[int]:
    """The number of a process group that ends when this process does; 0: without a shell each command has its own."""
    guard: subprocess.Popen[bytes] | None = None
    if os.name == "posix":
        with suppress(OSError):  # no shell
            guard = subprocess.Popen(  # noqa: S603 - constant
                GUARD,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                process_group=0,
            )
    try:
        yield guard.pid if guard is not None else 0
    finally:
        if guard is not None:
            guard.kill()
            guard.communicate()


def _end(process: subprocess.Popen[bytes], group: int) -> None:
    """End it, and all that it started; on Windows it alone."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(group or process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    if process.stdin is not None:  # open where its time was over before it had read everything
        with suppress(OSError):
            process.stdin.close()


def _drain(end: int, kept: bytearray) -> None:
    """Keep the end of what a command writes: it never waits for us, and fills no disk."""
    with os.fdopen(end, "rb", buffering=0) as pipe:
        while data := pipe.read(64 * 1024):
            kept += data
            del kept[:-TAIL]


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
