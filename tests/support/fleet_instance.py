"""``notbefore fleet`` as a process, and what VMs' agents would send to its hub."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubProducerClient

from notbefore.core.change import Change, ChangeKind, Gap, Outcome, change_id
from notbefore.core.document import Event
from notbefore.core.record import Heartbeat, Record, Vm, cloud_event, json_line, partition_key
from support.agent import RunningAgent, free_port
from support.hub import Hub

OUTCOMES: dict[str, Outcome] = {"canceled": "canceled", "finished": "finished", "ended": "unknown"}


def vm(name: str, scale_set: str = "web", region: str = "westeurope") -> Vm:
    return Vm(
        name=name, vm_id=f"id-{name}", subscription_id="sub", resource_group="rg", location=region, scale_set=scale_set
    )


def report(  # noqa: PLR0913 - a change has many sides
    who: Vm,
    kind: ChangeKind,
    event_id: str = "EVENT-1",
    *,
    at: datetime | None = None,
    resources: Sequence[str] | None = None,
    event_type: str = "Reboot",
    notice: float = 900.0,
    **changed: Any,
) -> Record:
    """What the agent of a VM makes of a step."""
    at = at or datetime.now(UTC)
    resources = (who.name,) if resources is None else tuple(resources)
    not_before = changed.pop("not_before", None) or at + timedelta(seconds=notice)
    event = Event(
        event_id=event_id,
        event_type=event_type,
        event_status="Started" if kind in ("started", "finished") else "Scheduled",
        resource_type="VirtualMachine",
        resources=resources,
        not_before=None if kind in ("started", "finished") else not_before,
        event_source="Platform",
        duration=9,
    )
    own = who.name in resources
    change = Change(
        id=changed.pop("id", change_id(event.key, kind, event.digest() if kind == "updated" else "", 0)),
        kind=kind,
        reason=changed.pop("reason", "first_seen_scheduled"),
        time=at,
        event=event,
        scope="self" if own else "peer",
        incarnation=1,
        first_seen=changed.pop("first_seen", at),
        outcome=OUTCOMES.get(kind),
        not_before=not_before,
        notice_seconds=notice if kind == "announced" else None,
        started_seconds=changed.pop("started_seconds", None),
        interruption=Gap(*(changed.pop("interruption"),) * 2) if "interruption" in changed else None,
    )
    assert not changed, changed
    return Record.of(change, who)


def body(record: Record | Heartbeat, number: int = 0) -> bytes:
    """The record as the sink `event_hub` sends it."""
    return json_line(cloud_event(record, f"delivery-{number}", record.flat()))


def send(hub: Hub, records: Iterable[Record | Heartbeat | bytes], key: str | None = None) -> None:
    """Send them as agents would, each to the partition of its group, in order."""

    async def run() -> None:
        async with EventHubProducerClient.from_connection_string(hub.connection_string()) as client:
            groups: dict[str, list[bytes]] = {}
            for one in records:
                if isinstance(one, bytes):
                    groups.setdefault(key or "sub/rg/web", []).append(one)
                else:
                    own = one.event_id.casefold() if isinstance(one, Record) else one.vm_name or ""
                    groups.setdefault(key or partition_key(one, own), []).append(body(one))
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


def configured(directory: Path, hub: Hub, sink: str, **fleet: Any) -> Path:
    """A configuration that reads ``hub`` and sends to the webhook at ``sink``."""
    path = directory / "fleet.yaml"
    (directory / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
    values = {
        "fleet": {"hub": {"connection_string_file": "hub-key"}, **fleet},
        "sinks": {"hook": {"webhook": {"url": sink, "allow_private": True}}},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class RunningFleet(RunningAgent):
    """``notbefore fleet CONFIG``."""

    def __init__(self, config: Path, state: Path) -> None:  # it does not watch an IMDS
        self.port = free_port()
        self.state = state
        self.records: list[dict[str, Any]] = []
        self.log = ""
        command = [sys.executable, "-m", "notbefore", "fleet", str(config), "--state-dir", str(state)]
        self.process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{self.port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
        )
        self._readers = [threading.Thread(target=self._read_records), threading.Thread(target=self._read_log)]
        for reader in self._readers:
            reader.start()
