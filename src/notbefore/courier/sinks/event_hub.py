"""Azure Event Hubs: each change as a CloudEvent.

All reports of one group of VMs are in one partition, in order.

It uses the aio client, with a deadline for every step: the sync client has no reliable deadline,
and its buffered mode has lost messages. The SDK's retries are off, as the outbox repeats attempts.
After any failure of the connection, the client is closed, and the next attempt makes a new one. If
an answer is lost, the change is sent again under the same id. A refused change is also tried again
until it expires, so that nothing is missing once the key or hub is corrected.
"""

import asyncio
import os
from contextlib import suppress
from typing import Any, Final

from azure.eventhub import EventData, TransportType
from azure.eventhub.aio import EventHubProducerClient
from azure.eventhub.exceptions import OperationTimeoutError

from notbefore.config.sinks import EventHub, Messages
from notbefore.core.cloud_event import cloud_event, partition_key
from notbefore.core.message import Message
from notbefore.core.record import Heartbeat, Record, json_line
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import SendError

CLOSE_SECONDS: Final = 3.0
IMDS: Final = "169.254.169.254"  # the SDK asks no other address for the token of a managed identity
STRUCTURED: Final = "application/cloudevents+json"


class Sink(BaseSink):
    """One hub."""

    def __init__(self, _name: str, settings: EventHub, _messages: Messages) -> None:
        self._settings = settings
        self._runner = asyncio.Runner()
        self._client: EventHubProducerClient | None = None
        self._credential: Any = None  # without a connection string

    def send(self, message: Message) -> Receipt:
        """Send one change.

        Raises ``SendError``, a permanent one if the change is too large for the hub.
        """
        self._runner.run(self._send(message))
        return Receipt()

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._drop())
        self._runner.close()

    # ---- inside the loop

    async def _send(self, message: Message) -> None:
        """Send within the timeout. Raises ``SendError``.

        Then the next attempt makes a new connection.
        """
        try:
            async with asyncio.timeout(self._settings.timeout.seconds):
                await self._put(message)
        except SendError:
            raise
        except (TimeoutError, OperationTimeoutError):
            await self._drop()
            raise SendError("the hub did not answer in time") from None
        except Exception as error:  # noqa: BLE001 - the SDK raises many errors; each may be temporary
            await self._drop()
            raise SendError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None

    async def _put(self, message: Message) -> None:
        if self._client is None:
            self._credential = make_credential(self._settings)
            self._client = make_client(
                EventHubProducerClient, self._settings, credential=self._credential
            )
        client: Any = self._client
        batch = await client.create_batch(
            partition_key=partition_key(message.content, message.event_key)
        )
        try:
            batch.add(event_data(message, message.content))
        except ValueError:
            raise SendError("too large for the hub", permanent=True) from None
        await client.send_batch(batch)

    async def _drop(self) -> None:
        for closing in (self._client, self._credential):
            if closing is not None:
                with suppress(Exception):  # it is broken already
                    await asyncio.wait_for(closing.close(), CLOSE_SECONDS)
        self._client = self._credential = None


def event_data(message: Message, record: Record | Heartbeat) -> EventData:
    """Return the change as a CloudEvent, with the envelope in the body."""
    values = record.flat() | {"notbefore.delivery.id": message.delivery_id}
    data = EventData(json_line(cloud_event(record, message.delivery_id, values)))
    data.content_type = STRUCTURED
    data.message_id = message.delivery_id
    return data


def make_client(kind: Any, settings: EventHub, *group: str, credential: Any, **options: Any) -> Any:
    """Make a client of the SDK, of the class ``kind``, without retries.

    ``group``: the consumer group of a reader.
    """
    options |= {
        "retry_total": 0,
        "retry_backoff_factor": 0,
        "auth_timeout": settings.timeout.seconds,
        "user_agent": "notbefore",
        "transport_type": (
            TransportType.AmqpOverWebsocket
            if settings.transport == "websockets"
            else TransportType.Amqp
        ),
        "connection_verify": settings.ca_file,
        "custom_endpoint_address": settings.endpoint,
    }
    # without None: with `connection_verify=None` each connection would load all certificate
    # authorities, 0.6 MiB
    options = {name: value for name, value in options.items() if value is not None}
    if settings.connection_string is not None:
        text = settings.connection_string.reveal()
        return kind.from_connection_string(text, *group, eventhub_name=settings.hub, **options)
    return kind(settings.namespace or "", settings.hub or "", *group, credential, **options)


def make_credential(settings: EventHub) -> Any:
    """Return the SDK's credential of the configured identity, which the caller must close.

    ``None`` for a key.
    """
    if settings.connection_string is not None:
        return None
    # else the SDK asks IMDS for the token through `HTTP_PROXY`, without encryption
    direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if direct != "*" and IMDS not in direct:
        os.environ["no_proxy"] = f"{direct},{IMDS}"
    from azure.identity.aio import (  # noqa: PLC0415 - 14 MB, not needed with a connection string
        DefaultAzureCredential,
        ManagedIdentityCredential,
    )

    if settings.auth == "managed_identity":
        return ManagedIdentityCredential(client_id=settings.client_id)
    own = {"managed_identity_client_id": settings.client_id} if settings.client_id else {}
    return DefaultAzureCredential(**own)
