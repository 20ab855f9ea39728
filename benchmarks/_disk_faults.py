"""Faults of the disk and of the state file, for ``kills.py``.

A fault is inflicted and healed again and again, while scheduled events come, start and go. Each
step that Azure listed must arrive within 5 s of the list. How an event ended is not judged.

To add a mode: a function that inflicts a fault and heals it, and a line in ``FAULTS``.
"""

import fcntl
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from _machine import first_child
from _scene import SELDOM, Scene, out_of_order, prepared_scene, start, wait_for_agent

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.store.file import FILE_NAME
from support.agent import eventually
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk

LATE: Final = 5.0  # seconds
SHOWN: Final = 5  # steps that are lost or late
FIFREEZE: Final = 0xC0045877  # linux/fs.h
FITHAW: Final = 0xC0045878

# shell commands; $0 is the state directory
SMALL_DISK: Final = 'mount -t tmpfs -o size=2m,mode=0700 tmpfs "$0" && '
LOOP_DISK: Final = (
    'truncate -s 64M "$0.img" && mkfs.ext4 -q "$0.img" && mount -o loop "$0.img" "$0" && chmod 700'
    ' "$0" && '
)
# a service manager with `Restart=always`; "$@" is the agent's command
MANAGER: Final = 'trap "kill \\$!; wait; exit" TERM; while :; do "$@" & wait $!; done'


@dataclass(frozen=True)
class Target:
    """Where a fault is inflicted."""

    state: Path  # the state directory
    disk: HangingDisk  # of the state directory, for the agent and its courier alone
    manager: subprocess.Popen[bytes]  # starts the agent whenever it has ended

    @property
    def mounted_state(self) -> Path:
        """The state directory with the disk that is mounted for the agent."""
        return Path(f"/proc/{self.manager.pid}/root{self.state}")


@dataclass(frozen=True)
class Fault:
    """A fault, and what it needs."""

    inflict: Callable[[Target, float], None]  # for so many seconds; healed when it returns
    mount: str = ""  # mounts a disk on the state directory
    loses_memory: bool = False  # what only memory knew is lost: counted, but no failure


def full_disk(target: Target, seconds: float, *, killed: bool = False) -> None:
    """Fill the disk. ``killed``: kill the agent, which forgets what only its memory knew."""
    filler = target.mounted_state / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    time.sleep(seconds / 2)
    if killed:
        agent = eventually(lambda: first_child(target.manager.pid))
        os.kill(agent, signal.SIGKILL)
    time.sleep(seconds / 2)
    filler.unlink()


def file_replaced(target: Target, seconds: float) -> None:
    """Restore an older state file, overwrite or truncate the file, or fill it with nonsense."""
    path = target.state / FILE_NAME
    with suppress(OSError):  # the agent is creating the file again
        older = path.read_bytes()
        time.sleep(seconds / 2)
        replace = random.choice([restore, overwrite, truncate, fill_with_nonsense])
        replace(path, older)
    time.sleep(seconds / 2)


def restore(path: Path, older: bytes) -> None:
    copy = path.with_name("restored")
    copy.write_bytes(older)
    copy.rename(path)


def overwrite(path: Path, older: bytes) -> None:
    with path.open("r+b") as file:
        file.write(older)
        file.truncate()


def truncate(path: Path, older: bytes) -> None:
    os.truncate(path, random.choice([0, 100, len(older) // 2]))


def fill_with_nonsense(path: Path, older: bytes) -> None:
    path.write_bytes(random.randbytes(len(older)))


def file_deleted(target: Target, seconds: float) -> None:
    """Delete the state file, or everything in the state directory."""
    pattern = random.choice(["*", FILE_NAME])
    for path in target.state.glob(pattern):
        path.unlink(missing_ok=True)
    time.sleep(seconds / 2)


def hung_disk(target: Target, seconds: float) -> None:
    """Let writes, or all uses of the disk, hang."""
    target.disk.hang(random.choice([WRITES, EVERYTHING]))
    time.sleep(seconds)
    target.disk.resume()


def frozen_disk(target: Target, seconds: float) -> None:
    """Block writers in the kernel, where no signal ends them (state D)."""
    directory = os.open(target.mounted_state, os.O_RDONLY)
    fcntl.ioctl(directory, FIFREEZE, 0)
    time.sleep(seconds)
    fcntl.ioctl(directory, FITHAW, 0)
    os.close(directory)


FAULTS: Final = {
    "full-disk": Fault(full_disk, SMALL_DISK),
    "file-deleted": Fault(file_deleted),
    "file-replaced": Fault(file_replaced),
    "sick-kills": Fault(partial(full_disk, killed=True), SMALL_DISK, loses_memory=True),
    "hung-disk": Fault(hung_disk),
    "frozen-disk": Fault(frozen_disk, LOOP_DISK),
}


def inflict(mode: str, rounds: int) -> bool:
    """Inflict one fault again and again; return whether anything was lost, late or out of order."""
    fault = FAULTS[mode]
    started = time.monotonic()
    with prepared_scene(SELDOM, calm=True) as scene:
        disk = HangingDisk(scene.state, scene.directory)
        shell = ["unshare", "--mount", "sh", "-c", fault.mount + MANAGER, str(scene.state)]
        manager = start([*shell, *scene.command], **disk.variables)
        wait_for_agent(scene.port)
        scene.world.start()
        target = Target(scene.state, disk, manager)
        for _ in range(rounds):
            time.sleep(random.uniform(0.5, 3))
            fault.inflict(target, random.uniform(1, 6))
        scene.world.stop()
        time.sleep(LATE + 2)
        manager.terminate()
        manager.wait(30)
    seconds = time.monotonic() - started

    print(f"{mode}: {rounds} times in {seconds:.0f} s, {len(scene.world.shown)} steps")
    is_wrong = judge(mode, scene)
    return is_wrong and not fault.loses_memory


def judge(mode: str, scene: Scene) -> bool:
    """Compare what Azure listed with what arrived, print it, and return whether it is wrong."""
    shown = scene.world.shown
    arrivals = scene.receiver.arrivals()
    lost = sorted(shown.keys() - arrivals.keys())
    delays = {step: arrivals[step] - shown[step] for step in shown if step in arrivals}
    late = sorted(step for step, delay in delays.items() if delay > LATE)
    swapped = out_of_order(arrivals)
    ids = Counter(delivery.delivery_id for delivery in scene.receiver.received)
    repeated = ids.total() - len(ids)
    print(
        f"{mode}: LOST {len(lost)} (limit: 0), LATE {len(late)} (limit: 0), events out of order"
        f" {swapped} (limit: 0)"
    )
    print(f"{mode}: repeated {repeated}, with other ids {len(ids) - len(arrivals)}")
    if delays:
        median = statistics.median(delays.values())
        longest = max(delays.values())
        print(f"{mode}: delay {median:.2f} s (median), {longest:.2f} s (longest)")
    for step in (lost + late)[:SHOWN]:
        print(f"{mode}: lost or late: {step.event_id} {step.step}")
    return bool(lost or late or swapped)
