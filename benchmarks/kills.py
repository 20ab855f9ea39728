"""Whether anything is lost or late: ``python benchmarks/kills.py [MODE ...] [--rounds N] [--seed
N]``.

`kills` (what is run without a mode): the real agent and its courier are killed (SIGKILL) at random
moments while 20 scheduled events at a time come, start and go, and while the receiver fails, hangs,
cuts, and lies (takes a delivery and says that it did not). At the end every change that the agent
ever recorded must have arrived; each repetition must carry the id of the first.

`power-cut`: the same, with all writes and syncs of the state directory recorded. They are replayed
up to random moments, and what was not synced is there, is not, or is there in part.

The modes of ``FAULTS``: each inflicts one fault again and again, and heals it. What must arrive,
and by when, is not what the agent recorded but what Azure listed: each step of each event, 5 s
after the list had it. To add a mode: a function that inflicts and heals, and a line in ``FAULTS``.
"""

import argparse
import fcntl
import itertools
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
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
from support.agent import eventually, free_port, get, notbefore
from support.azure import FUTURE, ME, STARTED, body, item
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk
from support.recorded_disk import SYNC, Image, RecordedDisk, Step

FLOWS = 20
LATE = 5.0  # seconds after the moment from which on a delivery was possible
OFTEN = (0.2, 0.9)  # seconds between two lists
SLOWLY = (1.2, 2.2)  # the agent polls each 0.2 s, and waits 0.5 s for a lock
MOODS = {
    "take": 60,
    "fail": 15,
    "take and say 500": 10,
    "cut": 5,
    "take and cut": 5,
    "hang": 3,
    "throttle": 2,
}
STEPS = ("announced", "started", "over")


class Moody(Receiver):
    """A receiver that fails, lies and hangs, unless it is calm; it counts what it did."""

    def __init__(self, *, calm: bool) -> None:
        self.answers = Counter[str]()
        self.calm = calm
        super().__init__(self.choose)

    def choose(self) -> str:
        mood = "take" if self.calm else random.choices([*MOODS], [*MOODS.values()])[0]
        self.answers[mood] += 1
        return mood

    def arrived(self) -> dict[tuple[str, str], float]:
        """Return when each step of an event first arrived, in order of arrival."""
        arrivals: dict[tuple[str, str], float] = {}
        for delivery in self.taken:
            record = delivery.record
            step = record["notbefore.delivery.kind"]
            if step not in STEPS:
                step = "over"
            arrivals.setdefault((record["azure.scheduled_event.id"], step), delivery.at)
        return arrivals


class World(threading.Thread):
    """Scheduled events that come, start and go: always 20 at a time, until asked to stop.

    ``pace``: the shortest and the longest time between two lists, in seconds. ``shown``: when each
    step was listed.
    """

    def __init__(self, simulator: Simulator, pace: tuple[float, float]) -> None:
        super().__init__(daemon=True)
        self._simulator = simulator
        self._pace = pace
        self._over = threading.Event()
        self.shown: dict[tuple[str, str], float] = {}
        self.begun = 0

    def run(self) -> None:
        listed: dict[str, dict[str, Any]] = {}
        for incarnation in itertools.count(2):
            steps = []
            if over := self._over.wait(random.uniform(*self._pace)):
                time.sleep(self._pace[1])  # the last list is seen as long as the others
            for event in [*listed] if over else random.sample([*listed], min(2, len(listed))):
                if (
                    not over
                    and listed[event]["EventStatus"] == "Scheduled"
                    and random.random() < 0.8
                ):
                    listed[event] |= STARTED
                    steps.append((event, "started"))
                else:
                    del listed[event]
                    steps.append((event, "over"))
            while len(listed) < FLOWS and not over:
                self.begun += 1
                event = f"e-{self.begun}"
                listed[event] = item(event, NotBefore=FUTURE)
                steps.append((event, "announced"))
            self._simulator.set_document(body(*listed.values(), incarnation=incarnation))
            self.shown |= dict.fromkeys(steps, time.monotonic())
            if over:
                return

    def stop(self) -> None:
        """End everything."""
        self._over.set()
        self.join()


class Scene(NamedTuple):
    """The events, the receiver of their notifications, and the agent's command and state."""

    world: World
    receiver: Moody
    directory: Path
    state: Path
    command: list[str]
    port: int


