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
"""

import argparse
import collections
import fcntl
import http.client
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from _machine import Receiver

from notbefore.core.delivery import delivery_id
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from notbefore.store.file import FILE_NAME
from notbefore.store.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.agent import free_port, get, notbefore
from support.azure import FUTURE, body, item
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk
from support.recorded_disk import Image, RecordedDisk, Step

FLOWS = 20
LATE = 5.0  # seconds after the moment from which on a delivery was possible
SLOWLY = (1.2, 2.2)  # seconds between two lists: the agent polls each 0.2 s, and waits 0.5 s for a lock
PORT = free_port()


MOODS = {"take": 60, "fail": 15, "take and say 500": 10, "cut": 5, "take and cut": 5, "hang": 3, "throttle": 2}
"""What a receiver that is not calm does with a delivery, by weight."""


class Moody(Receiver):
    """A receiver that fails, lies and hangs, until it is told to be calm; it counts what it did."""

    def __init__(self) -> None:
        self.answers: collections.Counter[str] = collections.Counter()
        self.calm = False
        super().__init__(self.choose)

    def choose(self) -> str:
        mood = "take" if self.calm else random.choices(list(MOODS), list(MOODS.values()))[0]
        self.answers[mood] += 1
        return mood

    @property
    def steps(self) -> Iterator[tuple[str, str, float]]:
        """What it has taken, in order: the event's id in lower case, the kind of the message, when."""
        for one in self.taken:
            record = one.record
            yield record["azure.scheduled_event.id"].casefold(), record["notbefore.delivery.kind"], one.at


class World(threading.Thread):
    """Scheduled events that come, start and go: always 20 at a time, until asked to stop.

    ``pace``: the shortest and the longest time between two lists, in seconds. ``shown``: when each step was listed.
    """

    def __init__(self, simulator: Simulator, pace: tuple[float, float] = (0.2, 0.9)) -> None:
        super().__init__(daemon=True)
        self._simulator = simulator
        self._pace = pace
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
            item(event_id, EventStatus=status, NotBefore=FUTURE if status == "Scheduled" else "")
            for event_id, status in listed.items()
        ]
        self._simulator.set_document(body(*events, incarnation=incarnation))

    def stop(self) -> None:
        self._over.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modes",
        nargs="*",
        choices=["kills", "power-cut", *FAULTS],
        default="kills",
        metavar="MODE",
        help=" | ".join(["kills", "power-cut", *FAULTS]),
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
        else:
            bad += inflict(mode, options.rounds)
    sys.exit(1 if bad else 0)


def configuration(directory: Path, receiver: Receiver) -> Path:
    path = directory / "notbefore.yaml"
    hook = {"url": receiver.url, "allow_private": True, "timeout": "1s", "expire_on_end": False}
    path.write_text(json.dumps({"sinks": {"hook": {"webhook": hook}}}), encoding="utf-8")
    return path


def run_command(config: Path, simulator: Simulator, state: Path) -> list[str]:
    command = [sys.executable, "-m", "notbefore", "run", str(config), "--imds", simulator.endpoint]
    return [*command, "--state-dir", str(state), "--listen", f"127.0.0.1:{PORT}"]


def kills(count: int) -> bool:
    receiver = Moody()
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


# ---- faults of the disk and of the state file


class Place(NamedTuple):
    """Where a fault is inflicted."""

    state: Path  # the state directory, as the agent sees it
    disk: HangingDisk  # the state directory's, for the agent and the courier alone
    manager: subprocess.Popen[bytes]  # starts the agent, whenever it has ended

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
    "hung-disk": Fault(hung_disk),
    "frozen-disk": Fault(frozen_disk, LOOP_DISK),
}


def inflict(mode: str, rounds: int) -> bool:
    """Inflict one fault again and again; prints the account, and returns whether anything was lost or late."""
    fault, receiver, begun = FAULTS[mode], Moody(), time.monotonic()
    receiver.calm = True
    with tempfile.TemporaryDirectory() as directory, Simulator(("WestNO_0",)) as simulator:
        state = Path(directory) / "state"
        disk = HangingDisk(state, Path(directory))
        state.mkdir()
        inside = ("unshare", "--mount", "sh", "-c", fault.mount + MANAGER, str(state))
        command = run_command(configuration(Path(directory), receiver), simulator, state)
        manager = start([*inside, *command], **disk.variables)
        while not _answers():
            time.sleep(0.05)
        world = World(simulator, SLOWLY)
        world.start()
        for _ in range(rounds):
            time.sleep(random.uniform(0.5, 3))
            fault.inflict(Place(state, disk, manager), random.uniform(1, 6))
        world.stop()
        time.sleep(LATE + 2)
        manager.terminate()
        manager.wait(30)
    return account(mode, rounds, world, receiver, time.monotonic() - begun) and not fault.loses


def account(mode: str, rounds: int, world: World, receiver: Moody, took: float) -> bool:
    """What Azure listed against what the receiver has; how an event ended is not for this command to judge."""
    arrived: dict[tuple[str, str], float] = {}
    order: dict[str, list[str]] = {}
    for event, kind, at in receiver.steps:
        step = kind if kind in ("announced", "started") else "over"
        if (event, step) not in arrived:
            arrived[event, step] = at
            order.setdefault(event, []).append(step)
    delays = {step: arrived[step] - shown for step, shown in world.shown.items() if step in arrived}
    lost = sorted(world.shown.keys() - arrived.keys())
    late = sorted(step for step, delay in delays.items() if delay > LATE)
    ids = collections.Counter(one.delivery_id for one in receiver.taken)
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
    receiver = Moody()
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
            self._read(place, {one.delivery_id for one in receiver.taken if one.at < steps[number].time})

    def _read(self, place: Path, accepted: set[str]) -> None:
        store = Store(place, Clock())
        records = [msgspec.json.decode(record) for record in store.history(None, 1_000_000)[0]]
        known = {delivery_id(record["azure.scheduled_event.change_id"], "hook") for record in records}
        self.unreadable += store.disk.file.damaged + store.disk.file.unreadable_rows
        self.forgotten += bool(accepted - known)
        store.close()


def _answers() -> bool:
    with suppress(OSError, http.client.HTTPException):
        return get(PORT, "/readyz")[0] == http.HTTPStatus.OK
    return False


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
    done = notbefore(*command, "--json")
    if done.returncode:
        raise SystemExit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(state: Path, receiver: Moody, killed: collections.Counter[str], counted: dict[str, int]) -> bool:
    """What the agent recorded against what the receiver has; returns whether anything was lost or out of order."""
    history = told("history", "--state-dir", str(state), "--limit", "1000000")
    expected = {delivery_id(change["azure.scheduled_event.change_id"], "hook") for change in history}
    taken = collections.Counter(one.delivery_id for one in receiver.taken)
    order: dict[str, list[str]] = {}
    for key, kind in dict.fromkeys((key, kind) for key, kind, _ in receiver.steps):
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
    text = get(PORT, "/metrics")[1].decode()
    found = re.findall(r'^notbefore_deliveries_total\{result="(\w+)",sink="hook"\} (\d+)', text, re.MULTILINE)
    return {name: int(count) for name, count in found}


if __name__ == "__main__":
    main()
