"""Event Hubs under fire: ``python benchmarks/hub.py [--changes 100000] [--kills 20]``.

The changes of 200 VMs go through four couriers into the tests' AMQP peer, which is killed and restarted meanwhile. At
the end every change must be in its log, each event in one partition and in order; repetitions only under the same id.
"""

import argparse
import collections
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from _machine import describe, resident

from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub, SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import Bounds
from notbefore.courier.orders import Orders
from notbefore.courier.supervisor import CourierManager

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.hub import Hub
from support.owner import Owner, serve

VMS, COURIERS, KINDS = 200, 4, ("announced", "started", "finished")
ROOM = 8_000  # rows that wait in an outbox at most


class Lane:
    """One courier with its outbox, and what is still to be put into it."""

    def __init__(self, hub: Hub, rows: list[Delivery]) -> None:
        self.owner = Owner(Bounds(ROOM, 64 * 1024 * 1024))
        config = SinkConfig(event_hub=EventHub(connection_string=Secret(hub.connection_string())))
        self.couriers = CourierManager(Orders({"hub": config}, log_level="error"), self.owner, lambda: None)
        self._rows = iter(rows)
        self.done = False

    def feed(self) -> None:
        """Fill the outbox up."""
        waiting = len(self.owner.left)
        new = list(itertools.islice(self._rows, max(0, ROOM - waiting)))
        if new:
            self.owner.outbox.put(new, self.owner.now, time.time())
            self.couriers.wake()
        self.done = not new and not waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as name, Hub(Path(name)) as hub:
        rows = changes(options.changes)
        lanes = [Lane(hub, share(rows, number)) for number in range(COURIERS)]
        couriers = [lane.couriers for lane in lanes]
        begun, killed, largest = time.monotonic(), 0, 0.0
        while not all(lane.done for lane in lanes):
            for lane in lanes:
                lane.feed()
            serve_for(couriers, 1.0)
            largest = max([largest, *map(resident, children())])
            left = sum(len(lane.owner.left) for lane in lanes)
            if killed < options.kills and left:
                hub.kill()
                serve_for(couriers, 0.3)
                hub.start()
                killed += 1
                serve_for(couriers, 2.0)
        seconds = time.monotonic() - begun
        for one in couriers:
            one.stop(lambda _seconds: False)
        report(hub, rows, killed)
        print(f"{len(rows) / seconds:.0f} changes a second over {seconds:.0f} s")
        print(f"courier's resident size with a hub: {largest:.1f} MiB at most (bar: 60)")


def serve_for(couriers: list[CourierManager], seconds: float) -> None:
    end = time.monotonic() + seconds
    serve(couriers, lambda: time.monotonic() > end)


def children() -> list[int]:
    return [int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()]


def changes(count: int) -> list[Delivery]:
    """Three changes an event; the events of all VMs, one after the other."""
    now, found = time.time(), list[Delivery]()
    for number in range(count // len(KINDS) + 1):
        vm, event = number % VMS, f"event-{number}"
        for kind in KINDS:
            record = {
                "time": "2026-01-01T00:00:00.000Z",
                "event.name": f"azure.scheduled_event.{kind}",
                "azure.scheduled_event.id": event,
                "azure.scheduled_event.type": "Freeze",
                "azure.scheduled_event.status": "Scheduled",
                "azure.scheduled_event.scope": "self",
                "azure.scheduled_event.resources": [f"vm-{vm}"],
                "azure.scheduled_event.reason": "first_seen_scheduled",
                "azure.scheduled_event.incarnation": 1,
                "azure.scheduled_event.first_seen": "2026-01-01T00:00:00.000Z",
                "azure.scheduled_event.change": kind,
                "azure.scheduled_event.change_id": f"{event}-{kind}",
                "host.name": f"vm-{vm}",
                "body": "x" * 400,
            }
            line = json.dumps(record).encode()
            made = Delivery(f"{event}-{kind}", event, "hub", kind, "info", now, now, now + 86_400, False, line)  # type: ignore[arg-type] # noqa: FBT003
            found.append(made)
    return found


def share(rows: list[Delivery], lane: int) -> list[Delivery]:
    """A lane has all of an event."""
    return [row for at, row in enumerate(rows) if at // len(KINDS) % COURIERS == lane]


def report(hub: Hub, rows: list[Delivery], killed: int) -> None:
    stored = hub.stored
    times = collections.Counter(one.envelope["id"] for one in stored)
    partitions: dict[str, set[int]] = {}
    order: dict[str, list[str]] = {}
    for one in stored:
        envelope = one.envelope
        partitions.setdefault(envelope["subject"], set()).add(one.partition)
        kind = envelope["type"].split(".")[2]
        if kind not in order.setdefault(envelope["subject"], []):
            order[envelope["subject"]].append(kind)
    lost = sum(row.delivery_id not in times for row in rows)
    swapped = sum(kinds != list(KINDS)[: len(kinds)] for kinds in order.values())
    split = sum(len(found) > 1 for found in partitions.values())
    print(f"{len(rows)} changes of {VMS} VMs, the hub killed {killed} times")
    print(f"LOST {lost} (bar: 0); events out of order {swapped}; in more than one partition {split}")
    print(f"repeated under the same id: {len(stored) - len(times)}")


if __name__ == "__main__":
    main()
