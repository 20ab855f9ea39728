"""``make demo-fleet``: 200 VMs in six scale sets, an Event Hub and instances of ``notbefore fleet``.

The hub is the one that the tests use, and the VMs are simulated; what is notified comes from real instances over a real
webhook. Checkpoints are in files, so the second instance is started when the first one is gone: several at a time need
Blob Storage.
"""

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from notbefore.commands.client import AgentClient
from notbefore.commands.fleet_events import WAVES, show_waves
from notbefore.commands.fleet_report import show as show_report
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.errors import NotBeforeError
from notbefore.fleet.history import History, read_past
from notbefore.fleet.report import report as make_report
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import report, vm
from support.hub import Hub
from support.needs import NEEDS, is_here
from support.peers import HttpPeer

SETS: Final = {"web": 40, "data": 40, "batch": 30, "cache": 30, "queue": 30, "front": 30}
SILENT: Final = ("data_3", "data_17")
HEARTBEAT_INTERVAL: Final = 4.0  # seconds between two heartbeats of a VM
PROMISED_INTERVAL: Final = 20.0  # what they say that it is: a slow machine, which sends them late, makes nobody silent
NOTICE: Final = 10.0  # seconds; of the last event 20 more
AT_A_TIME: Final = 8  # VMs that one event of the maintenance affects
PATIENCE: Final = 120.0  # seconds for one step: a machine may be slow
SETTINGS: Final[dict[str, Any]] = {
    "group_by": ["subscription", "resource_group", "scale_set", "event_type"],  # of one scale set
    "group_wait": "2s",
    "group_interval": "5s",
}


class Maintenance(Struct, frozen=True):
    """One event, which affects some VMs of the scale set."""

    event_id: str
    resources: list[str]
    announced: datetime
    not_before: datetime
    interruption: float  # seconds that its VMs stand still

    def seen(self, who: Vm, kind: Any) -> Record:
        """The record of one VM that sees a step of it now."""
        notice = (self.not_before - self.announced).total_seconds()
        changed: dict[str, Any] = {"not_before": self.not_before, "first_seen": self.announced, "notice": notice}
        if kind == "finished" and who.name in self.resources:
            changed["interruption"] = self.interruption
        return report(who, kind, self.event_id, resources=self.resources, event_type="Freeze", **changed)


