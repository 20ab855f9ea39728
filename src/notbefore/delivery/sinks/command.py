"""An executable of the user's: the record as JSON on standard input and in ``NOTBEFORE_*`` variables; no shell.

Exit codes: 0 accepted, 75 (``EX_TEMPFAIL``) try again, anything else refused for good; ended by a signal: try again.
"""

import errno
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import Final

from notbefore.delivery.message import Message, Receipt
from notbefore.delivery.settings import Command, Links
from notbefore.errors import SendError

EX_TEMPFAIL: Final = 75
NOT_RUNNABLE: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR)
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
        with tempfile.TemporaryFile() as output:  # a file never makes it wait, however much it says
            try:
                process = subprocess.Popen(  # noqa: S603 - it is the user's own command, and no shell reads it
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=variables(message),
                    start_new_session=True,
                )
            except OSError as error:
                raise SendError(
                    f"{self._command[0]}: {error.strerror}", permanent=error.errno in NOT_RUNNABLE
                ) from None
            try:
                process.communicate(message.line + b"\n", self._timeout)
            except subprocess.TimeoutExpired:
                raise SendError(f"not done after {self._timeout:g} s: ended") from None
            finally:
                _end(process)
            _check(process.returncode, _last_words(output.fileno()))
        return Receipt()

    def close(self) -> None:
        """Nothing is kept open."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started, where it has not ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _check(code: int, said: str) -> None:
    if code == 0:
        return
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    # a signal comes from outside: the machine goes down, or is out of memory
    raise SendError(f"{what}: {said}" if said else what, permanent=code > 0 and code != EX_TEMPFAIL)


def _last_words(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 4 * MAX_OUTPUT, max(0, size - 4 * MAX_OUTPUT))
    return " ".join(tail.decode(errors="replace").split())[-MAX_OUTPUT:]


def variables(message: Message) -> dict[str, str]:
    """The environment of the command: nothing of ours but what it needs to run, and the record's plain values."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    found = {
        "DELIVERY_ID": message.delivery_id,
        "CHANGE": message.kind,
        "SEVERITY": message.severity,
        "VM": str(message.get("host.name") or ""),
    }
    for name, value in message.record.items():
        if name.startswith(_PREFIX):
            key = name.removeprefix(_PREFIX).upper()
            found.setdefault(f"EVENT_{key}", ",".join(value) if isinstance(value, list) else str(value))
    # a NUL cannot be in a variable, and is in no name that means something; the whole record is on standard input
    return passed | {f"NOTBEFORE_{name}": value.replace("\0", "")[:MAX_VARIABLE] for name, value in found.items()}
