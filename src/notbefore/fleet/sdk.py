"""The Event Hubs SDK: a client without retries, and all uses of the SDK's private attributes.

The attributes are those of azure-eventhub 5.15.1; a test fails if they have changed.
"""

import ssl
from typing import Any, Final

import certifi
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from azure.eventhub.amqp import AmqpMessageBodyType

from notbefore.config.model import FleetConfig
from notbefore.courier.sinks.event_hub import make_client
from notbefore.fleet.snapshot import Position
from notbefore.fleet.snapshot_store import Snapshots

READ_IN: Final = "5.15.1"  # the version of azure-eventhub in which the private attributes were read


def make_consumer(
    config: FleetConfig, credential: Any, snapshots: Snapshots
) -> EventHubConsumerClient:
    """Make a client without retries.

    ``snapshots`` are those of its hub and consumer group from now on.
    """
    context = None
    if config.hub.ca_file is None:
        # shared by all connections: else the SDK loads the root certificates for each (20 ms, 0.5
        # MB)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certifi.where())
    client: EventHubConsumerClient = make_client(
        EventHubConsumerClient,
        config.hub,
        config.consumer_group,
        credential=credential,
        ssl_context=context,
        checkpoint_store=snapshots,
        load_balancing_interval=config.rebalance.seconds,
        partition_ownership_expiration_interval=config.takeover.seconds,
    )
    namespace = str(client._address.hostname)  # noqa: SLF001 - the SDK's name for it in the checkpoint store
    snapshots.belong_to(namespace, client.eventhub_name, config.consumer_group)
    return client


def forget_tags(client: Any, context: PartitionContext) -> None:
    """Delete the delivery tags of a partition's records, which the SDK keeps to settle each record
    later.

    No record of Event Hubs is ever settled, so the tags need 100 bytes for each
    (``_pyamqp/aio/_receiver_async.py``).
    """
    for processor in client._event_processors.values():  # noqa: SLF001 - there is no other way to them
        consumer = processor._consumers.get(context.partition_id)  # noqa: SLF001
        if (
            consumer is not None
            and consumer._handler is not None  # noqa: SLF001
            and consumer._handler._link is not None  # noqa: SLF001
        ):
            consumer._handler._link._received_delivery_tags.clear()  # noqa: SLF001


def record_of(event: EventData) -> tuple[bytes, Position]:
    """Return the body and the position of a record, as the fold takes them."""
    # other products send other types
    octets: Any = event.body if event.body_type is AmqpMessageBodyType.DATA else ()
    enqueued = event.enqueued_time
    position = Position(
        str(event.offset), event.sequence_number or 0, enqueued.timestamp() if enqueued else 0.0
    )
    return b"".join(octets), position
