"""The Event Hubs SDK: a client without retries, and the only use of its private attributes.

They are those of ``READ_IN``. A test fails if they have changed, or if another version is
installed.
"""

import ssl
from typing import Any, Final
from urllib.parse import urlsplit

import certifi
from azure.core.utils import parse_connection_string
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from azure.eventhub.amqp import AmqpMessageBodyType

from notbefore.config.model import FleetConfig
from notbefore.config.sinks import EventHub
from notbefore.courier.sinks.event_hub import make_client
from notbefore.fleet.snapshot import Position
from notbefore.fleet.snapshot_store import Snapshots

READ_IN: Final = "5.15.1"  # the version of azure-eventhub in which the private attributes were read


def make_consumer(
    config: FleetConfig, credential: Any, snapshots: Snapshots
) -> EventHubConsumerClient:
    """Make a client without retries.

    ``snapshots``: the store, which belongs to this hub and consumer group from now on.
    """
    client: EventHubConsumerClient = make_client(
        EventHubConsumerClient,
        config.hub,
        config.consumer_group,
        credential=credential,
        ssl_context=_ssl_context(config.hub),
        checkpoint_store=snapshots,
        load_balancing_interval=config.rebalance.seconds,
        partition_ownership_expiration_interval=config.takeover.seconds,
    )
    snapshots.belong_to(namespace_of(config.hub), client.eventhub_name, config.consumer_group)
    return client


def namespace_of(hub: EventHub) -> str:
    """Return the host name of a hub's namespace, as the SDK passes it to the checkpoint store."""
    if hub.connection_string is None:
        return hub.namespace or ""
    values = parse_connection_string(hub.connection_string.reveal())
    return urlsplit(values["endpoint"]).netloc


def _ssl_context(hub: EventHub) -> ssl.SSLContext | None:
    """Return a context that all connections share, unless the SDK has to make one of ``ca_file``.

    Without it, the SDK loads the root certificates for each connection (20 ms, 0.5 MB).
    """
    if hub.ca_file is not None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certifi.where())
    return context


def forget_tags(client: Any, context: PartitionContext) -> None:
    """Delete the delivery tags of a partition's records.

    The SDK keeps them to settle each record later, 100 bytes for each
    (``_pyamqp/aio/_receiver_async.py``). No record of Event Hubs is ever settled.
    """
    for processor in client._event_processors.values():  # noqa: SLF001 - there is no public way
        consumer = processor._consumers.get(context.partition_id)  # noqa: SLF001
        link = _link_of(consumer)
        if link is not None:
            link._received_delivery_tags.clear()  # noqa: SLF001 - as above


def _link_of(consumer: Any) -> Any:
    """Return the link of a partition's consumer; ``None`` if it is not open."""
    if consumer is None or consumer._handler is None:  # noqa: SLF001 - as above
        return None
    return consumer._handler._link  # noqa: SLF001 - as above


def record_of(event: EventData) -> tuple[bytes, Position]:
    """Return the body and the position of a record, as the fold takes them."""
    body = b""
    if event.body_type is AmqpMessageBodyType.DATA:  # other products send other types
        octets: Any = event.body
        body = b"".join(octets)

    enqueued = 0.0
    if event.enqueued_time is not None:
        enqueued = event.enqueued_time.timestamp()
    return body, Position(str(event.offset), event.sequence_number or 0, enqueued)
