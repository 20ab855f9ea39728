"""An executable of the user's: the record as JSON on standard input and in ``NOTBEFORE_*`` variables; no shell.

Exit codes: 0 delivered, 75 (``EX_TEMPFAIL``) try again, anything else refused for good; ended by a signal: try again.
It is the leader of a process group, which is ended when the time is over and when the command fails. After exit code 0,
what it left in the background keeps running. A command that was running when its courier ended is not run again.
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
from notbefore.courier.message import Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.errors import SendError

EX_TEMPFAIL: Final = 75
NOT_RUNNABLE: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR)
MAX_VARIABLE: Final = 10_000  # characters; what is longer is no variable, and never cut: the record has it whole
MAX_OUTPUT: Final = 200  # characters: the end of its output
TAIL: Final = 4 * MAX_OUTPUT  # bytes of its output that are kept
DRAIN_SECONDS: Final = 1.0  # for the last of its output, once it has ended
INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER")
_PREFIX: Final = "azure.scheduled_event."


class Sink(BaseSink):
    """A command."""

    def __init__(self, _name: str, settings: Command, _messages: Messages) -> None:
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
        code, output = run(self._command, message.line, variables(message.content.flat(), own), self._timeout)
        if code != 0:
            what = f"signal {-code}" if code < 0 else f"exit code {code}"
            # a signal comes from outside: the machine goes down, or is out of memory
            raise SendError(f"{what}: {output}" if output else what, permanent=code > 0 and code != EX_TEMPFAIL)
        return Receipt()


def run(command: list[str], line: bytes, environment: dict[str, str], timeout: float) -> tuple[int, str]:
    """Run it; returns its exit code (negative: a signal) and the end of its output. Raises ``SendError``."""
    read, write = os.pipe()
    kept = bytearray()
    # what it leaves in the background may continue to write: the thread reads that until this process ends
    drain = threading.Thread(target=_drain, args=(read, kept), name="command-output", daemon=True)
    drain.start()
    try:
        process = subprocess.Popen(  # noqa: S603 - it is the user's own command, and no shell reads it
            command, stdin=subprocess.PIPE, stdout=write, stderr=write, env=environment, process_group=0
        )
    except OSError as error:
        permanent = error.errno in NOT_RUNNABLE
        raise SendError(f"{command[0]}: {error.strerror}", permanent=permanent) from None
    finally:
        os.close(write)
    try:
        process.communicate(line + b"\n", timeout)
    except subprocess.TimeoutExpired:
        raise SendError(f"not done after {timeout:g} s: ended") from None
    finally:
        if process.returncode != 0:
            _end(process)
    drain.join(DRAIN_SECONDS)
    return process.returncode, " ".join(bytes(kept).decode(errors="replace").split())[-MAX_OUTPUT:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it, and all that it started; on Windows it alone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
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
            found.setdefault(f"EVENT_{key}", ",".join(value) if isinstance(value, tuple) else str(value))
    # a NUL cannot be in a variable, and is in no name that means something; the whole record is on standard input
    return passed | {
        f"NOTBEFORE_{name}": value.replace("\0", "") for name, value in found.items() if len(value) <= MAX_VARIABLE
    }
