"""``RunningFleet`` runs ``notbefore fleet`` as a process; ``send`` sends records to its hub."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubProducerClient

from notbefore.core.cloud_event import partition_key
from notbefore.core.record import Heartbeat, Record
from support.agent import RunningAgent
from support.fleet_records import body
from support.hub import Hub


def send(hub: Hub, records: Iterable[Record | Heartbeat | bytes], key: str | None = None) -> None:
    """Send records in order.

    ``key``: the partition key of all; by default each record has the key that agents use.
    """
    groups: dict[str, list[bytes]] = {}
    for record in records:
        data = record if isinstance(record, bytes) else body(record)
        groups.setdefault(key or _key_of(record), []).append(data)
    asyncio.run(_send_groups(hub, groups))


def _key_of(record: Record | Heartbeat | bytes) -> str:
    """Return the partition key of a record; bytes count as of the scale set ``web``."""
    if isinstance(record, bytes):
        return "sub/rg/web"
    if isinstance(record, Record):
        return partition_key(record, record.event_id.casefold())
    return partition_key(record, record.vm_name or "")


async def _send_groups(hub: Hub, groups: dict[str, list[bytes]]) -> None:
    """Send the bodies of each partition key, in as many batches as they need."""
    async with EventHubProducerClient.from_connection_string(hub.connection_string()) as client:
        for key, bodies in groups.items():
            batch = await client.create_batch(partition_key=key)
            for data in bodies:
                try:
                    batch.add(EventData(data))
                except ValueError:  # the batch is full
                    await client.send_batch(batch)
                    batch = await client.create_batch(partition_key=key)
                    batch.add(EventData(data))
            await client.send_batch(batch)


def write_fleet_config(directory: Path, hub: Hub, sink: str, **fleet: Any) -> Path:
    """Write a configuration that reads ``hub`` and sends to the webhook at ``sink``.

    ``fleet``: further options of the section ``fleet``.
    """
    path = directory / "fleet.yaml"
    (directory / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
    values = {
        "fleet": {"hub": {"connection_string_file": "hub-key"}, **fleet},
        "sinks": {"hook": {"webhook": {"url": sink, "allow_private": True}}},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class RunningFleet(RunningAgent):
    """Runs ``notbefore fleet CONFIG``, with further words, and collects its log."""

    def __init__(self, config: Path, state: Path, *words: str) -> None:
        command = [sys.executable, "-m", "notbefore", "fleet", str(config), *words]
        self._start([*self.prefix(state), *command], state)
        self.read()
