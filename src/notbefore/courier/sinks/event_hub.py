"""Azure Event Hubs: each change as a CloudEvent; all that one group of VMs reports is in one partition, in order.

The aio client, with a deadline around every step: the sync one has none that holds, and its buffered mode has lost
messages. The SDK's own retries are off, since the outbox does the waiting; on any failure of the connection the client
is closed, and the next attempt makes a new one. A send whose answer is lost is sent again under the same id.
"""

import asyncio
import logging
import re
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from azure.eventhub import EventData, TransportType
from azure.eventhub.aio import EventHubProducerClient
from azure.eventhub.exceptions import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    EventDataSendError,
    EventHubError,
    OperationTimeoutError,
)

from notbefore.config.messages import Messages
from notbefore.config.sinks import EventHub
from notbefore.core.envelope import cloud_event, cut, partition_key
from notbefore.core.record import Heartbeat, Record, json_line
from notbefore.courier.http_status import error_of_status
from notbefore.courier.message import Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.errors import SendError

CLOSE_SECONDS: Final = 3.0
BUSY_SECONDS: Final = 4.0  # what Azure asks for when it says server-busy and gives no time
MAX_CAUSE: Final = 8_000  # characters
STRUCTURED: Final = "application/cloudevents+json"

# conditions of AMQP that a rejection names: https://learn.microsoft.com/azure/service-bus-messaging/service-bus-amqp-troubleshoot
BUSY: Final = {
    "com.microsoft:server-busy": "the hub is busy",
    "amqp:resource-limit-exceeded": "the hub's quota is exhausted",
}
PERMANENT: Final = (
    "amqp:unauthorized-access",
    "amqp:not-found",
    "amqp:not-allowed",
    "amqp:link:message-size-exceeded",
    "amqp:decode-error",
    "com.microsoft:entity-disabled",
    "com.microsoft:argument-error",
    "com.microsoft:argument-out-of-range",
)

log = logging.getLogger("notbefore.event_hub")


class Sink(BaseSink):
    """One hub."""

    def __init__(self, name: str, settings: EventHub, _messages: Messages) -> None:
        self._name = name
        self._settings = settings
        self._runner = asyncio.Runner()
        self._client: EventHubProducerClient | None = None
        self._credential: Any = None

    def send(self, message: Message) -> Receipt:
        """Send one, cut down where it is too large for the hub."""
        self._runner.run(self._within(self._send(message)))
        return Receipt()

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._drop())
        self._runner.close()

    # ---- inside the loop

    async def _within(self, step: Coroutine[Any, Any, None]) -> None:
        """Do it within the timeout; raises ``SendError``, and the next attempt has a connection of its own."""
        try:
            async with asyncio.timeout(self._settings.timeout.seconds):
                await step
        except SendError:
            raise
        except Exception as error:  # noqa: BLE001 - the SDK raises many; `outcome_of` sorts them
            await self._drop()
            raise outcome_of(error) from None

    async def _send(self, message: Message) -> None:
        client, content = self._open(), message.content
        batch = await client.create_batch(partition_key=partition_key(content, message.event_key))
        for one in (content, *(cut(content) if isinstance(content, Record) else ())):
            with suppress(ValueError):  # it is too large
                batch.add(event_data(message, one))
                break
        else:
            raise SendError("too large for the hub, even cut down", permanent=True)
        await client.send_batch(batch)

    def _open(self) -> EventHubProducerClient:
        if self._client is None:
            self._client, self._credential = make_client(self._settings)
        return self._client

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


def make_client(settings: EventHub) -> tuple[EventHubProducerClient, Any]:
    """A client that does not retry, and its credential where it is a token's."""
    options = client_options(settings)
    if settings.connection_string is not None:
        text = settings.connection_string.reveal()
        return EventHubProducerClient.from_connection_string(text, eventhub_name=settings.hub, **options), None
    credential = make_credential(settings)
    namespace = settings.namespace or ""
    return EventHubProducerClient(namespace, settings.hub or "", credential, **options), credential


def client_options(settings: EventHub) -> dict[str, Any]:
    """What every client of the SDK is given for these settings: no retries, and the way to the hub."""
    options: dict[str, Any] = {
        "retry_total": 0,
        "retry_backoff_factor": 0,
        "auth_timeout": settings.timeout.seconds,
        "user_agent": "notbefore",
        "transport_type": TransportType.AmqpOverWebsocket if settings.transport == "websockets" else TransportType.Amqp,
    }
    if settings.ca_file:
        options["connection_verify"] = settings.ca_file
    if settings.endpoint:
        options["custom_endpoint_address"] = settings.endpoint
    return options


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


# ---- what the SDK raises


def outcome_of(error: Exception) -> SendError:
    """The failure in words, and whether it is permanent."""
    cause = " ".join(str(error).split())[:MAX_CAUSE]
    if isinstance(error, TimeoutError | OperationTimeoutError):
        return SendError("the hub did not answer in time")
    if isinstance(error, AuthenticationError):
        return _by_status(cause)
    if isinstance(error, EventDataSendError | ConnectError | ConnectionLostError):
        return _by_condition(error, cause)
    of_token = type(error).__name__ in _NO_TOKEN or (isinstance(error, EventHubError) and "token" in cause.casefold())
    what = "no token could be obtained" if of_token else type(error).__name__
    return SendError(f"{what}: {cause}", permanent=isinstance(error, ValueError) and not of_token)


_NO_TOKEN: Final = ("ClientAuthenticationError", "CredentialUnavailableError")  # of azure-identity


def _by_status(cause: str) -> SendError:
    """A token was not accepted: permanently where ``$cbs`` says so; not where it fails, or the token has expired."""
    said = re.search(r"Status code: (\d{3})\b", cause)
    refused = error_of_status(int(said[1]), cause) if said is not None else None
    if said is None or refused is None or not refused.permanent:
        return SendError(f"the hub did not accept the token: {cause}")
    why = "there is no such hub" if said[1] == "404" else "the hub refuses the key or the identity"
    return SendError(f"{why}: {cause}", permanent=True)


def _by_condition(error: Exception, cause: str) -> SendError:
    text = f"{cause} {error.__cause__ or ''} {error.__context__ or ''}"
    condition = next((one for one in (*BUSY, *PERMANENT) if _names(text, one)), "")
    if condition in BUSY:
        return SendError(f"{BUSY[condition]}: {cause}", retry_after=BUSY_SECONDS)
    if condition and "expired" not in text.casefold():  # the next connection has another token
        return SendError(f"{condition}: {cause}", permanent=True)
    what = "refused" if isinstance(error, EventDataSendError) else "the hub cannot be reached"
    return SendError(f"{what}: {cause}")


def _names(text: str, condition: str) -> bool:
    """The SDK writes some conditions as the wire does, others as ``ErrorCondition.NotFound``."""
    camel = "".join(word.capitalize() for word in condition.rpartition(":")[2].split("-"))
    return condition in text or f"ErrorCondition.{camel}" in text
