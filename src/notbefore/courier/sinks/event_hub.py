"""Azure Event Hubs: each change as a CloudEvent.

All reports of one group of VMs are in one partition, in order.

The sink uses the asynchronous client, with a deadline for every step: the synchronous client has no
reliable deadline, and its buffered mode has lost messages. The SDK's retries are off, because the
outbox repeats attempts. After any failure of the connection, the client is closed, and the next
attempt makes a new one. If an answer is lost, the change is sent again under the same id. A refused
change is also tried again until it expires, so that nothing is missing after the key or the hub is
corrected.
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
from notbefore.net.streams import StreamsLoop, abort_streams

CLOSE_SECONDS: Final = 3.0
IMDS_HOST: Final = "169.254.169.254"  # the SDK asks no other for the token of a managed identity
STRUCTURED: Final = "application/cloudevents+json"


class Sink(BaseSink):
    """One hub."""

    def __init__(self, _name: str, settings: EventHub, _messages: Messages) -> None:
        self._settings = settings
        self._runner = asyncio.Runner(loop_factory=StreamsLoop)
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
        """Send within the timeout. Raises ``SendError``; then the next attempt connects again."""
        try:
            async with asyncio.timeout(self._settings.timeout.seconds):
                await self._put(message)
        except SendError:
            raise
        except (TimeoutError, OperationTimeoutError):
            await self._drop()
            raise SendError("the hub did not answer in time") from None
        except Exception as error:  # noqa: BLE001 - the SDK raises many; each may be temporary
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
        """Close the connection, and let the next attempt make a new one."""
        for closable in (self._client, self._credential):
            if closable is not None:
                with suppress(Exception):  # it is broken already
                    await asyncio.wait_for(closable.close(), CLOSE_SECONDS)
        await abort_streams()
        self._client = None
        self._credential = None


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
        "transport_type": TransportType.Amqp,
    }
    if settings.transport == "websockets":
        options["transport_type"] = TransportType.AmqpOverWebsocket
    if settings.ca_file is not None:
        # with `connection_verify=None`, each connection loads all authorities, 0.6 MiB
        options["connection_verify"] = settings.ca_file
    if settings.endpoint is not None:
        options["custom_endpoint_address"] = settings.endpoint
    if settings.connection_string is not None:
        text = settings.connection_string.reveal()
        return kind.from_connection_string(text, *group, eventhub_name=settings.hub, **options)
    return kind(settings.namespace or "", settings.hub or "", *group, credential, **options)


def make_credential(settings: EventHub) -> Any:
    """Return the SDK's credential of the configured identity, which the caller must close.

    ``None`` if there is a connection string.
    """
    if settings.connection_string is not None:
        return None
    keep_proxy_from_tokens()
    from azure.identity.aio import (  # noqa: PLC0415 - 14 MB, not needed with a connection string
        DefaultAzureCredential,
        ManagedIdentityCredential,
    )

    if settings.auth == "managed_identity":
        return ManagedIdentityCredential(client_id=settings.client_id)
    if settings.client_id:
        return DefaultAzureCredential(managed_identity_client_id=settings.client_id)
    return DefaultAzureCredential()


def keep_proxy_from_tokens() -> None:
    """Let the SDK ask IMDS for tokens directly, not through `HTTP_PROXY`, without encryption."""
    direct_hosts = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if direct_hosts != "*" and IMDS_HOST not in direct_hosts:
        os.environ["no_proxy"] = f"{direct_hosts},{IMDS_HOST}"
