"""A command of the user: gets the record as JSON on standard input, and in ``NOTBEFORE_*``
variables; no shell.

Exit codes: 0 delivered, 75 (``EX_TEMPFAIL``) try again, anything else refused for good; ended by a
signal: try again. It is the leader of a process group, which is killed after the timeout and if the
command fails. After exit code 0, its background processes keep running. A command that was running
when its courier ended is not run again.
"""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from notbefore.config.sinks import Command, Messages
from notbefore.core.message import Message
from notbefore.core.record import PREFIX
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import SendError

EX_TEMPFAIL: Final = 75
NOT_RUNNABLE: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR)
MAX_VARIABLE: Final = 10_000  # characters; a longer value is left out, not cut: the record has it
MAX_OUTPUT: Final = 200  # characters of the end of its output in an error
TAIL: Final = 4 * MAX_OUTPUT  # bytes of its output that are kept
DRAIN_SECONDS: Final = 1.0  # to read the rest of its output, once it has ended
INHERITED: Final = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER"),
    *(
        "SYSTEMROOT",
        "PATHEXT",
        "TEMP",
        "USERPROFILE",
    ),  # Windows: without the first, no PowerShell and no socket
)


class Sink(BaseSink):
    """A command."""

    def __init__(self, _name: str, settings: Command, _messages: Messages) -> None:
        self._command = list(settings.command)
        self._timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Run the command; raises ``SendError`` if it fails or takes too long."""
        own = {
            "DELIVERY_ID": message.delivery_id,
            "CHANGE": message.kind,
            "SEVERITY": message.severity,
            "VM": message.content.vm_name or "",
        }
        code, output = run(
            self._command, message.line, variables(message.content.flat(), own), self._timeout
        )
        if code != 0:
            what = f"signal {-code}" if code < 0 else f"exit code {code}"
            # a signal comes from outside: the machine shuts down, or is out of memory
            raise SendError(
                f"{what}: {output}" if output else what, permanent=code > 0 and code != EX_TEMPFAIL
            )
        return Receipt()


def run(
    command: list[str], line: bytes, environment: dict[str, str], timeout: float
) -> tuple[int, str]:
    """Run a command; return its exit code (negative: a signal) and the end of its output.

    Raises ``SendError``.
    """
    read, write = os.pipe()
    kept = bytearray()
    # its background processes may continue to write: the thread reads that until this process ends
    drain = threading.Thread(target=_drain, args=(read, kept), name="command-output", daemon=True)
    drain.start()
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            command,
            stdin=subprocess.PIPE,
            stdout=write,
            stderr=write,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        permanent = error.errno in NOT_RUNNABLE
        raise SendError(f"{command[0]}: {error.strerror}", permanent=permanent) from None
    finally:
        os.close(write)
    try:
        process.communicate(line + b"\n", timeout)
    except subprocess.TimeoutExpired:
        raise SendError(f"not done after {timeout:g} s: killed") from None
    finally:
        if process.returncode != 0:
            _end(process)
    drain.join(DRAIN_SECONDS)
    return process.returncode, " ".join(bytes(kept).decode(errors="replace").split())[-MAX_OUTPUT:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and all that it started; on Windows only the command."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
    process.wait()
    if process.stdin is not None:  # still open if it was killed before it had read everything
        with suppress(OSError):
            process.stdin.close()


def _drain(end: int, kept: bytearray) -> None:
    """Read the output of a command, so that it never has to wait, and keep the end of it."""
    with os.fdopen(end, "rb", buffering=0) as pipe:
        while data := pipe.read(64 * 1024):
            kept += data
            del kept[:-TAIL]


def variables(record: Mapping[str, Any], own: dict[str, str]) -> dict[str, str]:
    """Return the environment of a command: ``INHERITED``, ``own``, and the values of the record.

    A value of more than ``MAX_VARIABLE`` characters is left out: half a list of VMs is worse than
    none.
    """
    passed = {name: os.environ[name] for name in INHERITED if name in os.environ}
    found = dict(own)
    for name, value in record.items():
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).upper().replace(".", "_")
            found.setdefault(
                f"EVENT_{key}", ",".join(value) if isinstance(value, tuple) else str(value)
            )
    # a variable cannot contain a NUL, and no useful value does; the whole record is on standard
    # input
    return passed | {
        f"NOTBEFORE_{name}": value.replace("\0", "")
        for name, value in found.items()
        if len(value) <= MAX_VARIABLE
    }