@contextmanager
def scene(pace: tuple[float, float] = OFTEN, *, calm: bool = False) -> Iterator[Scene]:
    """Start everything except the agent and the events."""
    port = free_port()
    receiver = Moody(calm=calm)
    with tempfile.TemporaryDirectory() as name, Simulator((ME,)) as simulator:
        directory = Path(name)
        state = Path(name) / "state"
        state.mkdir(mode=0o700)
        hook = {"url": receiver.url, "allow_private": True, "timeout": "1s", "expire_on_end": False}
        config = directory / "notbefore.yaml"
        config.write_text(json.dumps({"sinks": {"hook": {"webhook": hook}}}), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "notbefore",
            "run",
            str(config),
            "--imds",
            simulator.endpoint,
        ]
        command += ["--state-dir", str(state), "--listen", f"127.0.0.1:{port}"]
        yield Scene(World(simulator, pace), receiver, directory, state, command, port)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = ["kills", "power-cut", *FAULTS]
    parser.add_argument(
        "modes", nargs="*", choices=[*modes, []], metavar="MODE", help=" | ".join(modes)
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="how often to kill (default 200; the claim is 2000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="how often to inflict each other fault (default 20)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    run = {"kills": partial(kills, options.kills), "power-cut": partial(power_cut, options.rounds)}
    run |= {mode: partial(inflict, mode, options.rounds) for mode in FAULTS}
    sys.exit(sum(run[mode]() for mode in options.modes or ["kills"]) > 0)


def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "NOTBEFORE_IMDS__INTERVAL": "200ms",
        "NOTBEFORE_LOG__LEVEL": "error",
        **variables,
    }
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def wait_for_agent(port: int) -> None:
    eventually(lambda: notbefore("health", "--url", f"http://127.0.0.1:{port}").returncode == 0)


def child(process: int) -> int:
    """The first child of a process, or 0."""
    with suppress(OSError, IndexError):
        return int(
            Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()[0]
        )
    return 0


def swapped(steps: Iterable[tuple[str, str]]) -> int:
    """The number of events whose steps came out of order."""
    order: dict[str, list[int]] = {}
    for event, step in steps:
        order.setdefault(event, []).append(STEPS.index(step))
    return sum(numbers != sorted(numbers) for numbers in order.values())


# ---- kills


def kills(count: int) -> bool:
    """What the agent recorded against what the receiver has.

    Returns whether anything was lost or out of order.
    """
    begun = time.monotonic()
    with scene() as setting:
        setting.world.start()
        killed = kill_often(setting.command, count)
        setting.receiver.calm = True
        agent = start(setting.command)
        wait_for_agent(setting.port)
        time.sleep(2)
        setting.world.stop()
        time.sleep(2)
        drained = drain(setting.state)
        metrics = get(setting.port, "/metrics")[1].decode()
        agent.terminate()
        agent.wait(30)
        history = json_lines("history", "--state-dir", setting.state, "--since", "1d")
    counted = re.findall(
        r'(?m)^notbefore_deliveries_total\{result="(\w+)",sink="hook"\} (\d+)', metrics
    )
    expected = {
        delivery_id(change["azure.scheduled_event.change_id"], "hook") for change in history
    }
    taken = Counter(delivery.delivery_id for delivery in setting.receiver.taken)
    out_of_order = swapped(setting.receiver.arrived())
    lost = len(expected - taken.keys())
    unknown = len(taken.keys() - expected)
    print(f"killed {dict(killed)}; the receiver's answers {dict(setting.receiver.answers)}")
    print(
        f"changes recorded {len(history)}, deliveries taken {len(taken)}, counted {dict(counted)}"
    )
    print(f"LOST {lost} (bar: 0); unknown ids {unknown}; swapped {out_of_order} (bar: 0);", end=" ")
    print(
        f"repeated {taken.total() - len(taken)}; drained {drained},"
        f" {time.monotonic() - begun:.0f} s"
    )
    return bool(lost or out_of_order or not drained)