class Demo:
    """The hub, the VMs, the receiver and the instances; prints what happens, as it happens."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._begun = time.monotonic()
        self._directory, self._stack = directory, stack
        self._hub, self._receiver = stack.enter_context(Hub(directory)), stack.enter_context(HttpPeer())
        self._seen: list[tuple[str, str]] = []  # type and change of each notification
        self._sent = 0  # records of events
        self._vms = [
            vm(f"{name}_{one}", name, zone=str(1 + one % 3)) for name, count in SETS.items() for one in range(count)
        ]
        self._silent: tuple[str, ...] = ()
        self._config = configured(directory, self._hub, self._receiver.url, **SETTINGS)
        self._instance = self._start_instance()
        self._over = threading.Event()
        beating = threading.Thread(target=self._beat)
        beating.start()
        stack.callback(beating.join)
        stack.callback(self._over.set)

    def _start_instance(self) -> RunningFleet:
        return self._stack.enter_context(RunningFleet(self._config, self._directory / "state")).ready()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL):
            self._send_heartbeats([one for one in self._vms if one.name not in self._silent], PROMISED_INTERVAL)

    def _send_heartbeats(self, vms: list[Vm], interval: float) -> None:
        send(self._hub, [Heartbeat.of(one, (), "1", datetime.now(UTC), interval) for one in vms])

    def _report(self, vms: list[Vm], events: list[Maintenance], kind: str) -> None:
        """Each VM reports that step of each event."""
        records = [event.seen(one, kind) for one in vms for event in events]
        send(self._hub, records)
        self._sent += len(records)

    def play(self) -> bool:
        """Run the script; returns whether all that was expected has come."""
        self._say(f"{len(self._vms)} VMs in {len(SETS)} scale sets send their heartbeats to a simulated Event Hub;")
        self._say(f"an instance of `notbefore fleet` reads them: {self._url}/ in a browser\n")
        self._wait(lambda: self._ask()["heard"] == len(self._vms), "not every VM was heard from")
        self._silent = SILENT
        # their last heartbeats promise the next ones soon: so they are missed soon
        self._send_heartbeats([one for one in self._vms if one.name in SILENT], HEARTBEAT_INTERVAL)
        self._say(f"-- two VMs stop sending heartbeats: {', '.join(SILENT)}")
        web, now = [one for one in self._vms if one.scale_set == "web"], datetime.now(UTC)
        wave = [
            Maintenance(
                event_id=f"WEB-{number}",
                resources=[one.name for one in web[number * AT_A_TIME :][:AT_A_TIME]],
                announced=now,
                not_before=now + timedelta(seconds=NOTICE + 5 * number),
                interruption=2.0 + number,
            )
            for number in range(len(web) // AT_A_TIME)
        ]
        self._say(
            f"-- a maintenance of the scale set web is announced: {len(wave)} events, and {len(web)} VMs see each"
        )
        self._report(web, wave, "announced")
        self._expect("Freeze", "announced")
        show_waves(self._ask(), sys.stdout)
        for number, event in enumerate(wave):
            if number == len(wave) // 2:
                self._take_over()
            self._let_pass((event.not_before - datetime.now(UTC)).total_seconds())
            self._say(f"-- {event.resources[0]} to {event.resources[-1]} are paused for {event.interruption:.0f} s")
            self._report(web, [event], "started")
            self._let_pass(event.interruption)
            self._report(web, [event], "finished")
        self._expect("Freeze", "finished")
        self._expect("Silent", "started")
        return self._conclude(len(wave))

    def _take_over(self) -> None:
        self._say("-- the instance is killed, in the middle of the wave")
        self._instance.stop(signal.SIGKILL)
        self._instance = self._start_instance()
        self._say(f"   another one goes on from its snapshot: {self._url}/")
        self._say(
            "   (the snapshot is a file here; in Blob Storage, the other instance would have been running already)"
        )

    def _conclude(self, events: int) -> bool:
        self._let_pass(2.0)
        self._say(f"\n{self._sent} records of events went in, {len(self._seen)} notifications came out.")
        now = datetime.now(UTC)
        since = now - timedelta(seconds=time.monotonic() - self._begun)
        history = History(self._directory / "state")
        found = make_report(read_past(history.past(since.timestamp())))
        self._say("\nnotbefore fleet report:")
        show_report(found)
        waves = self._seen.count(("Freeze", "announced"))
        complete = waves == 1 and sum(row.events for row in found) == events and ("Silent", "started") in self._seen
        self._say("\nThe demo is complete." if complete else "\nSomething was expected that did not come: see above.")
        return complete

    def stay(self) -> None:
        """Go on until Ctrl-C."""
        self._say(f"Still running: {self._url}/ and {self._url}/metrics. Ctrl-C ends it.")
        while self._instance.process.poll() is None:
            self._let_pass(1.0)

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._instance.port}"

    def _ask(self) -> dict[str, Any]:
        return AgentClient(self._url).ask(WAVES)

    def _wait(self, look: Callable[[], object], otherwise: str) -> None:
        """Wait for something, and show the notifications that come meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._let_pass(0.1)
            with suppress(NotBeforeError):
                if look():
                    return
            if time.monotonic() > deadline or self._instance.process.poll() is not None:
                raise NotBeforeError(otherwise)

    def _expect(self, event_type: str, change: str) -> None:
        self._wait(lambda: (event_type, change) in self._seen, f"nobody was notified: {event_type} {change}")

    def _let_pass(self, seconds: float) -> None:
        """Show the notifications that come meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            for one in self._receiver.requests[len(self._seen) :]:
                record = Record.read(one.body)
                self._seen.append((record.event_type, record.change))
                by = f" (reported by {record.fleet_reported_by} VMs)" if record.fleet_reported_by else ""
                self._say(f"   notification {len(self._seen)}: {record.body}{by}")

    def _say(self, text: str) -> None:
        lead = f"{time.monotonic() - self._begun:5.1f}s  " if text.startswith(("--", "   ")) else ""
        sys.stdout.write(f"{lead}{text}\n")
        sys.stdout.flush()


def main(*, keep: bool) -> int:
    """Play; returns 0 if everything came as expected."""
    with ExitStack() as stack:
        demo = Demo(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notbefore-demo-"))), stack)
        with suppress(KeyboardInterrupt):
            complete = demo.play()
            if keep:
                demo.stay()
            return int(not complete)
    return 0


if __name__ == "__main__":
    if not is_here("proton"):
        sys.exit(f"the engine of the Event Hub could not be built: {NEEDS['proton'].get}")
    sys.exit(main(keep="--keep" in sys.argv[1:]))
