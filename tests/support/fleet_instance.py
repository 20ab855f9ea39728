"""``RunningFleet``: ``notbefore fleet`` as a process; ``send`` fills its hub as agents do."""

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
    """Send records in order, each to the partition of its group as agents do."""

    async def run() -> None:
        async with EventHubProducerClient.from_connection_string(hub.connection_string()) as client:
            groups: dict[str, list[bytes]] = {}
            for record in records:
                if isinstance(record, bytes):
                    groups.setdefault(key or "sub/rg/web", []).append(record)
                else:
                    own = (
                        record.event_id.casefold()
                        if isinstance(record, Record)
                        else record.vm_name or ""
                    )
                    groups.setdefault(key or partition_key(record, own), []).append(body(record))
            for name, bodies in groups.items():
                batch = await client.create_batch(partition_key=name)
                for data in bodies:
                    try:
                        batch.add(EventData(data))
                    except ValueError:
                        await client.send_batch(batch)
                        batch = await client.create_batch(partition_key=name)
                        batch.add(EventData(data))
                await client.send_batch(batch)

    asyncio.run(run())


def write_fleet_config(directory: Path, hub: Hub, sink: str, **fleet: Any) -> Path:
    """Write a configuration that reads ``hub`` and sends to the webhook at ``sink``."""
    path = directory / "fleet.yaml"
    (directory / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
    values = {
        "fleet": {"hub": {"connection_string_file": "hub-key"}, **fleet},
        "sinks": {"hook": {"webhook": {"url": sink, "allow_private": True}}},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class RunningFleet(RunningAgent):
    """``notbefore fleet CONFIG``, with further options."""

    def __init__(self, config: Path, state: Path, *words: str) -> None:  # it watches no IMDS
        command = [sys.executable, "-m", "notbefore", "fleet", str(config), *words]
        self._start([*self.prefix(state), *command], state)
        self.read()