def kill_often(
    command: list[str], times: int, pause: tuple[float, float] = (0.02, 0.9), **variables: str
) -> Counter[str]:
    """Kill the agent or the courier at random; count the kills of each.

    ``pause``: seconds between two kills.
    """
    killed = Counter[str]()
    agent = start(command, **variables)
    while killed.total() < times:
        time.sleep(random.uniform(*pause))
        if random.random() < 0.5:
            agent.kill()
            agent.wait()
            killed["agent"] += 1
            agent = start(command, **variables)
        elif courier := child(agent.pid):
            with suppress(ProcessLookupError):
                os.kill(courier, signal.SIGKILL)
                killed["courier"] += 1
    agent.kill()
    agent.wait()
    return killed


def drain(state: Path) -> bool:
    """Retry all pending deliveries without pauses; return whether all of them succeeded."""
    deadline = time.monotonic() + 300
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
    deliveries = json_lines("outbox", "list", "--state-dir", state)
    return [delivery["delivery_id"] for delivery in deliveries if delivery["state"] == "pending"]


def json_lines(*command: object) -> list[dict[str, Any]]:
    result = notbefore(*command, "--json")
    assert result.returncode == 0, result.stderr  # noqa: S101 - an empty list would hide losses
    return [json.loads(line) for line in result.stdout.splitlines()]


# ---- faults of the disk and of the state file


class Place(NamedTuple):
    """Where a fault is inflicted."""

    state: Path  # the state directory, as the agent sees it
    disk: HangingDisk  # the state directory's, for the agent and the courier alone
    manager: subprocess.Popen[bytes]  # starts the agent, whenever it has ended

    @property
    def disk_of_agent(self) -> Path:
        """The state directory, as the agent sees it."""
        return Path(f"/proc/{self.manager.pid}/root{self.state}")


class Fault(NamedTuple):
    inflict: Callable[[Place, float], None]  # for so many seconds; healed when it returns
    mount: str = ""  # what puts a disk on the state directory, $0
    loses: bool = False  # what only memory knew: it is counted, and no failure


