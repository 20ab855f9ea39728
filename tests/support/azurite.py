"""Azurite, Microsoft's own server of Blob Storage, as a process: started, killed, started again
with what it had.
"""

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from azure.storage.blob.aio import ContainerClient

from notbefore.fleet.snapshot import Snapshot, read_snapshot
from support.agent import PATIENCE, eventually, free_port, get
from support.needs import needs

Found = TypeVar("Found")

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "notbefore"


class Azurite:
    """Serves a container ``notbefore`` for checkpoints."""

    def __init__(self, directory: Path) -> None:
        needs("azurite-blob")
        self.port = free_port()
        self._command = [
            "azurite-blob",
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(self.port),
            "--location",
            str(directory / "azurite"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{self.port}/{ACCOUNT};"
        )

    def start(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

        def answers() -> bool:
            try:
                return get(self.port, f"/{ACCOUNT}")[0] > 0
            except OSError:
                return False

        eventually(answers)
        return self

    def stop(self) -> None:
        """In order: Azurite saves what it has acknowledged each 5 s only, and Blob Storage loses
        none of that.
        """
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)
        self._process = None

    def hang(self, number: signal.Signals) -> None:
        """Sends a signal: ``SIGSTOP`` stops the answers, ``SIGCONT`` resumes them."""
        assert self._process
        self._process.send_signal(number)

    def _ask(self, do: Callable[[Any], Awaitable[Found]]) -> Found:
        async def ask() -> Found:
            async with ContainerClient.from_connection_string(
                self.connection_string, CONTAINER
            ) as container:
                return await do(container)

        return asyncio.run(ask())

    def make_container(self) -> None:
        self._ask(lambda container: container.create_container())

    def delete_container(self) -> None:
        self._ask(lambda container: container.delete_container())

    def snapshots(self) -> list[Snapshot]:
        """What the instances have written down, of each partition."""

        async def read(container: Any) -> list[Snapshot]:
            names = [
                blob.name async for blob in container.list_blobs() if "/checkpoint/" in blob.name
            ]
            blobs = [await container.get_blob_client(name).download_blob() for name in names]
            return [read_snapshot(await blob.readall()) for blob in blobs]

        return self._ask(read)

    def __enter__(self) -> Self:
        self.start().make_container()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
