"""An executable of the user's: the record as JSON on standard input and in ``NOTBEFORE_*`` variables; no shell.

Exit codes: 0 accepted, 75 (``EX_TEMPFAIL``) try again, anything else refused for good; ended by a signal: try again.
Unless it exits with 0, what it has left in the background is ended with it: it may be run again.
"""

import errno
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

from notbefore.config.sinks import Command, Links
from notbefore.delivery.message import Message, Receipt
from notbefore.errors import SendError

EX_TEMPFAIL: Final = 75
NOT_RUNNABLE: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR)
LOOK: Final = 0.5  # seconds between looks whether it is to be ended early
MAX_VARIABLE: Final = 10_000  # characters; the kernel takes 128 KiB of one
MAX_OUTPUT: Final = 200  # characters of what it said last
PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER")
_PREFIX: Final = "azure.scheduled_event."


class Sink:
    """A command."""

    def __init__(self, _name: str, settings: Command, _links: Links) -> None:
        self._command = list(settings.command)
        self._timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Run it to its end, or to the end of its time."""
        own = {
            "DELIVERY_ID": message.delivery_id,
            "CHANGE": message.kind,
            "SEVERITY": message.severity,
            "VM": message.content.vm_name or "",
        }
        code, said = run(self._command, message.line, variables(message.content.flat(), own), self._timeout)
        if code != 0:
            # a signal comes from outside: the machine goes down, or is out of memory
            raise SendError(ending(code, said), permanent=code > 0 and code != EX_TEMPFAIL)
        return Receipt()

    def close(self) -> None:
        """Nothing is kept open."""


def run(
    command: Sequence[str],
    line: bytes,
    environment: dict[str, str],
    timeout: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[int, str]:
    """Run it to its end, or to the end of its time (or until ``stopped``); returns its exit code and its last words.

    Raises ``SendError`` where it cannot be started or is not done in time.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as output:  # a file never makes it wait, however much it says
        try:
            process = subprocess.Popen(  # noqa: S603 - it is the user's own command, and no shell reads it
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except OSError as error:
            raise SendError(f"{command[0]}: {error.strerror}", permanent=error.errno in NOT_RUNNABLE) from None
        text: bytes | None = line + b"\n"
        try:
            while True:
                try:
                    process.communicate(text, min(LOOK, max(0.0, deadline - time.monotonic())))
                    break
                except subprocess.TimeoutExpired:
                    text = None  # what is not written yet goes on being written
                    if stopped() or time.monotonic() >= deadline:
                        raise SendError(f"not done after {timeout:g} s: ended") from None
        finally:
            if process.returncode != 0:  # what a command that is content leaves in the background is meant to go on
                _end(process)
        return process.returncode, _last_words(output)


def ending(code: int, said: str) -> str:
    """How it ended, in words."""
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what}: {said}" if said else what


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, where it has not ended, and whatever it started."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()  # what it started lives on there
    process.wait()


def _last_words(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4 * MAX_OUTPUT))
    tail = output.read(4 * MAX_OUTPUT)
    return " ".join(tail.decode(errors="replace").split())[-MAX_OUTPUT:]


def variables(record: Mapping[str, Any], own: dict[str, str]) -> dict[str, str]:
    """The environment of a command: nothing of ours but what it needs to run, and the record's plain values."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    found = dict(own)
    for name, value in record.items():
        if name.startswith(_PREFIX):
            key = name.removeprefix(_PREFIX).upper().replace(".", "_")
            found.setdefault(f"EVENT_{key}", ",".join(value) if isinstance(value, list) else str(value))
    # a NUL cannot be in a variable, and is in no name that means something; the whole record is on standard input
    return passed | {f"NOTBEFORE_{name}": value.replace("\0", "")[:MAX_VARIABLE] for name, value in found.items()}
