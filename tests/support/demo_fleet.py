"""``make demo-fleet``: 200 VMs in six scale sets, an Event Hub and instances of ``notbefore fleet``.

The hub is the one that the tests use, and the VMs are simulated; what is notified comes from real instances over a real
webhook. Checkpoints are in files, so the second instance is started when the first one is gone: several at a time need
Blob Storage.
"""

import http.client
import http.server
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from notbefore.commands.client import AgentClient
from notbefore.commands.demo import start_agent
from notbefore.commands.fleet_events import OF_FLEET
from notbefore.commands.fleet_report import show as show_report
from notbefore.commands.tables import show_listing
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.errors import NotBeforeError
from notbefore.fleet.history import History, read_past
from notbefore.fleet.report import Report
from support.fleet_maintenance import Maintenance, heartbeats, maintenance, message, scale_set
from support.hub import Hub
from support.needs import NEEDS, is_here

SETS: Final = {"web": 40, "data": 40, "batch": 30, "cache": 30, "queue": 30, "front": 30}
SILENT: Final = ("data_3", "data_17")
HEARTBEAT_INTERVAL: Final = 4.0  # seconds between two heartbeats of a VM
PROMISED_INTERVAL: Final = 20.0  # what they say that it is: a slow machine, which sends them late, makes nobody silent
NOTICE: Final = 10.0  # seconds; of the last event 20 more
AT_A_TIME: Final = 8  # VMs that one event of the maintenance affects
PATIENCE: Final = 120.0  # seconds for one step: a machine may be slow
SETTINGS: Final = {
    "group_by": [
        "subscription",
        "resource_group",
        "scale_set",
        "event_type",
    ],  # of one scale set
    "group_wait": "2s",
    "group_interval": "5s",
}


