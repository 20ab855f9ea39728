"""Whether anything is lost or late: ``python benchmarks/kills.py [MODE ...] [--rounds N] [--seed N]``.

`kills` (what is run without a mode): the real agent and its courier are killed (SIGKILL) at random moments while 20
scheduled events at a time come, start and go, and while the receiver fails, hangs, cuts, and lies (takes a delivery and
says that it did not). At the end every change that the agent ever recorded must have arrived; each repetition must
carry the id of the first.

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
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from notbefore.core.delivery import delivery_id
from notbefore.simulator.server import Simulator
from notbefore.store.disk import DiskThread
from notbefore.store.history import read_history
from notbefore.store.outbox import Outbox
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.state_file import FILE_NAME

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk
from support.installed import VERSION, Installed
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
            kills(options.kills)
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


def kills(count: int) -> None:
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
        drained = drain(Path(directory) / FILE_NAME)
        agent.terminate()
        agent.wait(30)
        report(Path(directory) / FILE_NAME, receiver, killed)
        print(f"events {world.begun}, drained {drained}, {time.monotonic() - begun:.0f} s")


# ---- faults of the disk, of the state file and of the clock


class Place(NamedTuple):
    """Where a fault is inflicted."""

    state: Path  # the state directory, as the agent sees it
    clock: WallClock  # of the agent and of the courier alone
    disk: HangingDisk  # the state directory's, for these two
    agent: subprocess.Popen[bytes]
    installed: Installed | None = None  # what the agent is run from, where that is to be another version


class Fault(NamedTuple):
    inflict: Callable[[Place, float], None]  # for so many seconds; healed when it returns
    inside: tuple[str, ...] = ()  # a command that the agent is run by; the state directory follows
    installs: bool = False
    variables: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


def full_disk(place: Place, seconds: float) -> None:
    disk = Path(f"/proc/{place.agent.pid}/root{place.state}")  # as the agent sees it
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    time.sleep(seconds)
    (disk / "filler").unlink()


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
    directory = os.open(f"/proc/{place.agent.pid}/root{place.state}", os.O_RDONLY)  # as the agent sees it
    fcntl.ioctl(directory, FIFREEZE, 0)
    time.sleep(seconds)
    fcntl.ioctl(directory, FITHAW, 0)
    os.close(directory)


def upgrade(place: Place, seconds: float) -> None:
    if place.installed is not None:
        place.installed.install(random.choice([place.installed.older, place.installed.newer]))
    time.sleep(seconds)


FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
LOOP_DISK = (
    "unshare", "--mount", "sh", "-c",
    'truncate -s 64M "$0.img" && mkfs.ext4 -q "$0.img" && mount -o loop "$0.img" "$0" && chmod 700 "$0" && exec "$@"',
)  # fmt: skip
SMALL_DISK = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m,mode=0700 tmpfs "$0" && exec "$@"')
FAULTS = {
    "full-disk": Fault(full_disk, SMALL_DISK),
    "no-memory": Fault(full_disk, SMALL_DISK, variables={"RUNTIME_DIRECTORY": "/proc/nowhere"}),  # nor a spare file
    "file-deleted": Fault(file_deleted),
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
        inside = (*fault.inside, str(state)) if fault.inside else ()
        command = run_command(configuration(Path(directory), receiver), simulator, state)
        installed = None
        if fault.installs:
            installed = Installed.make(Path(directory), {"pyproject.toml": (VERSION, 'version = "9.9.9"')})
            command[0] = str(installed.place / "bin" / "python")
        agent = start(
            [*inside, *command], **clock.variables | disk.variables | fault.variables | {"LD_PRELOAD": libraries}
        )
        while not _answers("127.0.0.1"):
            time.sleep(0.05)
        world = World(simulator, SLOWLY)
        world.start()
        for _ in range(rounds):
            time.sleep(random.uniform(0.5, 3))
            fault.inflict(Place(state, clock, disk, agent, installed), random.uniform(1, 6))
        world.stop()
        time.sleep(LATE + 2)
        agent.terminate()
        agent.wait(30)
    return account(mode, rounds, world, receiver, time.monotonic() - begun)


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


# ---- the leader's agent comes and goes

GROUP = ("127.0.0.11", "127.0.0.12", "127.0.0.13", "127.0.0.14", "127.0.0.15")  # VMs, named as they are reached
RANK = 10.0  # seconds that each next VM waits for the ones before it
LEADER = {"leader": True, "leader-alone": False}  # mode -> the agents can ask each other (`peers`)
MODES = ["kills", *FAULTS, *LEADER]


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
    reader = OutboxReader(path, DiskThread())
    reader.refresh()
    counts = {name: count for (_, name), count in reader.view.counts.items()}
    reader.close()
    first = dict.fromkeys((key, kind) for _, key, kind in receiver.taken)
    order: dict[str, list[str]] = {}
    for key, kind in first:
        order.setdefault(key, []).append(kind)
    rank = {"announced": 0, "started": 1, "canceled": 2, "finished": 2, "ended": 2}
    swapped = sum([rank[kind] for kind in kinds] != sorted(rank[kind] for kind in kinds) for kinds in order.values())
    print(f"killed {dict(killed)}; the receiver's answers {dict(receiver.answers)}")
    print(f"changes recorded {len(history)}, deliveries taken {len(taken)}, counted {counts}")
    lost, unknown = len(expected - taken.keys()), len(taken.keys() - expected)
    print(f"LOST {lost} (bar: 0); unknown ids {unknown}; swapped {swapped}")
    print(f"repeated under the same id: {taken.total() - len(taken)}")


if __name__ == "__main__":
    main()
