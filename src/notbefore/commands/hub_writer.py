"""``HubWriter``: sends the messages of a simulated Event Grid to an Event Hub."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, Final, Self

from azure.eventhub import EventData
from azure.eventhub.aio import EventHubProducerClient

from notbefore.config.regular_file import open_file
from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub
from notbefore.courier.sinks.event_hub import make_client
from notbefore.errors import ConfigError
from notbefore.simulator.event_grid import EventGrid

MAX_CONNECTION: Final = 4_096  # bytes of a connection string
MAX_WAITING: Final = 10_000  # messages that wait for the hub; of more, the oldest are dropped
RETRY_AFTER: Final = 2.0  # seconds after a failure

log = logging.getLogger("notbefore.simulate")


class HubWriter:
    """The connection to a hub: a context manager, for one thread.

    ``settings``: the hub, with a connection string.
    """

    def __init__(self, settings: EventHub, event_grid: EventGrid) -> None:
        self._settings = settings
        self._event_grid = event_grid
        self._runner = asyncio.Runner()
        self._waiting: list[bytes] = []  # messages that the hub has not accepted, oldest first
        self._dropped = 0  # messages that were dropped since the last attempt
        self._not_before = 0.0  # monotonic seconds of the next attempt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def write_due(self) -> None:
        """Send what is due now; after a failure, log it, and try again later."""
        self._take_due()
        if not self._waiting or time.monotonic() < self._not_before:
            return

        try:
            self._runner.run(self._send())
        except Exception as error:  # noqa: BLE001 - the SDK raises many; each may be temporary
            log.warning("the hub did not accept messages: %s: %s", type(error).__name__, error)
            self._not_before = time.monotonic() + RETRY_AFTER

        if self._dropped:
            log.warning(
                "%d messages were dropped, the oldest ones: at most %d wait for the hub",
                self._dropped,
                MAX_WAITING,
            )
            self._dropped = 0

    def _take_due(self) -> None:
        """Take the messages that are due from Event Grid; drop the oldest of too many."""
        self._waiting += self._event_grid.due(time.time())
        excess = len(self._waiting) - MAX_WAITING
        if excess > 0:
            del self._waiting[:excess]
            self._dropped += excess

    async def _send(self) -> None:
        """Send all waiting messages, in batches as large as the hub allows."""
        client: Any = make_client(EventHubProducerClient, self._settings, credential=None)
        async with asyncio.timeout(self._settings.timeout.seconds), client:
            while self._waiting:
                batch = await client.create_batch(partition_key=self._event_grid.partition_key)
                count = 0
                for body in self._waiting:
                    try:
                        batch.add(EventData(body))
                    except ValueError:  # the batch is full
                        break
                    count += 1
                await client.send_batch(batch)
                del self._waiting[:count]


def make_hub_writer(path: Path, event_grid: EventGrid) -> HubWriter:
    """Return the writer to the hub whose connection string is in a file.

    Raises ``ConfigError``.
    """
    try:
        with open_file(path) as file:
            text = file.read(MAX_CONNECTION).decode().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--event-grid: {path} cannot be read: {error}") from None
    if "EntityPath=" not in text:
        raise ConfigError(
            f"--event-grid: {path} has no connection string with `EntityPath=`, the name of a hub:"
            " copy that of the hub, not that of its namespace"
        )
    settings = EventHub(connection_string=Secret(text))
    return HubWriter(settings, event_grid)
