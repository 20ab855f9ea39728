"""Whether anything is lost or late: ``python benchmarks/kills.py [MODE ...] [--rounds N] [--seed N]``.

`kills` (what is run without a mode): the real agent and its courier are killed (SIGKILL) at random moments while 20
scheduled events at a time come, start and go, and while the receiver fails, hangs, cuts, and lies (takes a delivery and
says that it did not). At the end every change that the agent ever recorded must have arrived; each repetition must
carry the id of the first.

`power-cut`: the same, with all writes and syncs of the state directory recorded. They are replayed up to random
moments, and what was not synced is there, is not, or is there in part.

The modes of ``FAULTS``: each inflicts one fault again and again, and heals it. What must arrive, and by when, is not
what the agent recorded but what Azure listed: each step of each event, 5 s after the list had it. To add a mode: a
function that inflicts and heals, and a line in ``FAULTS``.

`leader`: five agents with `announce_by: leader` and `peers`, of which the first one comes and goes; `leader-alone`: the
same without `peers`.
"""

import argparse
import collections
import fcntl
import http.client
import http.server
import json
import logging
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from notbefore.core.delivery import delivery_id
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from notbefore.store.file import FILE_NAME
from notbefore.store.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk
from support.installed import VERSION, Installed
from support.recorded_disk import Image, RecordedDisk, Step
from support.wall_clock import WallClock

FLOWS = 20
LATE = 5.0  # seconds after the moment from which on a delivery was possible
SLOWLY = (1.2, 2.2)  # seconds between two lists: the agent polls each 0.2 s, and waits 0.5 s for a lock
FUTURE = "Fri, 01 Mar 2058 12:00:00 GMT"
PORT = 11_172


