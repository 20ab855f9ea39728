"""``make demo-fleet``: 200 VMs in six scale sets, an Event Hub, and ``notbefore fleet``.

The demo kills the instance of ``notbefore fleet`` in the middle of a maintenance. At the end Azure
itself reports events. The hub is the simulated one of the tests, and the VMs are simulated too. The
notifications arrive at a real webhook.
"""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from notbefore.core.change import ChangeKind
from notbefore.core.record import Record, Vm
from notbefore.wording.phrases import reporters
from notbefore.wording.records import heartbeat_of
from support.agent import eventually
from support.event_grid import encoded, message, resource_id
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.needs import NEEDS, is_here
from support.peers import HttpPeer, Request

SETS: Final = {"web": 40, "data": 40, "batch": 30, "cache": 30, "queue": 30, "front": 30}
SILENT: Final = ("data_3", "data_17")
BEAT: Final = 4.0  # seconds between two heartbeats of a VM
# the interval that heartbeats promise: longer than BEAT, so that on a slow machine, which sends
# them late, no VM counts as silent
PROMISED: Final = 20.0
LONG: Final = 3600.0  # an interval within which the demo has ended
NOTICE: Final = 10.0  # seconds from the first announcement to the first start
SPACING: Final = 5.0  # seconds between the starts of two events of the maintenance
AT_A_TIME: Final = 8  # VMs that one event of the maintenance affects
PATIENCE: Final = 120.0  # seconds for one step on a slow machine
GROUPED: Final = ("subscription", "resource_group", "scale_set", "event_type")


def _vms() -> list[Vm]:
    vms: list[Vm] = []
    for scale_set, count in SETS.items():
        for number in range(count):
            vms.append(vm(f"{scale_set}_{number}", scale_set, zone=str(1 + number % 3)))
    return vms


