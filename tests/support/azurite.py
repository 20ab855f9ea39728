"""``Azurite`` runs Azurite, Microsoft's emulator of Blob Storage, as a process.

A test can stop it and start it again with the same blobs.
"""

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from azure.storage.blob.aio import ContainerClient

from notbefore.fleet.snapshot import Snapshot, read_snapshot
from support.agent import PATIENCE, eventually, free_port, get
from support.needs import needs

Result = TypeVar("Result")

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
        eventually(self._answers)
        return self

    def _answers(self) -> bool:
        with suppress(OSError):
            get(self.port, f"/{ACCOUNT}")
            return True
        return False

    def stop(self) -> None:
        """End the process in order.

        Azurite saves acknowledged writes every 5 s only, and a kill would lose some. Blob Storage
        loses none.
        """
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)
        self._process = None

    def hang(self) -> None:
        """Stop answering, without closing connections."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again."""
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def _run(self, operation: Callable[[ContainerClient], Awaitable[Result]]) -> Result:
        """Run an operation on the container."""

        async def run() -> Result:
            client = ContainerClient.from_connection_string(self.connection_string, CONTAINER)
            async with client:
                return await operation(client)

        return asyncio.run(run())

    def make_container(self) -> None:
        self._run(_create)

    def delete_container(self) -> None:
        self._run(_delete)

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that the instances have written, one for each partition."""
        return self._run(_read_snapshots)

    def __enter__(self) -> Self:
        try:
            self.start().make_container()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


async def _create(container: ContainerClient) -> None:
    await container.create_container()


async def _delete(container: ContainerClient) -> None:
    await container.delete_container()


async def _read_snapshots(container: ContainerClient) -> list[Snapshot]:
    snapshots: list[Snapshot] = []
    async for blob in container.list_blobs():
        if "/checkpoint/" not in blob.name:
            continue
        download = await container.get_blob_client(blob.name).download_blob()
        snapshots.append(read_snapshot(await download.readall()))
    return snapshots
