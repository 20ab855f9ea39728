"""Whether anything is lost: ``python benchmarks/kills.py [--kills 2000]``.

The real agent and its courier are killed (SIGKILL) at random moments while 20 scheduled events at a time come, start
and go, and while the far side fails, hangs, cuts, and lies (takes a delivery and says that it did not). At the end
every change that the agent ever recorded must have arrived; each repetition must carry the id of the first.
"""

import argparse
import collections
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from notbefore.core.delivery import delivery_id
from notbefore.simulator.server import Simulator
from notbefore.store.history import read_history
from notbefore.store.outbox import Outbox
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.state_file import FILE_NAME

FLOWS = 20
FUTURE = "Fri, 01 Mar 2058 12:00:00 GMT"
PORT = 11_172


class Receiver(http.server.ThreadingHTTPServer):
    """The far side. ``moods`` are (weight, what it does); it notes what it has really taken, in order."""

    daemon_threads = True
    moods = (
        (60, "take"),
        (15, "fail"),
        (10, "take and say 500"),
        (5, "cut"),
        (5, "take and cut"),
        (3, "hang"),
        (2, "throttle"),
    )

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[tuple[str, str, str]] = []  # delivery id, event, kind
        self.answers: collections.Counter[str] = collections.Counter()
        self.calm = False

    def mood(self) -> str:
        names, weights = [name for _, name in self.moods], [weight for weight, _ in self.moods]
        return "take" if self.calm else random.choices(names, weights)[0]

    def handle_error(self, *_: Any) -> None:
        """Clients that are killed are what this is about."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        mood = self.server.mood()
        self.server.answers[mood] += 1
        if mood == "hang":
            time.sleep(1.5)
        if "take" in mood:
            values = json.loads(body)
            key = str(values["azure.scheduled_event.id"]).casefold()
            self.server.taken.append((self.headers["Idempotency-Key"], key, values["notbefore.delivery.kind"]))
        if mood in ("hang", "cut", "take and cut"):
            self.close_connection = True
            return
        self.send_response({"take": 200, "fail": 503, "throttle": 429}.get(mood, 500))
        if mood == "throttle":
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class World(threading.Thread):
    """Scheduled events that come, start and go: always 20 at a time, until told to stop."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(daemon=True)
        self._simulator = simulator
        self._over = threading.Event()
        self.begun = 0

    def run(self) -> None:
        listed: dict[str, str] = {}
        for incarnation in range(2, 10_000_000):
            if self._over.wait(random.uniform(0.2, 0.9)):
                break
            for event_id in random.sample(sorted(listed), min(2, len(listed))):
                if listed[event_id] == "Scheduled" and random.random() < 0.8:
                    listed[event_id] = "Started"
                else:
                    del listed[event_id]
            while len(listed) < FLOWS:
                self.begun += 1
                listed[f"E-{self.begun}"] = "Scheduled"
            self._show(listed, incarnation)
        self._show({}, 10_000_000)

    def _show(self, listed: dict[str, str], incarnation: int) -> None:
        events = [
            {
                "EventId": event_id,
                "EventStatus": status,
                "EventType": "Freeze",
                "ResourceType": "VirtualMachine",
                "Resources": ["WestNO_0"],
                "NotBefore": FUTURE if status == "Scheduled" else "",
            }
            for event_id, status in listed.items()
        ]
        document = {"DocumentIncarnation": incarnation, "Events": events}
        self._simulator.set_document(msgspec.json.encode(document))

    def stop(self) -> None:
        self._over.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how often to kill (default 200; the claim is 2000)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    receiver = Receiver()
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, Simulator(("WestNO_0",)) as simulator:
        config = Path(directory) / "notbefore.yaml"
        hook = {
            "url": f"http://127.0.0.1:{receiver.server_address[1]}/",
            "allow_private": True,
            "timeout": "1s",
            "expire_on_end": False,
        }
        config.write_text(json.dumps({"sinks": {"hook": {"webhook": hook}}}), encoding="utf-8")
        world = World(simulator)
        world.start()
        command = [sys.executable, "-m", "notbefore", "run", str(config), "--imds", simulator.endpoint]
        command += ["--state-dir", directory, "--listen", f"127.0.0.1:{PORT}"]
        killed = kill_often(command, options.kills)
        receiver.calm = True
        agent = start(command)
        time.sleep(2)
        world.stop()
        drained = drain(Path(directory) / FILE_NAME)
        agent.terminate()
        agent.wait(30)
        report(Path(directory) / FILE_NAME, receiver, killed)
        print(f"events {world.begun}, drained {drained}, {time.monotonic() - begun:.0f} s")


def start(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "error"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def kill_often(command: list[str], kills: int) -> collections.Counter[str]:
    """Kill now the agent, now the courier; what was killed how often."""
    killed: collections.Counter[str] = collections.Counter()
    agent = start(command)
    while killed.total() < kills:
        time.sleep(random.uniform(0.02, 0.9))
        if random.random() < 0.5:
            agent.kill()
            agent.wait()
            killed["agent"] += 1
            agent = start(command)
            continue
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        with suppress(OSError, IndexError, ValueError):
            os.kill(int(children.read_text(encoding="ascii").split()[0]), signal.SIGKILL)
            killed["courier"] += 1
    agent.kill()
    agent.wait()
    return killed


def drain(path: Path) -> bool:
    """Have what is left sent without further pauses; whether all of it went."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(1)
        with closing(Outbox(path)) as outbox:
            waiting = outbox.rows("pending")
            if not waiting:
                return True
            now = time.time()
            outbox.retry([one.delivery_id for one in waiting if one.due > now + 2], now, 86_400)
    return False


def report(path: Path, receiver: Receiver, killed: collections.Counter[str]) -> None:
    history = [msgspec.json.decode(row) for row in read_history(path, None, 1_000_000).records]
    expected = {delivery_id(change["azure.scheduled_event.change_id"], "hook") for change in history}
    taken = collections.Counter(found for found, _, _ in receiver.taken)
    reader = OutboxReader(path)
    reader.refresh()
    counts = {name: count for (_, name), count in reader.view.counts.items()}
    reader.close()
    first = dict.fromkeys((key, kind) for _, key, kind in receiver.taken)
    order: dict[str, list[str]] = {}
    for key, kind in first:
        order.setdefault(key, []).append(kind)
    rank = {"announced": 0, "started": 1, "canceled": 2, "finished": 2, "ended": 2}
    swapped = sum([rank[kind] for kind in kinds] != sorted(rank[kind] for kind in kinds) for kinds in order.values())
    print(f"killed {dict(killed)}; the far side's answers {dict(receiver.answers)}")
    print(f"changes recorded {len(history)}, deliveries taken {len(taken)}, counted {counts}")
    lost, unknown = len(expected - taken.keys()), len(taken.keys() - expected)
    print(f"LOST {lost} (bar: 0); unknown ids {unknown}; swapped {swapped}")
    print(f"repeated under the same id: {taken.total() - len(taken)}")


if __name__ == "__main__":
    main()
