"""A cut of the power, for ``kills.py``.

All writes and syncs of an agent are recorded, while it and its courier are killed. Then they are
replayed up to random moments, 50 for each round. What was not synced is there, is not, or is there
in part. Each delivery that the receiver had accepted by then must be in the history, and the file
must be readable.

The control replays the same on a disk that syncs nothing. It must fail, or else nothing was tested.
"""

import logging
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from _scene import Scene, kill_often, prepared_scene

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.delivery import delivery_id
from notbefore.process.clock import Clock
from notbefore.store.store import Store
from support.recorded_disk import SYNC, Image, RecordedDisk, Step

KILL_PAUSE: Final = (2.0, 6.0)  # seconds between two kills, at least and at most
CUTS: Final = 50  # for each round
EVERYTHING: Final = 1_000_000  # records of the history


def power_cut(rounds: int) -> bool:
    """Cut the power at random moments; return whether anything was lost, or the control was not."""
    logging.disable()  # the control has many damaged files
    with prepared_scene() as scene:
        disk = RecordedDisk(scene.state, scene.directory)
        scene.world.start()
        killed = kill_often(scene.command, rounds, KILL_PAUSE, **disk.variables)
        scene.world.stop()

        steps = disk.steps()
        syncs = sum(step.call == SYNC for step in steps)
        print(
            f"power-cut: {len(steps)} writes and syncs ({syncs} syncs), agent and courier killed"
            f" {killed.total()} times"
        )
        losses = replay(scene, steps, CUTS * rounds, synced=True)
        losses_of_control = replay(scene, steps, CUTS * rounds, synced=False)
    return losses > 0 or losses_of_control == 0


def replay(scene: Scene, steps: list[Step], count: int, *, synced: bool) -> int:
    """Cut the power so many times, print what was lost, and return how often.

    ``synced``: the disk syncs.
    """
    cuts = sorted(random.choices(range(len(steps)), k=count))
    directory = scene.directory / "image"
    forgetful = 0
    unreadable = 0
    for cut in images(steps, cuts, directory, synced=synced):
        accepted: set[str] = set()
        for delivery in scene.receiver.received:
            if delivery.at < steps[cut].time:
                accepted.add(delivery.delivery_id)

        store = Store(directory, Clock())
        forgetful += bool(accepted - stored_deliveries(store))
        store.close()
        unreadable += store.disk.file.damaged

    name = "power-cut"
    limit = "0"
    if not synced:
        name = "power-cut, the control"
        limit = "more than 0"
    print(
        f"{name}: {count} images, an accepted delivery forgotten in {forgetful}, unreadable files"
        f" {unreadable} (limit: {limit})"
    )
    return forgetful + unreadable


def images(steps: list[Step], cuts: list[int], directory: Path, *, synced: bool) -> Iterator[int]:
    """Fill the directory as a cut of the power before each of these steps leaves it; yield the cut.

    ``cuts``: indices of steps, in order. ``synced``: the disk syncs.
    """
    dice = random.Random(1)
    image = Image(synced=synced)
    done = 0
    for cut in cuts:
        for step in steps[done:cut]:
            image.take(step)
        done = cut
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        for path, content in image.cut(dice).items():
            (directory / Path(path).name).write_bytes(content)
        yield cut


def stored_deliveries(store: Store) -> set[str]:
    """Return the delivery ids of the changes in a history."""
    ids: set[str] = set()
    for line in store.history(None, EVERYTHING).records:
        record = msgspec.json.decode(line)
        ids.add(delivery_id(record["azure.scheduled_event.change_id"], "hook"))
    return ids