def run_demo(*, keep: bool) -> int:
    """Play; returns 0 if everything came as expected. Raises ``NotBeforeError`` when something does not start."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notbefore-demo-")))
        show = _Show(directory, stack)
        try:
            complete = show.play()
            if keep:
                show.stay()
        except KeyboardInterrupt:
            return 0
    return 0 if complete else 1


class _Show:
    """The hub, the VMs, the receiver and the instances; prints what happens, as it happens."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._begun = time.monotonic()
        self._directory, self._stack = directory, stack
        self._notified: queue.Queue[Record] = queue.Queue()
        self._seen: list[tuple[str, str]] = []  # type and change of each notification
        self._connection = stack.enter_context(Hub(directory)).connection_string()
        self._listen = f"127.0.0.1:{_start_receiver(self._notified, stack)}"
        self._vms = Vms(self._connection, stack)
        self._config = directory / "fleet.yml"
        (directory / "hub-key").write_text(self._connection, encoding="utf-8")
        sink = {"webhook": {"url": f"http://{self._listen}/", "allow_private": True}}
        hub = {"connection_string_file": "hub-key"}
        values = {"fleet": {"hub": hub, **SETTINGS}, "sinks": {"oncall": sink}, "log": {"level": "error"}}
        self._config.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        self._instance, self._client = self._start_instance()

    def play(self) -> bool:
        """Run the script; returns whether all that was expected has come."""
        vms = self._vms
        self._say(f"{len(vms.all)} VMs in {len(SETS)} scale sets send their heartbeats to a simulated Event Hub;")
        self._say(f"an instance of `notbefore fleet` reads them: {self._client.url}/ in a browser\n")
        self._wait(lambda: self._ask()["heard"] == len(vms.all), "not every VM was heard from")
        vms.silence(SILENT)
        self._say(f"-- two VMs stop sending heartbeats: {', '.join(SILENT)}")
        web = [vm for vm in vms.all if vm.scale_set == "web"]
        wave = maintenance(web, AT_A_TIME, datetime.now(UTC), NOTICE)
        self._say(
            f"-- a maintenance of the scale set web is announced: {len(wave)} events, and {len(web)} VMs see each"
        )
        vms.report(web, wave, "announced")
        self._expect("Freeze", "announced")
        show_listing(OF_FLEET, self._ask(), sys.stdout)
        for number, event in enumerate(wave):
            if number == len(wave) // 2:
                self._take_over()
            self._let_pass((event.not_before - datetime.now(UTC)).total_seconds())
            self._say(f"-- {event.resources[0]} to {event.resources[-1]} are paused for {event.interruption:.0f} s")
            vms.report(web, [event], "started")
            self._let_pass(event.interruption)
            vms.report(web, [event], "finished")
        self._expect("Freeze", "finished")
        self._expect("Silent", "started")
        return self._conclude()

    def _take_over(self) -> None:
        self._say("-- the instance is killed, in the middle of the wave")
        self._instance.kill()
        self._instance.wait()
        self._instance, self._client = self._start_instance()
        self._say(f"   another one goes on from its snapshot: {self._client.url}/")
        self._say(
            "   (the snapshot is a file here; in Blob Storage, the other instance would have been running already)"
        )

    def _conclude(self) -> bool:
        self._drain(2.0)
        waves = self._seen.count(("Freeze", "announced"))
        self._say(f"\n{self._vms.sent} records of events went in, {len(self._seen)} notifications came out.")
        now = datetime.now(UTC)
        history = History(self._directory / "state")
        since = now - timedelta(seconds=time.monotonic() - self._begun)
        report = Report.of(read_past(history.past(since.timestamp(), now.timestamp())), since, now)
        self._say("\nnotbefore fleet report:")
        show_report(report)
        complete = waves == 1 and len(report.events) == SETS["web"] // AT_A_TIME and ("Silent", "started") in self._seen
        self._say("\nThe demo is complete." if complete else "\nSomething was expected that did not come: see above.")
        return complete

    def stay(self) -> None:
        """Go on until Ctrl-C."""
        self._say(f"Still running: {self._client.url}/ and {self._client.url}/metrics. Ctrl-C ends it.")
        while self._instance.poll() is None:
            self._drain(1.0)

    def _start_instance(self) -> tuple[subprocess.Popen[Any], AgentClient]:
        words = ["fleet", str(self._config), "--state-dir", str(self._directory / "state"), "--listen"]
        return start_agent(lambda listen: _start(self._stack, *words, listen), PATIENCE)

    def _ask(self) -> dict[str, Any]:
        return self._client.ask(OF_FLEET.path)

    def _wait(self, look: Callable[[], object], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            with suppress(NotBeforeError):
                if look():
                    return
            if time.monotonic() > deadline or self._instance.poll() is not None:
                raise NotBeforeError(otherwise)
            time.sleep(0.1)

    def _expect(self, event_type: str, change: str) -> None:
        """Show the notifications that come, until this one has."""
        deadline = time.monotonic() + PATIENCE
        while (event_type, change) not in self._seen and time.monotonic() < deadline:
            self._drain(0.2)

    def _let_pass(self, seconds: float) -> None:
        """Show the notifications that come meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._drain(min(left, 0.2))

    def _drain(self, patience: float) -> None:
        with suppress(queue.Empty):
            while True:
                record = self._notified.get(timeout=patience)
                self._seen.append((record.event_type, record.change))
                by = f" (reported by {record.fleet_reported_by} VMs)" if record.fleet_reported_by else ""
                self._say(f"   notification {len(self._seen)}: {record.body}{by}")

    def _say(self, text: str) -> None:
        lead = f"{time.monotonic() - self._begun:5.1f}s  " if text.startswith(("--", "   ")) else ""
        sys.stdout.write(f"{lead}{text}\n")
        sys.stdout.flush()


class Vms:
    """The simulated VMs: they send heartbeats from a thread, and reports when ``report`` is called."""

    def __init__(self, connection: str, stack: ExitStack) -> None:
        from azure.eventhub import EventHubProducerClient  # noqa: PLC0415 - only the demo of a fleet needs it

        self.all: list[Vm] = [vm for name, count in SETS.items() for vm in scale_set(name, count)]
        self.sent = 0  # records of events
        self._silent: frozenset[str] = frozenset()
        self._lock = threading.RLock()
        self._client = stack.enter_context(EventHubProducerClient.from_connection_string(connection))
        self._over = threading.Event()
        sending = threading.Thread(target=self._send_heartbeats, daemon=True)
        sending.start()
        stack.callback(sending.join, HEARTBEAT_INTERVAL)
        stack.callback(self._over.set)

    def silence(self, names: tuple[str, ...]) -> None:
        """These send no heartbeats after one that promises the next one soon: so they are missed soon."""
        with self._lock:
            self._silent = frozenset(names)
            last = [vm for vm in self.all if vm.name in names]
            self._send(heartbeats(last, datetime.now(UTC), HEARTBEAT_INTERVAL))

    def report(self, vms: list[Vm], events: list[Maintenance], kind: Any) -> None:
        """Each VM reports that step of each event."""
        now = datetime.now(UTC)
        records = [event.seen(vm, kind, now) for vm in vms for event in events]
        self._send(records)
        self.sent += len(records)

    def _send_heartbeats(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL):
            with self._lock:
                alive = [vm for vm in self.all if vm.name not in self._silent]
                self._send(heartbeats(alive, datetime.now(UTC), PROMISED_INTERVAL))

    def _send(self, records: list[Record] | list[Heartbeat]) -> None:
        from azure.eventhub import EventData  # noqa: PLC0415 - as above

        groups: dict[str, list[bytes]] = {}
        for record in records:
            key, body = message(record)
            groups.setdefault(key, []).append(body)
        with self._lock:
            for key, bodies in groups.items():
                batch = self._client.create_batch(partition_key=key)
                for body in bodies:
                    try:
                        batch.add(EventData(body))
                    except ValueError:  # it is full
                        self._client.send_batch(batch)
                        batch = self._client.create_batch(partition_key=key)
                        batch.add(EventData(body))
                self._client.send_batch(batch)


class _Receiver(http.server.BaseHTTPRequestHandler):
    """Takes what the webhook sends."""

    notified: queue.Queue[Record]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.notified.put(Record.read(body))
        self.send_response(http.client.NO_CONTENT)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal is for the demo."""


def _start_receiver(notified: queue.Queue[Record], stack: ExitStack) -> int:
    handler = type("Receiver", (_Receiver,), {"notified": notified})
    server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return int(server.server_address[1])


def _start(stack: ExitStack, *words: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", "notbefore", *words], stdout=subprocess.DEVNULL)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


if __name__ == "__main__":
    if not is_here("proton"):
        sys.exit(f"the engine of the Event Hub could not be built: {NEEDS['proton'].get}")
    sys.exit(run_demo(keep="--keep" in sys.argv[1:]))
