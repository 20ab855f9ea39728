"""Losses and delays under faults: ``python benchmarks/kills.py [MODE ...]``.

``kills``, the default: the real agent and its courier are killed (SIGKILL) at random moments.
Meanwhile 20 scheduled events at a time come, start and go. The receiver fails, hangs, cuts
connections, or takes a delivery and answers that it did not. At the end, every change that the
agent ever recorded must have arrived. Each repetition must have the id of the first delivery.

``power-cut``: see ``_power_cut.py``. The other modes inflict one fault of the disk or of the state
file again and again: see ``_disk_faults.py``.

Printed: numbers of deliveries, and times in seconds. Exits with 1 if anything was lost, late or out
of order.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from _disk_faults import FAULTS, inflict
from _machine import add_names
from _power_cut import power_cut
from _scene import kill_often, out_of_order, prepared_scene, start, wait_for_agent

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.delivery import delivery_id
from support.agent import get, notbefore

KILL_PAUSE: Final = (0.02, 0.9)  # seconds between two kills, at least and at most
SETTLE: Final = 2.0  # seconds in which the agent sees the last list
DRAIN_PATIENCE: Final = 300.0  # seconds
COUNTED: Final = re.compile(r'(?m)^notbefore_deliveries_total\{result="(\w+)",sink="hook"\} (\d+)')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_names(parser, "modes", "MODE", ["kills", "power-cut", *FAULTS])
    parser.add_argument(
        "--kills", type=int, default=200, help="how often to kill (default 200; the claim is 2000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="how often to inflict each other fault (default 20)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    random.seed(options.seed)
    failed = False
    for mode in options.modes or ["kills"]:
        failed |= run(mode, options)
    sys.exit(failed)


def run(mode: str, options: argparse.Namespace) -> bool:
    """Run one mode; return whether anything was lost or late."""
    if mode == "kills":
        return kills(options.kills)
    if mode == "power-cut":
        return power_cut(options.rounds)
    return inflict(mode, options.rounds)


def kills(count: int) -> bool:
    """Compare the changes that the agent recorded with those that the receiver has.

    Returns whether anything was lost or out of order.
    """
    started = time.monotonic()
    with prepared_scene() as scene:
        scene.world.start()
        killed = kill_often(scene.command, count, KILL_PAUSE)
        scene.receiver.calm = True
        agent = start(scene.command)
        wait_for_agent(scene.port)
        time.sleep(SETTLE)
        scene.world.stop()
        time.sleep(SETTLE)
        drained = drain(scene.state)
        metrics = get(scene.port, "/metrics")[1].decode()
        agent.terminate()
        agent.wait(30)
        history = json_lines("history", "--state-dir", scene.state, "--since", "1d")
    seconds = time.monotonic() - started

    recorded: set[str] = set()
    for change in history:
        recorded.add(delivery_id(change["azure.scheduled_event.change_id"], "hook"))
    received = Counter(delivery.delivery_id for delivery in scene.receiver.received)
    lost = len(recorded - received.keys())
    unknown = len(received.keys() - recorded)
    swapped = out_of_order(scene.receiver.arrivals())
    repeated = received.total() - len(received)
    counts = dict(COUNTED.findall(metrics))
    print(
        f"kills: killed {dict(killed)} in {seconds:.0f} s; receiver {dict(scene.receiver.actions)}"
    )
    print(f"kills: {len(history)} changes recorded, {len(received)} received; counted {counts}")
    print(
        f"kills: LOST {lost} (limit: 0), events out of order {swapped} (limit: 0), with unknown ids"
        f" {unknown}, repeated {repeated}, all sent: {drained}"
    )
    return bool(lost or swapped or not drained)


def drain(state: Path) -> bool:
    """Retry all pending deliveries without pauses; return whether all of them succeeded."""
    deadline = time.monotonic() + DRAIN_PATIENCE
    pending = pending_deliveries(state)
    while pending:
        if time.monotonic() > deadline:
            return False
        # the command fails if a delivery has succeeded meanwhile
        notbefore("outbox", "retry", *pending, "--state-dir", state)
        time.sleep(3)
        pending = pending_deliveries(state)
    return True


def pending_deliveries(state: Path) -> list[str]:
    """Return the ids of the pending deliveries."""
    deliveries = json_lines("outbox", "list", "--state-dir", state)
    return [delivery["delivery_id"] for delivery in deliveries if delivery["state"] == "pending"]


def json_lines(*command: object) -> list[dict[str, Any]]:
    """Return what a command prints with ``--json``."""
    result = notbefore(*command, "--json")
    if result.returncode != 0:  # an empty list would hide losses
        raise SystemExit(result.stderr)
    return [json.loads(line) for line in result.stdout.splitlines()]


if __name__ == "__main__":
    main()
