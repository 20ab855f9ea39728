"""Speed and size of deliveries: ``python benchmarks/deliveries.py``; ``--help`` lists its options.

Printed:

- the time from a change to its acceptance by a local webhook, in ms: with a courier that must be
  started (cold), and with one that runs (warm)
- the agent's resident memory after ten changes and after all changes, in MiB
- deliveries a second through one webhook, and the courier's resident memory meanwhile, in MiB
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

from _machine import Receiver, describe, first_child, never_interrupted, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Webhook
from notbefore.core.outbox import OF_A_FLEET
from notbefore.courier.orders import Orders
from notbefore.courier.supervisor import Supervisor
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import FUTURE, ME, body, item
from support.owner import Owner, serve

COLD_LIMIT: Final = 500.0  # ms, of the median
WARM_LIMIT: Final = 30.0
SETTLE: Final = 3.0  # seconds in which an agent does what it does once
AT_A_TIME: Final = 10  # events listed or removed by one document, to measure the agent's memory
BATCH: Final = 5_000  # deliveries in the outbox at a time, to measure the throughput
PATIENCE: Final = 300.0  # seconds for each batch

incarnations = itertools.count(1)
event_numbers = itertools.count(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=60, help="changes to a warm courier, and a quarter to a cold"
    )
    parser.add_argument("--changes", type=int, default=1_000, help="changes for the agent's memory")
    parser.add_argument(
        "--deliveries", type=int, default=20_000, help="deliveries for the throughput"
    )
    options = parser.parse_args()

    print(describe())
    measure_latency(options.rounds)
    measure_size(options.changes)
    measure_throughput(options.deliveries)


@contextmanager
def running_agent(receiver: Receiver) -> Iterator[tuple[Simulator, RunningAgent]]:
    """Run an agent with a webhook and an IMDS that lists nothing."""
    sinks = {"hook": {"webhook": {"url": receiver.url, "allow_private": True}}}
    with tempfile.TemporaryDirectory() as directory, Simulator((ME,)) as imds:
        show(imds, 0)
        config = Path(directory) / "notbefore.yaml"
        config.write_text(json.dumps({"sinks": sinks}), encoding="utf-8")
        with RunningAgent(imds.endpoint, Path(directory) / "state", str(config)) as agent:
            time.sleep(SETTLE)
            yield imds, agent


def show(imds: Simulator, events: int) -> None:
    """List so many new events, and nothing else."""
    items = [item(f"E-{next(event_numbers)}", NotBefore=FUTURE) for _ in range(events)]
    imds.set_document(body(*items, incarnation=next(incarnations)))


# ---- latency


def measure_latency(rounds: int) -> None:
    """Measure the time from a change to its acceptance, with a cold and with a warm courier."""
    receiver = Receiver()
    with running_agent(receiver) as (imds, agent):
        latency(imds, receiver)

        cold: list[float] = []
        for _ in range(max(1, rounds // 4)):
            end_courier(agent)
            cold.append(latency(imds, receiver))
        print_latencies("cold", cold, COLD_LIMIT)

        warm = [latency(imds, receiver) for _ in range(rounds)]
        print_latencies("warm", warm, WARM_LIMIT)


def latency(imds: Simulator, receiver: Receiver) -> float:
    """Announce an event; return the milliseconds from the change to its acceptance.

    The event before it is canceled, so two deliveries arrive.
    """
    count = len(receiver.received)
    show(imds, 1)
    eventually(lambda: len(receiver.received) > count)
    first = receiver.received[count]
    time.sleep(0.3)  # until the other one has arrived
    changed = datetime.fromisoformat(first.record["time"]).timestamp()
    return (first.wall - changed) * 1000


def end_courier(agent: RunningAgent) -> None:
    """Reload the agent, which ends its courier, and wait for that."""
    courier = Path(f"/proc/{agent.courier()}")
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: not courier.exists())


def print_latencies(name: str, latencies: list[float], limit: float) -> None:
    print(
        f"from a change to its acceptance, {name} courier: median"
        f" {statistics.median(latencies):.0f} ms (limit: {limit:.0f} ms), at most"
        f" {max(latencies):.0f} ms, of {len(latencies)}",
        flush=True,
    )


# ---- size


def measure_size(changes: int) -> None:
    """Measure the agent's resident memory after its first changes and after many of them."""
    receiver = Receiver()
    with running_agent(receiver) as (imds, agent):
        # the first change loads OpenSSL
        show(imds, AT_A_TIME)
        wait_for(receiver, AT_A_TIME)
        before = resident(agent.process.pid)

        # announce and cancel in turn
        for step in range(2, changes // AT_A_TIME + 1):
            is_announcement = step % 2 == 1
            events = AT_A_TIME if is_announcement else 0
            show(imds, events)
            wait_for(receiver, AT_A_TIME * step)
        time.sleep(SETTLE)
        after = resident(agent.process.pid)
    print(
        f"agent's resident memory: {before:.1f} MiB after {AT_A_TIME} changes, {after:.1f} MiB"
        f" after {changes:,} (limit: about the same)",
        flush=True,
    )


def wait_for(receiver: Receiver, deliveries: int) -> None:
    """Wait until so many deliveries have arrived altogether."""
    eventually(lambda: len(receiver.received) >= deliveries)


# ---- throughput


def measure_throughput(deliveries: int) -> None:
    """Send many deliveries through one webhook, and measure the courier's memory meanwhile."""
    receiver = Receiver()
    owner = Owner(OF_A_FLEET)
    webhook = Webhook(url=Secret(receiver.url), allow_private=True)
    supervisor = Supervisor(Orders({"hook": SinkConfig(webhook=webhook)}), owner)
    sizes: list[str] = []
    seconds = 0.0
    for first in range(0, deliveries, BATCH):
        seconds += send_batch(owner, supervisor, first, min(first + BATCH, deliveries))
        size = resident(first_child(os.getpid()))
        sizes.append(f"{size:.1f}")
    supervisor.stop(never_interrupted)
    print(
        f"{deliveries:,} deliveries: {deliveries / seconds:,.0f} a second; courier's resident"
        f" memory after each {BATCH:,}: {', '.join(sizes)} MiB; received"
        f" {len(receiver.received):,}"
    )


def send_batch(owner: Owner, supervisor: Supervisor, first: int, end: int) -> float:
    """Send the deliveries with the numbers from ``first`` up to ``end``; return the seconds."""
    ids = [f"{number:032x}" for number in range(first, end)]
    owner.add(*ids, sink="hook")
    started = time.perf_counter()
    serve([supervisor], lambda: len(owner.results) >= end, PATIENCE)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
