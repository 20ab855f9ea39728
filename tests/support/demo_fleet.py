"""``make demo-fleet``: 200 VMs in six scale sets, an Event Hub, and an instance of ``notbefore
fleet`` that is killed.

The hub is the one that the tests use, and the VMs are simulated; what is notified comes over a real
webhook.
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

from notbefore.core.record import Record, Vm
from notbefore.wording.records import heartbeat_of
from support.agent import eventually
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import report, vm
from support.hub import Hub
from support.needs import NEEDS, is_here
from support.peers import HttpPeer

SETS: Final = {"web": 40, "data": 40, "batch": 30, "cache": 30, "queue": 30, "front": 30}
SILENT: Final = ("data_3", "data_17")
BEAT: Final = 4.0  # seconds between two heartbeats of a VM
# what they say that it is: a slow machine, which sends them late, makes nobody silent
PROMISED: Final = 20.0
NOTICE: Final = 10.0  # seconds; of the last event 20 more
AT_A_TIME: Final = 8  # VMs that one event of the maintenance affects
PATIENCE: Final = 120.0  # seconds for one step: a machine may be slow
GROUPED: Final = ("subscription", "resource_group", "scale_set", "event_type")
VMS: Final = [
    vm(f"{name}_{one}", name, zone=str(1 + one % 3))
    for name, count in SETS.items()
    for one in range(count)
]

WEB: Final = [one for one in VMS if one.scale_set == "web"]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def beat(hub: Hub, vms: list[Vm], interval: float) -> None:
    send(hub, [heartbeat_of(one, (), "1", datetime.now(UTC), interval) for one in vms])


def reports(begin: datetime, kind: Any, number: int) -> list[Record]:
    """Each VM of the scale set reports that step of an event, which affects some of them."""
    notice = NOTICE + 5 * number
    names = [one.name for one in WEB[number * AT_A_TIME :][:AT_A_TIME]]
    changed: dict[str, Any] = {
        "not_before": begin + timedelta(seconds=notice),
        "first_seen": begin,
        "notice": notice,
    }
    found = []
    for who in WEB:
        own: dict[str, Any] = (
            {"interruption": 2.0 + number} if kind == "finished" and who.name in names else {}
        )
        found.append(
            report(
                who, kind, f"WEB-{number}", resources=names, event_type="Freeze", **changed, **own
            )
        )
    return found


def show(receiver: HttpPeer, over: threading.Event, seen: list[tuple[str, str]]) -> None:
    """Print the notifications as they come; ``seen``: type and change of each."""
    while not over.wait(0.1):
        # what a killed instance was just sending comes again, under the same id
        came = {one.headers["x-notbefore-delivery-id"]: one for one in list(receiver.requests)}
        for one in list(came.values())[len(seen) :]:
            record = Record.read(one.body)
            seen.append((record.event_type, record.change))
            by = (
                f" (reported by {record.fleet_reported_by} VMs)" if record.fleet_reported_by else ""
            )
            say(f"   notification {len(seen)}: {record.body}{by}")


def run(command: str, what: str, instance: RunningFleet) -> None:
    say(f"\nnotbefore {command} {what}:")
    url = ("--url", f"http://127.0.0.1:{instance.port}")
    subprocess.run([sys.executable, "-m", "notbefore", command, what, *url], check=True)


def play(directory: Path, stack: ExitStack, *, keep: bool) -> None:
    """Run the script. ``keep``: go on until Ctrl-C."""
    hub, receiver = stack.enter_context(Hub(directory)), stack.enter_context(HttpPeer())
    config = configured(
        directory, hub, receiver.url, group_by=list(GROUPED), group_wait="2s", group_interval="5s"
    )
    over, seen = threading.Event(), list[tuple[str, str]]()
    silent = list[str]()

    def beats() -> None:
        while not over.wait(BEAT):
            beat(hub, [one for one in VMS if one.name not in silent], PROMISED)

    def expect(*wanted: str) -> None:
        eventually(lambda: wanted in seen, patience=PATIENCE)

    def start() -> RunningFleet:
        made = stack.enter_context(RunningFleet(config, directory / "state"))
        say(f"-- an instance reads the hub: http://127.0.0.1:{made.port}/ in a browser")
        return made

    instance = start()
    for doing in (beats, lambda: show(receiver, over, seen)):
        thread = threading.Thread(target=doing)
        thread.start()
        stack.callback(thread.join)
    stack.callback(over.set)
    say(f"{len(VMS)} VMs in {len(SETS)} scale sets send their heartbeats to a simulated Event Hub")
    eventually(
        lambda: instance.json("/api/v1/fleet/events")["heard"] == len(VMS), patience=PATIENCE
    )
    silent += SILENT
    # their last heartbeats promise the next ones soon: so they are missed soon
    beat(hub, [one for one in VMS if one.name in SILENT], BEAT)
    say(f"-- two VMs stop sending heartbeats: {', '.join(SILENT)}")
    begin = datetime.now(UTC)
    events = range(len(WEB) // AT_A_TIME)
    say(
        f"-- a maintenance of the scale set web is announced: {len(events)} events, and {len(WEB)}"
        " VMs see each"
    )
    send(hub, [one for number in events for one in reports(begin, "announced", number)])
    expect("Freeze", "announced")
    run("events", "--fleet", instance)
    for number in events:
        if number == len(events) // 2:
            say(
                "-- the instance is killed, in the middle of the wave; another one goes on from its"
                " snapshot"
            )
            instance.stop(signal.SIGKILL)
            instance = start()
        time.sleep(max(0.0, (begin - datetime.now(UTC)).total_seconds() + NOTICE + 5 * number))
        send(hub, reports(begin, "started", number))
        time.sleep(2.0 + number)
        send(hub, reports(begin, "finished", number))
    expect("Freeze", "finished")
    expect("Silent", "started")
    eventually(
        lambda: len(instance.json("/api/v1/fleet/history")["events"]) == len(events),
        patience=PATIENCE,
    )
    say(
        f"\n{3 * len(events) * len(WEB)} records of events went in, {len(seen)} notifications came"
        " out."
    )
    run("fleet", "report", instance)
    while keep and instance.process.poll() is None:
        time.sleep(1.0)


if __name__ == "__main__":
    if not is_here("proton"):
        sys.exit(f"the engine of the Event Hub could not be built: {NEEDS['proton'][0]}")
    with suppress(KeyboardInterrupt), ExitStack() as found:
        name = found.enter_context(tempfile.TemporaryDirectory(prefix="notbefore-demo-"))
        play(Path(name), found, keep="--keep" in sys.argv[1:])