def full_disk(place: Place, seconds: float, *, killed: bool = False) -> None:
    """``killed``: meanwhile the agent is, and forgets what only its memory knew."""
    with (place.disk_of_agent / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    time.sleep(seconds / 2)
    if killed:
        os.kill(eventually(lambda: child(place.manager.pid)), signal.SIGKILL)
    time.sleep(seconds / 2)
    (place.disk_of_agent / "filler").unlink()


def file_replaced(place: Place, seconds: float) -> None:
    """Replace, overwrite or truncate the file, or fill it with nonsense."""
    path = place.state / FILE_NAME
    with suppress(OSError):  # the agent is creating the file again
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
    place.disk.resume()


def frozen_disk(place: Place, seconds: float) -> None:
    """Block writers in the kernel, where no signal ends them (state D)."""
    directory = os.open(place.disk_of_agent, os.O_RDONLY)
    fcntl.ioctl(directory, FIFREEZE, 0)
    time.sleep(seconds)
    fcntl.ioctl(directory, FITHAW, 0)
    os.close(directory)


FIFREEZE = 0xC0045877  # linux/fs.h
FITHAW = 0xC0045878
# a service manager with `Restart=always`
MANAGER = 'trap "kill \\$!; wait; exit" TERM; while :; do "$@" & wait $!; done'
LOOP_DISK = (
    'truncate -s 64M "$0.img" && mkfs.ext4 -q "$0.img" && mount -o loop "$0.img" "$0" && chmod 700'
    ' "$0" && '
)
SMALL_DISK = 'mount -t tmpfs -o size=2m,mode=0700 tmpfs "$0" && '
FAULTS = {
    "full-disk": Fault(full_disk, SMALL_DISK),
    "file-deleted": Fault(file_deleted),
    "file-replaced": Fault(file_replaced),
    "sick-kills": Fault(partial(full_disk, killed=True), SMALL_DISK, loses=True),
    "hung-disk": Fault(hung_disk),
    "frozen-disk": Fault(frozen_disk, LOOP_DISK),
}


def inflict(mode: str, rounds: int) -> bool:
    """Inflict one fault again and again; what Azure listed against what the receiver has.

    How an event ended is not for this mode to judge. Returns whether anything was lost or late.
    """
    fault = FAULTS[mode]
    begun = time.monotonic()
    with scene(SLOWLY, calm=True) as setting:
        disk = HangingDisk(setting.state, setting.directory)
        inside = ["unshare", "--mount", "sh", "-c", fault.mount + MANAGER, str(setting.state)]
        manager = start([*inside, *setting.command], **disk.variables)
        wait_for_agent(setting.port)
        setting.world.start()
        for _ in range(rounds):
            time.sleep(random.uniform(0.5, 3))
            fault.inflict(Place(setting.state, disk, manager), random.uniform(1, 6))
        setting.world.stop()
        time.sleep(LATE + 2)
        manager.terminate()
        manager.wait(30)
    arrived = setting.receiver.arrived()
    delays = {
        step: arrived[step] - shown
        for step, shown in setting.world.shown.items()
        if step in arrived
    }
    lost = sorted(setting.world.shown.keys() - arrived.keys())
    late = sorted(step for step, delay in delays.items() if delay > LATE)
    ids = Counter(delivery.delivery_id for delivery in setting.receiver.taken)
    out_of_order = swapped(arrived)
    ordered = sorted(delays.values()) or [0.0]
    seconds = time.monotonic() - begun
    print(f"{mode}: {rounds} times, {len(setting.world.shown)} steps, {seconds:.0f} s")
    print(
        f"{mode}: LOST {len(lost)} (bar: 0), LATE {len(late)} (bar: 0), out of order {out_of_order}"
        " (bar: 0)"
    )
    print(
        f"{mode}: repeated {ids.total() - len(ids)}, of other ids {len(ids) - len(arrived)};",
        end=" ",
    )
    print(
        f"delay {ordered[len(ordered) // 2]:.2f} s (median), {ordered[-1]:.2f} s (longest)",
        *lost[:5],
        *late[:5],
    )
    return bool(lost or late or out_of_order) and not fault.loses


# ---- a cut of the power


def power_cut(rounds: int) -> bool:
    """What an agent writes is recorded.

    Then it is replayed up to a random moment, 50 times a round.

    What the receiver had accepted by then has to be in the history, and the file readable. The
    control, a disk that syncs nothing, has to fail: else nothing was tried.
    """
    logging.disable()  # the control has many damaged files
    failures = {}
    with scene() as setting:
        disk = RecordedDisk(setting.state, setting.directory)
        setting.world.start()
        killed = kill_often(setting.command, rounds, (2.0, 6.0), **disk.variables)
        setting.world.stop()
        steps = disk.steps()
        syncs = sum(step.call == SYNC for step in steps)
        print(
            f"power-cut: {len(steps)} writes and syncs ({syncs}), agent and courier killed"
            f" {killed.total()} times"
        )
        for synced, name, bar in ((True, "", "0, 0"), (False, ", the control", "more")):
            cuts = sorted(random.choices(range(len(steps)), k=50 * rounds))
            found = [
                broken(
                    image,
                    {one.delivery_id for one in setting.receiver.taken if one.at < steps[cut].time},
                )
                for cut, image in zip(
                    cuts,
                    images(steps, cuts, setting.directory / "image", synced=synced),
                    strict=True,
                )
            ]
            forgotten, unreadable = map(sum, zip(*found, strict=True))
            print(f"power-cut{name}: {len(cuts)} images, told and forgotten {forgotten},", end=" ")
            print(f"unreadable {unreadable} (bar: {bar})")
            failures[synced] = forgotten + unreadable
    return failures[True] > 0 or failures[False] == 0


def images(steps: list[Step], cuts: list[int], place: Path, *, synced: bool) -> Iterator[Path]:
    """The state directory after a cut of the power before each of these steps.

    ``synced``: the disk syncs.
    """
    dice = random.Random(1)
    image = Image(synced=synced)
    done = 0
    for cut in cuts:
        for step in steps[done:cut]:
            image.take(step)
        done = cut
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        for path, content in image.cut(dice).items():
            (place / Path(path).name).write_bytes(content)
        yield place


def broken(place: Path, accepted: set[str]) -> tuple[int, int]:
    """Return whether the store lost an accepted delivery, and how much it could not read."""
    store = Store(place, Clock())
    records = [msgspec.json.decode(record) for record in store.history(None, 1_000_000).records]
    stored = {delivery_id(record["azure.scheduled_event.change_id"], "hook") for record in records}
    store.close()
    return bool(accepted - stored), store.disk.file.damaged


if __name__ == "__main__":
    main()
