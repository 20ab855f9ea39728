"""Speed and size of deliveries, as figures: ``python benchmarks/deliveries.py``.

Change seen to accepted by a local webhook, with a courier that has to be started and with one that
runs; the agent's resident size after the first ten changes and after a thousand; 20,000 deliveries
through one webhook, and the courier's resident size meanwhile.
"""

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

from _machine import Receiver, describe, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Webhook
from notbefore.core.outbox import Bounds
from notbefore.courier.orders import Orders
from notbefore.courier.supervisor import Supervisor
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import FUTURE, ME, body, item
from support.owner import Owner, serve

COLD = 15  # rounds
WARM = 60
INCARNATIONS = itertools.count(1)
NUMBERS = itertools.count(1)  # of events


def main() -> None:
    print(describe())
    latency()
    size()
    throughput(20_000)


@contextmanager
def running(receiver: Receiver) -> Iterator[tuple[Simulator, RunningAgent]]:
    """An agent with a webhook; nothing is listed."""
    sinks = {"hook": {"webhook": {"url": receiver.url, "allow_private": True}}}
    with tempfile.TemporaryDirectory() as directory, Simulator((ME,)) as imds:
        show(imds, 0)
        config = Path(directory) / "notbefore.yaml"
        config.write_text(json.dumps({"sinks": sinks}), encoding="utf-8")
        with RunningAgent(imds.endpoint, Path(directory) / "state", str(config)) as agent:
            time.sleep(3)  # what is done once at the start is over
            yield imds, agent


def show(imds: Simulator, events: int) -> None:
    """List so many new events, and nothing else."""
    items = [item(f"E-{next(NUMBERS)}", NotBefore=FUTURE) for _ in range(events)]
    imds.set_document(body(*items, incarnation=next(INCARNATIONS)))


def latency() -> None:
    receiver = Receiver()
    with running(receiver) as (imds, agent):
        delivered(imds, receiver)
        for what, rounds, bar in (("cold", COLD, "100 ms"), ("warm", WARM, "30 ms")):
            seconds = []
            for _ in range(rounds):
                if what == "cold":
                    end_courier(agent)
                seconds.append(delivered(imds, receiver))
            print(
                f"change seen -> accepted, {what} courier: p50"
                f" {statistics.median(seconds) * 1000:.0f} ms, max {max(seconds) * 1000:.0f} ms,"
                f" {len(seconds)} rounds (bar: p50 at most {bar})"
            )


def delivered(imds: Simulator, receiver: Receiver) -> float:
    """Announce an event, with which the one before is canceled.

    Seconds from its sight to a delivery.
    """
    before = len(receiver.taken)
    show(imds, 1)
    eventually(lambda: len(receiver.taken) > before)
    first = receiver.taken[before]
    time.sleep(0.3)  # until the other one has come
    return first.wall - datetime.fromisoformat(first.record["time"]).timestamp()


def end_courier(agent: RunningAgent) -> None:
    """A reload has it leave, in order."""
    courier = Path(f"/proc/{agent.courier()}")
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: not courier.exists())


def size() -> None:
    """A thousand changes, ten events at a time."""
    receiver = Receiver()
    with running(receiver) as (imds, agent):
        before = 0.0
        for step in range(1, 101):
            show(imds, 10 if step % 2 else 0)
            eventually(lambda: len(receiver.taken) >= 10 * step)  # noqa: B023 - of this round
            # with OpenSSL, which is loaded at the first change
            before = before or resident(agent.process.pid)
        time.sleep(3)
        after = resident(agent.process.pid)
        print(
            f"agent's resident size: {before:.1f} MiB after 10 changes, {after:.1f} after 1000"
            " (bar: the same)"
        )


def throughput(count: int) -> None:
    receiver = Receiver()
    owner = Owner(Bounds(10_000, 64 * 1024 * 1024))
    sinks = {"hook": SinkConfig(webhook=Webhook(url=Secret(receiver.url), allow_private=True))}
    couriers = Supervisor(Orders(sinks), owner)
    sizes = []
    seconds = 0.0
    for first in range(0, count, 5_000):
        owner.add(*(f"{number:032x}" for number in range(first, first + 5_000)), sink="hook")
        begun = time.perf_counter()
        serve([couriers], lambda: len(owner.results) >= first + 5_000, 300.0)  # noqa: B023 - of this round
        seconds += time.perf_counter() - begun
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        sizes.append(resident(children.split()[0]))
    couriers.stop(lambda _seconds: False)
    shown = ", ".join(f"{size:.1f}" for size in sizes)
    print(
        f"{count} deliveries: {count / seconds:.0f} a second (bar: 1500); courier's resident size"
        f" after each 5,000: {shown} MiB (bar: 30); received {len(receiver.taken)}"
    )


if __name__ == "__main__":
    main()