VMS: Final = _vms()
WEB: Final = [vm for vm in VMS if vm.scale_set == "web"]
EVENTS: Final = range(len(WEB) // AT_A_TIME)  # the numbers of the events of the maintenance
ALONE: Final = vm("alone", scale_set="")
WITHOUT_AGENT: Final = "legacy"  # a VM
GROUP_KEY: Final = "sub/rg"  # the partition key of VMs that belong to no scale set
STARTED: Final = time.monotonic()


def say(text: str) -> None:
    """Print a line with the time since the start."""
    sys.stdout.write(f"{time.monotonic() - STARTED:6.1f}s  {text}\n")
    sys.stdout.flush()


def beat(hub: Hub, vms: list[Vm], interval: float) -> None:
    """Send a heartbeat of each VM that promises the next one within ``interval`` seconds."""
    now = datetime.now(UTC)
    send(hub, [heartbeat_of(vm, (), "1", now, interval) for vm in vms])


def reports(begin: datetime, kind: ChangeKind, number: int) -> list[Record]:
    """Return the reports of a step of an event by each VM of the scale set ``web``.

    The event affects ``AT_A_TIME`` of them.
    """
    first = number * AT_A_TIME
    names = [vm.name for vm in WEB[first : first + AT_A_TIME]]
    notice = NOTICE + SPACING * number
    records: list[Record] = []
    for reporter in WEB:
        interruption = None
        if kind == "finished" and reporter.name in names:
            interruption = 2.0 + number
        records.append(
            report(
                reporter,
                kind,
                f"WEB-{number}",
                resources=names,
                event_type="Freeze",
                notice=notice,
                not_before=begin + timedelta(seconds=notice),
                first_seen=begin,
                interruption=interruption,
            )
        )
    return records


def reporters_of(record: Record) -> str:
    """Return in words who reported a step, and whether it corrects an earlier one."""
    by_azure = record.fleet_azure_status is not None
    if not record.fleet_reported_by and not by_azure:
        return ""
    by = reporters(record.fleet_reported_by or 0, by_azure=by_azure)
    if record.reason == "corrected":
        return f" (a correction, reported by {by})"
    return f" (reported by {by})"


def message_of_azure(status: str, event_id: str, event_type: str, name: str) -> bytes:
    """Return Event Grid's message about an event of one VM that belongs to no scale set."""
    now = datetime.now(UTC)
    not_before = None
    if status == "Scheduled":
        not_before = now + timedelta(seconds=NOTICE)
    return encoded(
        message(
            status,
            event_id,
            at=now,
            not_before=not_before,
            resource=resource_id("virtualMachines", name, event_id),
            location="westeurope",
            EventType=event_type,
            Resources=[name],
        )
    )


class Demo:
    """The hub, the webhook, the heartbeats and the instance; closing ``stack`` ends them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.hub = stack.enter_context(Hub(directory))
        self.receiver = stack.enter_context(HttpPeer())
        self.seen: list[tuple[str, str]] = []  # event type and change of each notification
        self.silent: list[str] = []  # names of the VMs that send no heartbeats
        self._state = directory / "state"
        self._config = write_fleet_config(
            directory,
            self.hub,
            self.receiver.url,
            group_by=list(GROUPED),
            group_wait="2s",
            group_interval="5s",
        )
        self.start_instance()
        self._ending = threading.Event()
        for work in (self._send_heartbeats, self._show_notifications):
            thread = threading.Thread(target=work)
            thread.start()
            stack.callback(thread.join)
        stack.callback(self._ending.set)

    def start_instance(self) -> None:
        """Start an instance, which continues from the snapshot if there is one."""
        self.instance = self._stack.enter_context(RunningFleet(self._config, self._state))
        url = f"http://127.0.0.1:{self.instance.port}/"
        say(f"-- an instance reads the hub: {url} in a browser")

    def _send_heartbeats(self) -> None:
        while not self._ending.wait(BEAT):
            beat(self.hub, [vm for vm in VMS if vm.name not in self.silent], PROMISED)

    def _show_notifications(self) -> None:
        while not self._ending.wait(0.1):
            # an instance that was killed while it sent a notification sends it again, under the
            # same id
            by_id: dict[str, Request] = {}
            for request in list(self.receiver.requests):
                by_id[request.headers["x-notbefore-delivery-id"]] = request
            for request in list(by_id.values())[len(self.seen) :]:
                record = Record.read(request.body)
                self.seen.append((record.event_type, record.change))
                number = len(self.seen)
                say(f"   notification {number}: {record.body}{reporters_of(record)}")

    def wait_for(self, event_type: str, change: str) -> None:
        """Wait until this change of an event of this type was notified."""
        eventually(lambda: (event_type, change) in self.seen, patience=PATIENCE)

    def wait_until_all_are_heard(self) -> None:
        """Wait until the instance has a heartbeat of each VM."""

        def all_heard() -> bool:
            events = self.instance.json("/api/v1/fleet/events")
            return bool(events["heard"] == len(VMS))

        eventually(all_heard, patience=PATIENCE)

    def wait_until_all_have_ended(self) -> None:
        """Wait until the history has each event of the maintenance."""

        def all_ended() -> bool:
            history = self.instance.json("/api/v1/fleet/history")
            return len(history["events"]) == len(EVENTS)

        eventually(all_ended, patience=PATIENCE)

    def run(self, command: str, word: str) -> None:
        """Run a command of notbefore against the instance."""
        say(f"notbefore {command} {word}:")
        url = ("--url", f"http://127.0.0.1:{self.instance.port}")
        subprocess.run([sys.executable, "-m", "notbefore", command, word, *url], check=True)

    # ---- the script

    def silence(self) -> None:
        """Let two VMs stop sending heartbeats."""
        self.silent += SILENT
        # their last heartbeats promise the next ones soon, so that the fleet misses those soon
        beat(self.hub, [vm for vm in VMS if vm.name in SILENT], BEAT)
        say(f"-- two VMs stop sending heartbeats: {', '.join(SILENT)}")

    def maintain(self) -> None:
        """Let Azure maintain the scale set ``web``, and kill the instance half-way."""
        say(
            f"-- a maintenance of the scale set web is announced: {len(EVENTS)} events, and"
            f" {len(WEB)} VMs see each"
        )
        begin = datetime.now(UTC)
        announcements: list[Record] = []
        for number in EVENTS:
            announcements += reports(begin, "announced", number)
        send(self.hub, announcements)
        self.wait_for("Freeze", "announced")
        self.run("events", "--fleet")

        for number in EVENTS:
            if number == len(EVENTS) // 2:
                say(
                    "-- the instance is killed in the middle of the wave; another one continues"
                    " from its snapshot"
                )
                self.instance.stop(signal.SIGKILL)
                self.start_instance()
            elapsed = (datetime.now(UTC) - begin).total_seconds()
            time.sleep(max(0.0, NOTICE + SPACING * number - elapsed))
            send(self.hub, reports(begin, "started", number))
            time.sleep(2.0 + number)
            send(self.hub, reports(begin, "finished", number))

    def report_by_azure(self) -> None:
        """Let Azure report an event, and the end of another one whose agent has not seen it."""
        say(f"-- Azure itself reports a reboot of {WITHOUT_AGENT}, a VM without an agent")
        self._send_of_azure("Scheduled", "AZURE-1", "Reboot", WITHOUT_AGENT)
        self.wait_for("Reboot", "announced")
        self.run("events", "--fleet")
        self._send_of_azure("Started", "AZURE-1", "Reboot", WITHOUT_AGENT)
        self.wait_for("Reboot", "started")
        self._send_of_azure("Completed", "AZURE-1", "Reboot", WITHOUT_AGENT)
        self.wait_for("Reboot", "finished")

        say(f"-- the agent of {ALONE.name} hangs during a redeploy, and does not see how it ends")
        beat(self.hub, [ALONE], LONG)  # it has an agent, which the page must not deny
        redeploy: dict[str, Any] = {"event_type": "Redeploy", "notice": NOTICE}
        announced = report(ALONE, "announced", "AZURE-2", **redeploy)
        send(self.hub, [announced], GROUP_KEY)
        self.wait_for("Redeploy", "announced")
        ended = report(ALONE, "ended", "AZURE-2", reason="not_watched", **redeploy)
        send(self.hub, [ended], GROUP_KEY)
        self.wait_for("Redeploy", "ended")
        say("-- Azure reports that it is completed")
        self._send_of_azure("Completed", "AZURE-2", "Redeploy", ALONE.name)
        self.wait_for("Redeploy", "finished")

    def _send_of_azure(self, status: str, event_id: str, event_type: str, name: str) -> None:
        send(self.hub, [message_of_azure(status, event_id, event_type, name)], GROUP_KEY)


def play(directory: Path, *, keep: bool) -> None:
    """Play the script; with ``keep``, let the instance run until Ctrl-C."""
    say("starting an Event Hub on loopback; the demo takes about two minutes")
    with ExitStack() as stack:
        demo = Demo(directory, stack)
        say(f"{len(VMS)} VMs in {len(SETS)} scale sets send heartbeats to a simulated Event Hub")
        demo.wait_until_all_are_heard()
        demo.silence()
        demo.maintain()
        demo.wait_for("Freeze", "finished")
        demo.wait_for("Silent", "started")
        demo.wait_until_all_have_ended()
        sent = 3 * len(EVENTS) * len(WEB)
        received = len(demo.seen)
        say(f"{sent} records of events went in, {received} notifications came out.")

        demo.report_by_azure()
        demo.run("fleet", "report")
        while keep and demo.instance.process.poll() is None:
            time.sleep(1.0)


if __name__ == "__main__":
    if not is_here("proton"):
        sys.exit(f"the engine of the Event Hub could not be built: {NEEDS['proton'][0]}")
    with (
        suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="notbefore-demo-") as name,
    ):
        play(Path(name), keep="--keep" in sys.argv[1:])
