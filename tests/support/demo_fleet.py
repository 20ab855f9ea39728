"""``make demo-fleet``: 200 VMs in six scale sets, an Event Hub, and an instance of ``notbefore
fleet`` that is killed. Then Azure itself reports events.

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
from notbefore.wording.phrases import reporters
from notbefore.wording.records import heartbeat_of
from support.agent import eventually
from support.event_grid import encoded, message, resource_id
from support.fleet_instance import RunningFleet, send, write_fleet_config
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

ALONE: Final = vm("alone", scale_set="")
WITHOUT_AGENT: Final = "legacy"
GROUP_KEY: Final = "sub/rg"  # the partition key of VMs of no scale set
WEB: Final = [vm for vm in VMS if vm.scale_set == "web"]


BEGUN: Final = time.monotonic()


def say(text: str) -> None:
    sys.stdout.write(f"{time.monotonic() - BEGUN:6.1f}s  {text}\n")
    sys.stdout.flush()


def beat(hub: Hub, vms: list[Vm], interval: float) -> None:
    send(hub, [heartbeat_of(vm, (), "1", datetime.now(UTC), interval) for vm in vms])


def reports(begin: datetime, kind: Any, number: int) -> list[Record]:
    """Each VM of the scale set reports that step of an event, which affects some of them."""
    notice = NOTICE + 5 * number
    names = [vm.name for vm in WEB[number * AT_A_TIME :][:AT_A_TIME]]
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


def reporters_of(record: Record) -> str:
    """Who reported it, and whether it is a correction, in words."""
    by_azure = record.fleet_azure_status is not None
    if not record.fleet_reported_by and not by_azure:
        return ""
    by = reporters(record.fleet_reported_by or 0, by_azure=by_azure)
    if record.reason == "corrected":
        return f" (a correction, reported by {by})"
    return f" (reported by {by})"


def of_azure(status: str, event_id: str, event_type: str, name: str) -> bytes:
    """What Event Grid delivers about an event of one VM of no scale set."""
    now = datetime.now(UTC)
    return encoded(
        message(
            status,
            event_id,
            at=now,
            not_before=now + timedelta(seconds=NOTICE) if status == "Scheduled" else None,
            resource=resource_id("virtualMachines", name, event_id),
            location="westeurope",
            EventType=event_type,
            Resources=[name],
        )
    )


def show(receiver: HttpPeer, over: threading.Event, seen: list[tuple[str, str]]) -> None:
    """Print the notifications as they come; ``seen``: type and change of each."""
    while not over.wait(0.1):
        # what a killed instance was just sending is sent again, under the same id
        came = {
            request.headers["x-notbefore-delivery-id"]: request
            for request in list(receiver.requests)
        }
        for one in list(came.values())[len(seen) :]:
            record = Record.read(one.body)
            seen.append((record.event_type, record.change))
            say(f"   notification {len(seen)}: {record.body}{reporters_of(record)}")


def run(command: str, what: str, instance: RunningFleet) -> None:
    say(f"notbefore {command} {what}:")
    url = ("--url", f"http://127.0.0.1:{instance.port}")
    subprocess.run([sys.executable, "-m", "notbefore", command, what, *url], check=True)


def tell_of_azure(hub: Hub, instance: RunningFleet, seen: list[tuple[str, str]]) -> None:
    """Let Azure itself report an event, and the end of another that its agent has not seen."""

    def expect(*wanted: str) -> None:
        eventually(lambda: wanted in seen, patience=PATIENCE)

    say(f"-- Azure itself reports a reboot of {WITHOUT_AGENT}, a VM without an agent")
    send(hub, [of_azure("Scheduled", "AZURE-1", "Reboot", WITHOUT_AGENT)], GROUP_KEY)
    expect("Reboot", "announced")
    run("events", "--fleet", instance)
    send(hub, [of_azure("Started", "AZURE-1", "Reboot", WITHOUT_AGENT)], GROUP_KEY)
    expect("Reboot", "started")
    send(hub, [of_azure("Completed", "AZURE-1", "Reboot", WITHOUT_AGENT)], GROUP_KEY)
    expect("Reboot", "finished")

    say(f"-- the agent of {ALONE.name} hangs during a redeploy, and does not see how it ends")
    redeploy: dict[str, Any] = {"event_type": "Redeploy", "notice": NOTICE}
    send(hub, [report(ALONE, "announced", "AZURE-2", **redeploy)], GROUP_KEY)
    expect("Redeploy", "announced")
    send(hub, [report(ALONE, "ended", "AZURE-2", reason="not_watched", **redeploy)], GROUP_KEY)
    expect("Redeploy", "ended")
    say("-- Azure says that it is completed")
    send(hub, [of_azure("Completed", "AZURE-2", "Redeploy", ALONE.name)], GROUP_KEY)
    expect("Redeploy", "finished")


def play(directory: Path, stack: ExitStack, *, keep: bool) -> None:
    """Run the script. ``keep``: go on until Ctrl-C."""
    say("starting an Event Hub on loopback; the demo takes about two minutes")
    hub = stack.enter_context(Hub(directory))
    receiver = stack.enter_context(HttpPeer())
    config = write_fleet_config(
        directory, hub, receiver.url, group_by=list(GROUPED), group_wait="2s", group_interval="5s"
    )
    over = threading.Event()
    seen = list[tuple[str, str]]()
    silent = list[str]()

    def beats() -> None:
        while not over.wait(BEAT):
            beat(hub, [vm for vm in VMS if vm.name not in silent], PROMISED)

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
    beat(hub, [vm for vm in VMS if vm.name in SILENT], BEAT)
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
                "-- the instance is killed, in the middle of the wave; another one continues from"
                " its snapshot"
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
        f"{3 * len(events) * len(WEB)} records of events went in, {len(seen)} notifications came"
        " out."
    )
    tell_of_azure(hub, instance, seen)
    run("fleet", "report", instance)
    while keep and instance.process.poll() is None:
        time.sleep(1.0)


if __name__ == "__main__":
    if not is_here("proton"):
        sys.exit(f"the engine of the Event Hub could not be built: {NEEDS['proton'][0]}")
    with suppress(KeyboardInterrupt), ExitStack() as found:
        name = found.enter_context(tempfile.TemporaryDirectory(prefix="notbefore-demo-"))
        play(Path(name), found, keep="--keep" in sys.argv[1:])
