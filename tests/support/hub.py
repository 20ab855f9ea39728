"""``Hub`` runs the simulated Event Hub as a process.

A test can kill it, start it again, order faults, and read the stored events.
"""

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from support.agent import PATIENCE, free_port
from support.needs import needs

TESTS = Path(__file__).parents[1]
KEY = "c2VjcmV0LWtleS1vZi10aGUtaHVi"


class Stored(NamedTuple):
    """One event that the hub has stored."""

    partition: int
    key: str | None
    content_type: str
    properties: dict[str, Any]
    body: bytes

    @property
    def envelope(self) -> dict[str, Any]:
        """The stored CloudEvent."""
        envelope: dict[str, Any] = json.loads(self.body)
        return envelope


class Hub:
    """Runs ``python -m support.event_hub``, which keeps the hub ``changes`` in ``directory``."""

    def __init__(self, directory: Path, *words: str, partitions: int = 4) -> None:
        needs("proton")
        self.port = free_port()
        self._store = directory / "hub.changes"
        self._command = [
            sys.executable,
            "-m",
            "support.event_hub",
            "--port",
            str(self.port),
            "--partitions",
            str(partitions),
            "--key",
            f"root={KEY}",
            "--store",
            str(self._store),
            *words,
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start the process, and wait until it listens."""
        self._process = subprocess.Popen(
            self._command,
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # so that Ctrl-C does not reach it
        )
        assert self._process.stdout
        assert self._process.stdout.readline().startswith("listening")
        return self

    def order(self, word: str) -> None:
        """Order a fault, or its end; see ``support/event_hub/__main__.py``."""
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{word}: done\n"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the process by a signal, and wait for its end."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                pipe.close()
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGTERM)  # a process that is killed would not write its coverage

    def connection_string(self, key: str = KEY, name: str = "root") -> str:
        """Return a connection string with this shared access key."""
        return (
            f"Endpoint=sb://127.0.0.1:{self.port};SharedAccessKeyName={name};SharedAccessKey={key};"
            "EntityPath=changes;UseDevelopmentEmulator=true"
        )

    @property
    def stored(self) -> Sequence[Stored]:
        """The events that the hub has stored, without a last line that is not yet complete."""
        lines = self._store.read_bytes().splitlines(keepends=True)
        return [_read(json.loads(line)) for line in lines if line.endswith(b"\n")]


def _read(row: dict[str, Any]) -> Stored:
    from proton import Message  # noqa: PLC0415 - some machines cannot build it

    from support.event_hub.connection import text_of  # noqa: PLC0415 - as above

    message: Any = Message()
    message.decode(base64.b64decode(row["m"]))
    body = message.body
    properties = {
        text_of(name): text_of(value) for name, value in (message.properties or {}).items()
    }
    return Stored(row["p"], row["k"], str(message.content_type or ""), properties, bytes(body))
