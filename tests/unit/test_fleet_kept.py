"""What a keeper mutes, and what an instance shows of the others, without a hub."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from notbefore.config.load import load
from notbefore.fleet import others
from notbefore.fleet.checkpoints import FileSnapshots, Position
from notbefore.fleet.history import History
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.keeper import Held, Keeper, Parts
from notbefore.fleet.mutes import Mute
from notbefore.fleet.others import Others
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Partition, compressed
from notbefore.fleet.waves import Grouping
from unit.test_fleet_merge import T0, A, Log

CONFIG = """
fleet: {hub: {namespace: fleet.servicebus.windows.net, hub: changes, auth: managed_identity}}
sinks: {hook: {webhook: {url: "http://127.0.0.1:9/", allow_private: true}}}
"""


def keeper_in(directory: Path, snapshots: FileSnapshots | None = None) -> tuple[Keeper, FleetOutbox]:
    path = directory / "fleet.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    config, clock = load(path, {}, {}), HubClock()
    assert config.fleet
    outbox = FleetOutbox(config.routing, lambda: None, T0.timestamp)
    snapshots = snapshots or FileSnapshots(directory)
    parts = Parts(lambda _: snapshots, outbox, clock, History(directory), lambda *_: None, lambda _: None)
    return Keeper(config.fleet, snapshots, parts, lambda *_: None), outbox


@pytest.mark.parametrize(("muted_from", "sent"), [(0, set[str]()), (1, {"finished"})])
def test_the_end_is_notified_to_those_who_were_notified_before_the_mute(
    tmp_path: Path, muted_from: int, sent: set[str]
) -> None:
    keeper, outbox = keeper_in(tmp_path)
    log = Log()
    held = Held(log.fold)
    for number, kind in enumerate(("announced", "started", "finished")):
        if number == muted_from:
            keeper.mutes = [Mute("id", {"event_type": "Reboot"}, "me", "why", time.time() + 3600)]
        before = len(log.made)
        log.add(A, kind)
        keeper.commit(held, log.made[before:])
    assert {row.delivery.kind for row in outbox.rows()} == sent


def test_one_snapshot_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "EVERY", 0.0)
    log = Log()
    log.add(A, "announced")
    good: Any = compressed(log.fold.snapshot(0.0))

    async def look() -> None:
        snapshots = FileSnapshots(tmp_path)
        for name in ("0", "2"):
            await snapshots.write(name, good, Position("", 0, 0.0))
        await snapshots.write("1", b"broken", Position("", 0, 0.0))
        seen = Others(snapshots, set)
        for _ in range(2):
            await seen.look()
            assert set(seen.found) == {"0", "2"}
        await snapshots.write("1", good, Position("", 0, 0.0))
        await seen.look()
        assert set(seen.found) == {"0", "1", "2"}

    asyncio.run(look())


class Slow(FileSnapshots):
    """A store that is slow with the first partition: so slow that the second one is written meanwhile."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.second = asyncio.Event()

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        if partition == "0":
            await self.second.wait()
        await super().write(partition, body, position)
        self.second.set()


def test_before_a_client_is_closed_all_snapshots_are_written_at_once(tmp_path: Path) -> None:
    keeper, _ = keeper_in(tmp_path, snapshots := Slow(tmp_path))

    async def write() -> None:
        for name in ("0", "1"):
            keeper.partitions[name] = Held(Partition(name, Grouping(), lambda *_: None))
        await asyncio.wait_for(keeper.write_all(), 20)
        assert await snapshots.read("0")

    asyncio.run(write())