class Receiver(http.server.ThreadingHTTPServer):
    """``moods`` are (weight, what it does); it notes what it has really taken, in order."""

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
        self.times: list[float] = []  # monotonic seconds at which each was taken
        self.senders: list[str] = []  # the VM that sent each
        self.answers: collections.Counter[str] = collections.Counter()
        self.calm = False

    def mood(self) -> str:
        names, weights = [name for _, name in self.moods], [weight for weight, _ in self.moods]
        return "take" if self.calm else random.choices(names, weights)[0]

    def accepted_by(self, moment: float) -> list[tuple[str, str]]:
        """Delivery ids and events of what it had taken by then."""
        taken = zip(self.taken, self.times, strict=False)
        return [(one, event) for (one, event, _), at in taken if at < moment]

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
            self.server.times.append(time.monotonic())
            self.server.senders.append(str(values.get("host.name")))
            self.server.taken.append((self.headers["X-Notbefore-Delivery-Id"], key, values["notbefore.delivery.kind"]))
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
    """Scheduled events that come, start and go: always 20 at a time, until asked to stop.

    ``pace``: the shortest and the longest time between two lists, in seconds. ``shown``: when each step was listed.
    """

    def __init__(
        self, simulator: Simulator, pace: tuple[float, float] = (0.2, 0.9), vms: tuple[str, ...] = ("WestNO_0",)
    ) -> None:
        super().__init__(daemon=True)
        self._simulator = simulator
        self._pace = pace
        self._vms = vms
        self.shown: dict[tuple[str, str], float] = {}
        self._over = threading.Event()
        self.begun = 0

    def run(self) -> None:
        listed: dict[str, str] = {}
        for incarnation in range(2, 10_000_000):
            if self._over.wait(random.uniform(*self._pace)):
                break
            steps: list[tuple[str, str]] = []
            for event_id in random.sample(sorted(listed), min(2, len(listed))):
                if listed[event_id] == "Scheduled" and random.random() < 0.8:
                    listed[event_id] = "Started"
                    steps.append((event_id.casefold(), "started"))
                else:
                    del listed[event_id]
                    steps.append((event_id.casefold(), "over"))
            while len(listed) < FLOWS:
                self.begun += 1
                listed[f"E-{self.begun}"] = "Scheduled"
                steps.append((f"e-{self.begun}", "announced"))
            self._show(listed, incarnation)
            self.shown |= dict.fromkeys(steps, time.monotonic())
        time.sleep(self._pace[1])  # the last list is seen as long as the others
        self._show({}, 10_000_000)
        self.shown |= {(event_id.casefold(), "over"): time.monotonic() for event_id in listed}

    def _show(self, listed: dict[str, str], incarnation: int) -> None:
        events = [
            {
                "EventId": event_id,
                "EventStatus": status,
                "EventType": "Freeze",
                "ResourceType": "VirtualMachine",
                "Resources": self._vms,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modes",
        nargs="*",
        choices=MODES,
        default="kills",
        metavar="MODE",
        help=" | ".join(MODES),
    )
    parser.add_argument("--kills", type=int, default=200, help="how often to kill (default 200; the claim is 2000)")
    parser.add_argument("--rounds", type=int, default=20, help="how often to inflict each other fault (default 20)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    bad = 0
    for mode in [options.modes] if isinstance(options.modes, str) else options.modes:
        if mode == "kills":
            bad += kills(options.kills)
        elif mode == "power-cut":
            bad += power_cut(options.rounds)
        elif mode in LEADER:
            bad += leader(mode, options.rounds)
        else:
            bad += inflict(mode, options.rounds)
    sys.exit(1 if bad else 0)


def configuration(directory: Path, receiver: Receiver, **more: Any) -> Path:
    path = directory / "notbefore.yaml"
    hook = {
        "url": f"http://127.0.0.1:{receiver.server_address[1]}/",
        "allow_private": True,
        "timeout": "1s",
        "expire_on_end": False,
    }
    path.write_text(json.dumps({"sinks": {"hook": {"webhook": hook}}, **more}), encoding="utf-8")
    return path


def run_command(config: Path, simulator: Simulator, state: Path, host: str = "127.0.0.1") -> list[str]:
    command = [sys.executable, "-m", "notbefore", "run", str(config), "--imds", simulator.endpoint]
    return [*command, "--state-dir", str(state), "--listen", f"{host}:{PORT}"]


def kills(count: int) -> bool:
    receiver = Receiver()
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, Simulator(("WestNO_0",)) as simulator:
        world = World(simulator)
        world.start()
        command = run_command(configuration(Path(directory), receiver), simulator, Path(directory))
        killed = kill_often(command, count)
        receiver.calm = True
        agent = start(command)
        time.sleep(2)
        world.stop()
        drained = drain(Path(directory))
        counted = counts()
        agent.terminate()
        agent.wait(30)
        bad = report(Path(directory), receiver, killed, counted) or not drained
        print(f"events {world.begun}, drained {drained}, {time.monotonic() - begun:.0f} s")
    return bad


# ---- faults of the disk, of the state file and of the clock


class Place(NamedTuple):
    """Where a fault is inflicted."""

    state: Path  # the state directory, as the agent sees it
    clock: WallClock  # of the agent and of the courier alone
    disk: HangingDisk  # the state directory's, for these two
    manager: subprocess.Popen[bytes]  # starts the agent, whenever it has ended
    installed: Installed | None = None  # what the agent is run from, where that is to be another version

    @property
    def agent(self) -> int:
        """The id of the agent's process that runs now."""
        while True:
            with suppress(OSError, IndexError):
                children = Path(f"/proc/{self.manager.pid}/task/{self.manager.pid}/children").read_text()
                return int(children.split()[0])
            time.sleep(0.02)

    @property
    def disk_of_agent(self) -> Path:
        """The state directory, as the agent sees it."""
        return Path(f"/proc/{self.manager.pid}/root{self.state}")


class Fault(NamedTuple):
    inflict: Callable[[Place, float], None]  # for so many seconds; healed when it returns
    mount: str = ""  # what puts a disk on the state directory, $0
    installs: bool = False
    loses: bool = False  # what only memory knew: it is counted, and no failure


def full_disk(place: Place, seconds: float) -> None:
    fill(place)
    time.sleep(seconds)
    (place.disk_of_agent / "filler").unlink()


def fill(place: Place) -> None:
    with (place.disk_of_agent / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


def sick_kills(place: Place, seconds: float) -> None:
    """The agent is killed while its disk is full: it forgets what only its memory knew."""
    fill(place)
    time.sleep(seconds / 2)
    os.kill(place.agent, signal.SIGKILL)
    time.sleep(seconds / 2)
    (place.disk_of_agent / "filler").unlink()


def file_replaced(place: Place, seconds: float) -> None:
    """Somebody restores an older file, writes it into the one that is open, or cuts that off."""
    path = place.state / FILE_NAME
    with suppress(OSError):  # it is being written anew
        older = path.read_bytes()
        time.sleep(seconds / 2)
        how = random.choice(["restored", "overwritten", "truncated", "nonsense"])
        if how == "restored":
            path.with_name("restored").write_bytes(older)
            path.with_name("restored").rename(path)
        elif how == "overwritten":
            with path.open("r+b") as file:
                file.write(older)
                file.truncate()
        elif how == "truncated":
            os.truncate(path, random.choice([0, 100, len(older) // 2]))
        else:
            path.write_bytes(random.randbytes(len(older)))
    time.sleep(seconds / 2)


def file_deleted(place: Place, seconds: float) -> None:
    everything = random.random() < 0.5
    for path in place.state.glob("*" if everything else FILE_NAME):
        path.unlink(missing_ok=True)
    time.sleep(seconds / 2)


def lock_held(place: Place, seconds: float) -> None:
    with closing(sqlite3.connect(place.state / FILE_NAME, isolation_level=None, timeout=30)) as db:
        db.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        db.execute("ROLLBACK")


def clock_jump(place: Place, seconds: float) -> None:
    place.clock.jump(random.choice([63_072_000, 86_400, 7_200, -3_600]))
    time.sleep(seconds)
    place.clock.jump(0)


def hung_disk(place: Place, seconds: float) -> None:
    place.disk.hang(random.choice([WRITES, EVERYTHING]))
    time.sleep(seconds)
    place.disk.hang(0)


def frozen_disk(place: Place, seconds: float) -> None:
    """Who writes to it waits in the kernel, where no signal ends it (state D)."""
    directory = os.open(place.disk_of_agent, os.O_RDONLY)
    fcntl.ioctl(directory, FIFREEZE, 0)
    time.sleep(seconds)
    fcntl.ioctl(directory, FITHAW, 0)
    os.close(directory)


def upgrade(place: Place, seconds: float) -> None:
    if place.installed is not None:
        place.installed.install(random.choice([place.installed.older, place.installed.newer]))
    time.sleep(seconds)


FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
# a service manager with `Restart=always`
MANAGER = 'trap "kill \\$!; wait; exit" TERM; while :; do "$@" & wait $!; done'
LOOP_DISK = 'truncate -s 64M "$0.img" && mkfs.ext4 -q "$0.img" && mount -o loop "$0.img" "$0" && chmod 700 "$0" && '
SMALL_DISK = 'mount -t tmpfs -o size=2m,mode=0700 tmpfs "$0" && '
FAULTS = {
    "full-disk": Fault(full_disk, SMALL_DISK),
    "file-deleted": Fault(file_deleted),
    "file-replaced": Fault(file_replaced),
    "sick-kills": Fault(sick_kills, SMALL_DISK, loses=True),
    "lock-held": Fault(lock_held),
    "clock-jump": Fault(clock_jump),
    "hung-disk": Fault(hung_disk),
    "frozen-disk": Fault(frozen_disk, LOOP_DISK),
    "upgrade": Fault(upgrade, installs=True),
}


def inflict(mode: str, rounds: int) -> bool:
    """Inflict one fault again and again; prints the account, and returns whether anything was lost or late."""
    fault, receiver, begun = FAULTS[mode], Receiver(), time.monotonic()
    receiver.calm = True
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory, Simulator(("WestNO_0",)) as simulator:
        state, clock = Path(directory) / "state", WallClock(Path(directory))
        disk = HangingDisk(state, Path(directory))
        libraries = f"{clock.variables['LD_PRELOAD']}:{disk.variables['LD_PRELOAD']}"
        state.mkdir()
        inside = ("unshare", "--mount", "sh", "-c", fault.mount + MANAGER, str(state))
        command = run_command(configuration(Path(directory), receiver), simulator, state)
        installed = None
        if fault.installs:
            installed = Installed.make(Path(directory), {"pyproject.toml": (VERSION, 'version = "9.9.9"')})
            command[0] = str(installed.place / "bin" / "python")
        manager = start([*inside, *command], **clock.variables | disk.variables | {"LD_PRELOAD": libraries})
        while not _answers("127.0.0.1"):
            time.sleep(0.05)
        world = World(simulator, SLOWLY)
        world.start()
        for _ in range(rounds):
            time.sleep(random.uniform(0.5, 3))
            fault.inflict(Place(state, clock, disk, manager, installed), random.uniform(1, 6))
        world.stop()
        time.sleep(LATE + 2)
        manager.terminate()
        manager.wait(30)
    return account(mode, rounds, world, receiver, time.monotonic() - begun) and not fault.loses


def account(mode: str, rounds: int, world: World, receiver: Receiver, took: float) -> bool:
    """What Azure listed against what the receiver has; how an event ended is not for this command to judge."""
    arrived: dict[tuple[str, str], float] = {}
    order: dict[str, list[str]] = {}
    for (_, event, kind), at in zip(receiver.taken, receiver.times, strict=True):
        step = kind if kind in ("announced", "started") else "over"
        if (event, step) not in arrived:
            arrived[event, step] = at
            order.setdefault(event, []).append(step)
    delays = {step: arrived[step] - shown for step, shown in world.shown.items() if step in arrived}
    lost = sorted(world.shown.keys() - arrived.keys())
    late = sorted(step for step, delay in delays.items() if delay > LATE)
    ids = collections.Counter(found for found, _, _ in receiver.taken)
    rank = ["announced", "started", "over"]
    swapped = sum(steps != sorted(steps, key=rank.index) for steps in order.values())
    slowest, middle = max(delays.values(), default=0.0), sorted(delays.values())[len(delays) // 2] if delays else 0.0
    print(f"{mode}: {rounds} times, {world.begun} events, {len(world.shown)} steps, {took:.0f} s")
    print(f"{mode}: LOST {len(lost)} (bar: 0), LATE {len(late)} (bar: 0), out of order {swapped} (bar: 0)")
    print(f"{mode}: repeated {ids.total() - len(ids)}, of other ids {len(ids) - len(arrived)}; "
          f"delay {middle:.2f} s (median), {slowest:.2f} s (longest)", *lost[:5], *late[:5])  # fmt: skip
    return bool(lost or late or swapped)


# ---- a cut of the power


def power_cut(rounds: int) -> bool:
    """What an agent writes is recorded; then it is replayed up to a random moment, 50 times a round.

    What the receiver had accepted by then has to be in the history, and the file readable. The control, a disk that
    syncs nothing, has to fail: else nothing was tried.
    """
    logging.disable()  # the control has many damaged files
    receiver = Receiver()
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory, Simulator(("WestNO_0",)) as simulator:
        state = Path(directory) / "state"
        state.mkdir(mode=0o700)
        disk, world = RecordedDisk(state, Path(directory)), World(simulator)
        world.start()
        command = run_command(configuration(Path(directory), receiver), simulator, state)
        killed = kill_often(command, rounds, (2.0, 6.0), **disk.variables)
        world.stop()
        steps = disk.steps()
        found = {True: Cuts(), False: Cuts()}
        for synced, cuts in found.items():
            for number in sorted(random.choices(range(len(steps)), k=50 * rounds)):
                cuts.images.append((number, synced))
            cuts.look(steps, receiver, Path(directory) / "image")
    syncs = sum(step.what == "s" for step in steps)
    print(f"power-cut: {len(steps)} writes and syncs ({syncs}), agent and courier killed {killed.total()} times")
    for synced, cuts in found.items():
        print(
            f"power-cut{'' if synced else ', the control'}: {len(cuts.images)} images, told and forgotten"
            f" {cuts.forgotten}, unreadable {cuts.unreadable} (bar: {'0, 0' if synced else 'more'})"
        )
    failed, control = (cuts.forgotten + cuts.unreadable for cuts in found.values())
    return failed > 0 or control == 0


class Cuts:
    """Moments at which the power is cut, and what was found after it."""

    def __init__(self) -> None:
        self.images: list[tuple[int, bool]] = []  # before which step, in order; whether the disk syncs
        self.forgotten = self.unreadable = 0

    def look(self, steps: list[Step], receiver: Receiver, place: Path) -> None:
        """Make each image, and have a store read it."""
        dice, image, done = random.Random(1), Image(synced=self.images[0][1]), 0
        for number, _ in self.images:
            for step in steps[done:number]:
                image.take(step)
            done = number
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o700)
            for path, content in image.cut(dice).items():
                (place / Path(path).name).write_bytes(content)
            self._read(place, {one for one, _ in receiver.accepted_by(steps[number].time)})

    def _read(self, place: Path, accepted: set[str]) -> None:
        store = Store(place, Clock())
        records = [msgspec.json.decode(record) for record in store.history(None, 1_000_000).records]
        known = {delivery_id(record["azure.scheduled_event.change_id"], "hook") for record in records}
        self.unreadable += store.file.damaged + store.unreadable_rows
        self.forgotten += bool(accepted - known)
        store.close()


# ---- the leader's agent comes and goes

GROUP = ("127.0.0.11", "127.0.0.12", "127.0.0.13", "127.0.0.14", "127.0.0.15")  # VMs, named as they are reached
RANK = 10.0  # seconds that each next VM waits for the ones before it
LEADER = {"leader": True, "leader-alone": False}  # mode -> the agents can ask each other (`peers`)
MODES = ["kills", "power-cut", *FAULTS, *LEADER]


class Life:
    """One agent of the group, and when it worked."""

    def __init__(self, name: str, config: Path, simulator: Simulator) -> None:
        self._name = name
        self._command = run_command(config, simulator, config.parent / name, name)
        self._agent: subprocess.Popen[bytes] | None = None
        self.up: list[tuple[float, float]] = []  # monotonic seconds, from its first answer until it was asked to stop

    def begin(self) -> None:
        self._agent = start(self._command, NOTBEFORE_VM__NAME=self._name)
        while not _answers(self._name):
            time.sleep(0.05)
        self.up.append((time.monotonic(), float("inf")))

    def end(self, number: int) -> None:
        self.up[-1] = (self.up[-1][0], time.monotonic())
        if self._agent is not None:
            self._agent.send_signal(number)
            self._agent.wait(30)

    def works(self, since: float, until: float) -> bool:
        return any(begun <= since and until <= ended for begun, ended in self.up)


def _answers(host: str) -> bool:
    connection = http.client.HTTPConnection(host, PORT, timeout=1)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    return False


def leader(mode: str, rounds: int) -> bool:
    """The agent of the first VM of five is killed or stopped, and started again; the others live on."""
    receiver, begun = Receiver(), time.monotonic()
    receiver.calm = True
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory, Simulator(GROUP) as simulator:
        peers = {"peers": {"url": f"http://{{vm}}:{PORT}/readyz"}} if LEADER[mode] else {}
        route = {"sinks": ["hook"], "announce_by": "leader"}
        config = configuration(Path(directory), receiver, routes=[route], **peers)
        group = [Life(name, config, simulator) for name in GROUP]
        world = World(simulator, (4.0, 8.0), GROUP)
        if random.random() < 0.5:  # it is down from the beginning
            group[0].begin()
        for one in group[1:]:
            one.begin()
        world.start()
        for _ in range(rounds):
            time.sleep(random.uniform(1, 25))
            if not group[0].works(time.monotonic(), time.monotonic()):
                group[0].begin()
            else:
                group[0].end(random.choice([signal.SIGKILL, signal.SIGTERM]))
        world.stop()
        time.sleep(RANK + LATE + 2)
        for one in reversed(group):  # else one that waits for those before it finds them gone, and sends
            if one.works(time.monotonic(), time.monotonic()):
                one.end(signal.SIGTERM)
    return leader_account(mode, group[0], world, receiver, time.monotonic() - begun)


def leader_account(mode: str, first: Life, world: World, receiver: Receiver, took: float) -> bool:
    """While the first VM's agent works, one VM's message of each step, at once; else the second one's, a rank later.

    The first one may be back before that, but it may have missed what was listed only while it was gone.

    What the event has left behind by then need not be sent. Where the first one came or went meanwhile, two may come.
    """
    times: dict[tuple[str, str], list[float]] = {}
    senders: dict[tuple[str, str], set[str]] = {}
    for (_, event, kind), at, sender in zip(receiver.taken, receiver.times, receiver.senders, strict=True):
        of = (event, kind if kind in ("announced", "started") else "over")
        times.setdefault(of, []).append(at)
        senders.setdefault(of, set()).add(sender)
    lost, late, many, twice = [], [], [], 0
    repeated = len(receiver.taken) - sum(map(len, senders.values()))  # by a courier that was killed before it noted it
    for (event, step), shown in world.shown.items():
        possible = shown if first.works(shown, shown + LATE) else shown + RANK
        following = [at for (other, _), at in world.shown.items() if other == event and at > shown]
        moved_on = min(following, default=float("inf")) < possible + LATE
        found, by = times.get((event, step), []), senders.get((event, step), set())
        if not found and not moved_on:
            lost.append((event, step))
        elif found and min(found) > possible + LATE and not moved_on:
            late.append((event, step, round(min(found) - shown, 1)))
        most = 1 if LEADER[mode] and first.works(shown - 1, shown + RANK + LATE) else 2
        twice += len(by) == 2
        if len(by) > most:
            many.append((event, step, sorted(by)))
    print(f"{mode}: leader up {len(first.up)} times, {world.begun} events, {len(world.shown)} steps, {took:.0f} s")
    print(f"{mode}: LOST {len(lost)} (bar: 0), LATE {len(late)} (bar: 0), too many {len(many)} (bar: 0), "
          f"of two VMs {twice}, repeated by one VM {repeated}", *lost[:5], *late[:5], *many[:5])  # fmt: skip
    return bool(lost or late or many)


def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "error", **variables}
    log = None if os.environ.get("SHOW_LOG") else subprocess.DEVNULL
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)


def kill_often(
    command: list[str], kills: int, pause: tuple[float, float] = (0.02, 0.9), **variables: str
) -> collections.Counter[str]:
    """Kill now the agent, now the courier; what was killed how often. ``pause``: seconds between two kills."""
    killed: collections.Counter[str] = collections.Counter()
    agent = start(command, **variables)
    while killed.total() < kills:
        time.sleep(random.uniform(*pause))
        if random.random() < 0.5:
            agent.kill()
            agent.wait()
            killed["agent"] += 1
            agent = start(command, **variables)
            continue
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        with suppress(OSError, IndexError, ValueError):
            os.kill(int(children.read_text(encoding="ascii").split()[0]), signal.SIGKILL)
            killed["courier"] += 1
    agent.kill()
    agent.wait()
    return killed


def drain(state: Path) -> bool:
    """Have what is left sent without further pauses; whether all of it went."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(1)
        waiting = told("outbox", "list", "--state", "pending", "--state-dir", str(state))
        if not waiting:
            return True
        later = datetime.now(UTC) + timedelta(seconds=2)
        far = [one["delivery_id"] for one in waiting if datetime.fromisoformat(one["due"]) > later]
        if far:
            told("outbox", "retry", *far, "--state-dir", str(state))
    return False


def told(*command: str) -> list[dict[str, Any]]:
    """What a command prints, as an operator would use it."""
    done = subprocess.run(
        [sys.executable, "-m", "notbefore", *command, "--json"], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(state: Path, receiver: Receiver, killed: collections.Counter[str], counted: dict[str, int]) -> bool:
    """What the agent recorded against what the receiver has; returns whether anything was lost or out of order."""
    history = told("history", "--state-dir", str(state), "--limit", "1000000")
    expected = {delivery_id(change["azure.scheduled_event.change_id"], "hook") for change in history}
    taken = collections.Counter(found for found, _, _ in receiver.taken)
    first = dict.fromkeys((key, kind) for _, key, kind in receiver.taken)
    order: dict[str, list[str]] = {}
    for key, kind in first:
        order.setdefault(key, []).append(kind)
    rank = {"announced": 0, "started": 1, "canceled": 2, "finished": 2, "ended": 2}
    swapped = sum([rank[kind] for kind in kinds] != sorted(rank[kind] for kind in kinds) for kinds in order.values())
    print(f"killed {dict(killed)}; the receiver's answers {dict(receiver.answers)}")
    print(f"changes recorded {len(history)}, deliveries taken {len(taken)}, counted {counted}")
    lost, unknown = len(expected - taken.keys()), len(taken.keys() - expected)
    print(f"LOST {lost} (bar: 0); unknown ids {unknown}; swapped {swapped} (bar: 0)")
    print(f"repeated under the same id: {taken.total() - len(taken)}")
    return bool(lost or swapped)


def counts() -> dict[str, int]:
    """What the agent has counted of its deliveries."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    with closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.findall(r'^notbefore_deliveries_total\{result="(\w+)",sink="hook"\} (\d+)', text, re.MULTILINE)
    return {name: int(count) for name, count in found}


if __name__ == "__main__":
    main()
