"""Azure Event Hubs: each change as a CloudEvent; all that one group of VMs reports is in one partition, in order.

The aio client, with a deadline around every step: the sync one has none that holds, and its buffered mode has lost
messages. The SDK's own retries are off, since the outbox does the waiting; on any failure of the connection the client
is closed, and the next attempt makes a new one. A send whose answer is lost is sent again under the same id. What the
hub refuses is tried again as well, until it expires: a stream is to be whole once the key or the hub is right.
"""

import asyncio
from contextlib import suppress
from typing import Any, Final

from azure.eventhub import EventData, TransportType
from azure.eventhub.aio import EventHubProducerClient
from azure.eventhub.exceptions import OperationTimeoutError

from notbefore.config.sinks import EventHub, Messages
from notbefore.core.record import Heartbeat, Record, cloud_event, json_line, partition_key
from notbefore.courier.message import Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.errors import SendError

CLOSE_SECONDS: Final = 3.0
STRUCTURED: Final = "application/cloudevents+json"


class Sink(BaseSink):
    """One hub."""

    def __init__(self, _name: str, settings: EventHub, _messages: Messages) -> None:
        self._settings = settings
        self._runner = asyncio.Runner()
        self._client: EventHubProducerClient | None = None
        self._credential: Any = None  # where it is a token's

    def send(self, message: Message) -> Receipt:
        """Send one. Raises ``SendError``, a permanent one where it is too large for the hub."""
        self._runner.run(self._send(message))
        return Receipt()

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._drop())
        self._runner.close()

    # ---- inside the loop

    async def _send(self, message: Message) -> None:
        """Raises ``SendError``; the next attempt has a connection of its own."""
        try:
            async with asyncio.timeout(self._settings.timeout.seconds):
                await self._put(message)
        except SendError:
            raise
        except (TimeoutError, OperationTimeoutError):
            await self._drop()
            raise SendError("the hub did not answer in time") from None
        except Exception as error:  # noqa: BLE001 - the SDK raises many; each of them may pass
            await self._drop()
            raise SendError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None

    async def _put(self, message: Message) -> None:
        if self._client is None:
            self._open(self._settings)
        client: Any = self._client
        batch = await client.create_batch(partition_key=partition_key(message.content, message.event_key))
        try:
            batch.add(event_data(message, message.content))
        except ValueError:
            raise SendError("too large for the hub", permanent=True) from None
        await client.send_batch(batch)

    def _open(self, settings: EventHub) -> None:
        options = client_options(settings)
        if settings.connection_string is not None:
            text = settings.connection_string.reveal()
            self._client = EventHubProducerClient.from_connection_string(text, eventhub_name=settings.hub, **options)
        else:
            self._credential = make_credential(settings)
            where = settings.namespace or "", settings.hub or ""
            self._client = EventHubProducerClient(*where, self._credential, **options)

    async def _drop(self) -> None:
        for closing in (self._client, self._credential):
            if closing is not None:
                with suppress(Exception):  # it is broken already
                    await asyncio.wait_for(closing.close(), CLOSE_SECONDS)
        self._client = self._credential = None


def event_data(message: Message, record: Record | Heartbeat) -> EventData:
    """The change as a CloudEvent, with the envelope in the body."""
    values = record.flat() | {"notbefore.delivery.id": message.delivery_id}
    data = EventData(json_line(cloud_event(record, message.delivery_id, values)))
    data.content_type = STRUCTURED
    data.message_id = message.delivery_id
    return data


def client_options(settings: EventHub) -> dict[str, Any]:
    """What every client of the SDK is given for these settings: no retries, and the way to the hub."""
    options: dict[str, Any] = {
        "retry_total": 0,
        "retry_backoff_factor": 0,
        "auth_timeout": settings.timeout.seconds,
        "user_agent": "notbefore",
        "transport_type": TransportType.AmqpOverWebsocket if settings.transport == "websockets" else TransportType.Amqp,
        "connection_verify": settings.ca_file,
        "custom_endpoint_address": settings.endpoint,
    }
    # one that is None is not left out: with `connection_verify` each connection would load all authorities, 0.6 MiB
    return {name: value for name, value in options.items() if value is not None}


def make_credential(settings: EventHub) -> Any:
    """The identity that the settings name, for the SDK; it is to be closed."""
    from azure.identity.aio import (  # noqa: PLC0415 - 14 MB that a connection string does not need
        DefaultAzureCredential,
        ManagedIdentityCredential,
    )

    if settings.auth == "managed_identity":
        return ManagedIdentityCredential(client_id=settings.client_id)
    own = {"managed_identity_client_id": settings.client_id} if settings.client_id else {}
    return DefaultAzureCredential(**own)
