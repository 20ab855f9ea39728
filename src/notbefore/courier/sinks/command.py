"""A command of the user. It gets the record as JSON on standard input, and in ``NOTBEFORE_*``
variables. There is no shell.

Exit codes: 0 delivered, 75 (``EX_TEMPFAIL``) try again, anything else refused for good. If a signal
ended it: try again. The command is the leader of a process group, which is killed after the timeout
and if the command fails. After exit code 0, its background processes keep running. A command that
was running when its courier ended is not run again.
"""

import errno
import os
import signal
import subprocess
import sys
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
MAX_VARIABLE: Final = 10_000  # characters; a longer value is left out: the record has it
MAX_OUTPUT: Final = 200  # characters of the end of its output in an error
TAIL: Final = 4 * MAX_OUTPUT  # bytes of its output that are kept
DRAIN_SECONDS: Final = 1.0  # to read the rest of its output, once it has ended
# variables of this process that the command gets
POSIX_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER")
# without the first, there is no PowerShell and no socket
WINDOWS_VARIABLES: Final = ("SYSTEMROOT", "PATHEXT", "TEMP", "USERPROFILE")
INHERITED: Final = (*POSIX_VARIABLES, *WINDOWS_VARIABLES)


class Sink(BaseSink):
    """A command."""

    def __init__(self, _name: str, settings: Command, _messages: Messages) -> None:
        self._command = list(settings.command)
        self._timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Run the command; raises ``SendError`` if it fails or takes too long."""
        delivery = {
            "DELIVERY_ID": message.delivery_id,
            "CHANGE": message.kind,
            "SEVERITY": message.severity,
            "VM": message.content.vm_name or "",
        }
        environment = variables(message.content.flat(), delivery)
        code, output = run(self._command, message.line, environment, self._timeout)
        if code == 0:
            return Receipt()

        if code < 0:  # a signal comes from outside: the machine shuts down, or is out of memory
            cause = f"signal {-code}"
            permanent = False
        else:
            cause = f"exit code {code}"
            permanent = code != EX_TEMPFAIL
        if output:
            cause = f"{cause}: {output}"
        raise SendError(cause, permanent=permanent)


def run(
    command: list[str], line: bytes, environment: dict[str, str], timeout: float
) -> tuple[int, str]:
    """Run a command; return its exit code (negative: a signal) and the end of its output.

    Raises ``SendError``.
    """
    reader, writer = os.pipe()
    tail = bytearray()
    # its background processes may continue to write: the thread reads that until this process ends
    drain = threading.Thread(target=_drain, args=(reader, tail), name="command-output", daemon=True)
    drain.start()
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            command,
            stdin=subprocess.PIPE,
            stdout=writer,
            stderr=writer,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        permanent = error.errno in NOT_RUNNABLE
        raise SendError(f"{command[0]}: {error.strerror}", permanent=permanent) from None
    finally:
        os.close(writer)
    try:
        process.communicate(line + b"\n", timeout)
    except subprocess.TimeoutExpired:
        raise SendError(f"not done after {timeout:g} s: killed") from None
    finally:
        if process.returncode != 0:
            _end(process)
    drain.join(DRAIN_SECONDS)
    output = " ".join(bytes(tail).decode(errors="replace").split())
    return process.returncode, output[-MAX_OUTPUT:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and all that it started; on Windows only the command."""
    with suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:  # still open if it was killed before it had read everything
        with suppress(OSError):
            process.stdin.close()


def _drain(reader: int, tail: bytearray) -> None:
    """Read the output of a command, so that it never has to wait, and keep the end of it."""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            data = pipe.read(64 * 1024)
            if not data:  # the command and all that it started have closed it
                return
            tail += data
            del tail[:-TAIL]


def variables(record: Mapping[str, Any], delivery: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: ``INHERITED``, and the delivery and the record as
    ``NOTBEFORE_*``.

    A value of more than ``MAX_VARIABLE`` characters is left out: half a list of VMs is worse than
    none.
    """
    texts: dict[str, str] = {}
    for name, value in record.items():
        if not name.startswith(PREFIX):
            continue
        key = name.removeprefix(PREFIX).upper().replace(".", "_")
        if isinstance(value, tuple):
            texts[f"EVENT_{key}"] = ",".join(value)
        else:
            texts[f"EVENT_{key}"] = str(value)
    texts.update(delivery)

    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    for name, text in texts.items():
        if len(text) <= MAX_VARIABLE:
            # a variable cannot contain a NUL, and no useful value does
            environment[f"NOTBEFORE_{name}"] = text.replace("\0", "")
    return environment
