"""What a keeper mutes and writes, and what an instance shows of the others, without a hub."""

import asyncio
import errno
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from notbefore.commands.client import AgentClient
from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.core.outbox import SendResult
from notbefore.core.record import json_line
from notbefore.core.routing import Match, Route, Routing, Terms
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.fleet import keeper, snapshot_store
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.fleet_view import FleetView
from notbefore.fleet.history import History, PastEvent, read_past
from notbefore.fleet.hub_records import Place
from notbefore.fleet.keeper import HubClock, Keeper, Parts
from notbefore.fleet.mutes import Mute, is_muted
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import MAX_WAITING
from notbefore.fleet.snapshot import Position, compressed
from notbefore.fleet.snapshot_store import FileSnapshots, Others
from support.agent import eventually
from support.azure import T0
from support.fleet_log import A, Log

CONFIG = """
fleet: {hub: {namespace: fleet.servicebus.windows.net, hub: changes, auth: managed_identity}}
sinks: {hook: {webhook: {url: "http://127.0.0.1:9/", allow_private: true}}}
"""


class Kept:
    """A keeper without a hub."""

    def __init__(
        self,
        directory: Path,
        snapshots: FileSnapshots | None = None,
        history: History | None = None,
    ) -> None:
        path = directory / "fleet.yaml"
        path.write_text(CONFIG, encoding="utf-8")
        self.config = config = load(path, {}, {})
        assert config.fleet
        self.outbox = FleetOutbox(config.routing, lambda: None, T0.timestamp)
        used = snapshots or FileSnapshots(directory)
        self.parts = Parts(
            used, self.outbox, HubClock(), history or History(directory), lambda _: None
        )
        self.keeper = Keeper(config.fleet, self.parts)


@pytest.mark.parametrize(("muted_from", "sent"), [(0, set[str]()), (1, {"announced", "finished"})])
def test_the_end_is_notified_to_those_who_were_notified_before_the_mute(
    muted_from: int, sent: set[str]
) -> None:
    log = Log()
    for kind in ("announced", "started", "finished"):
        log.add(A, kind)
    mutes, muted = [Mute("id", {"event_type": "Reboot"}, "me", "why", log.now + 3600)], set[str]()
    for number, made in enumerate(log.made):
        in_force = mutes if number >= muted_from else []
        assert is_muted(in_force, log.now, made, muted) is (made.change.kind not in sent)


def test_who_takes_over_is_told_what_a_sink_said_of_an_event_that_is_open(tmp_path: Path) -> None:
    log, one, other = Log(), Kept(tmp_path).outbox, Kept(tmp_path).outbox
    log.add(A, "announced", after=0)
    one.commit("0", log.last)
    (given,) = eventually(lambda: one.exchange([], {"hook": 1}))  # Windows' clock stands for 16 ms
    one.exchange([SendResult(given.delivery_id, "accepted", thread="thread-1")], {})
    other.adopt("0", one.part("0", log.fold.event_keys()), 1.0)
    log.add(A, "started", after=0)
    other.commit("0", log.last)
    assert [later.thread for later in eventually(lambda: other.exchange([], {"hook": 1}))] == [
        "thread-1"
    ]


def test_muted_step_is_neither_sent_nor_counted(tmp_path: Path) -> None:
    log = Log()
    outbox = Kept(tmp_path).outbox
    log.add(A, "announced", after=0)
    outbox.commit("0", log.last)
    log.add(A, "started", after=0)

    outbox.mute("0", log.last)

    rows = outbox.part("0", log.fold.event_keys()).rows
    assert [row.kind for row in rows] == ["announced"]
    assert sum(outbox.totals.changes.values()) == 1


def test_end_of_a_wave_goes_to_a_sink_that_opened_something() -> None:
    log = Log()
    terms = {"old": Terms(keeps_incidents=True), "new": Terms()}
    before = FleetOutbox(Routing((Route(sinks=("old",)),), terms), lambda: None, T0.timestamp)
    log.add(A, "started", after=0)
    before.commit("0", log.last)
    (given,) = eventually(lambda: before.exchange([], {"old": 1}))
    before.exchange([SendResult(given.delivery_id, "accepted", thread="incident")], {})
    after = FleetOutbox(Routing((Route(sinks=("new",)),), terms), lambda: None, T0.timestamp)
    after.adopt("0", before.part("0", log.fold.event_keys()), 1.0)
    log.add(A, "finished", after=0)

    after.commit("0", log.last)

    rows = after.part("0", log.fold.event_keys()).rows
    assert sorted(row.sink for row in rows) == ["new", "old"]


def test_removed_sink_is_logged_when_its_wave_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    before = Kept(tmp_path).outbox
    log.add(A, "started", after=0)
    before.commit("0", log.last)
    (given,) = eventually(lambda: before.exchange([], {"hook": 1}))
    before.exchange([SendResult(given.delivery_id, "accepted", thread="incident")], {})
    after = FleetOutbox(Routing((), {"new": Terms()}), lambda: None, T0.timestamp)
    after.adopt("0", before.part("0", log.fold.event_keys()), 1.0)
    log.add(A, "finished", after=0)

    after.commit("0", log.last)

    assert "sink hook is no longer configured, so it does not get the end of event" in caplog.text


def test_who_takes_over_with_other_sinks_sends_what_waits_by_its_own_routes(tmp_path: Path) -> None:
    log, one = Log(), Kept(tmp_path).outbox
    log.add(A, "announced", after=0)
    one.commit("0", log.last)
    routes = (
        Route(Match(resource_group=("other",)), ("others",)),
        Route(Match(resource_group=("rg",)), ("new",)),
    )
    other = FleetOutbox(
        Routing(routes, {"others": Terms(), "new": Terms()}), lambda: None, T0.timestamp
    )
    other.adopt("0", one.part("0", log.fold.event_keys()), 1.0)
    assert [row.sink for row in other.exchange([], {"others": 1, "new": 1})] == ["new"]


def test_one_snapshot_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "EVERY", 0.0)
    log = Log()
    log.add(A, "announced")
    good: Any = compressed(log.fold.snapshot(0.0))

    async def look() -> None:
        snapshots = FileSnapshots(tmp_path)
        for name in ("0", "2"):
            await snapshots.write(name, good, Position("", 0, 0.0))
        await snapshots.write("1", b"broken", Position("", 0, 0.0))
        own = set[str]()
        seen = Others(snapshots, own)
        for _ in range(2):
            await seen.look()
            assert set(seen.found) == {"0", "2"}
        await snapshots.write("1", good, Position("", 0, 0.0))
        await seen.look()
        assert set(seen.found) == {"0", "1", "2"}
        own.add("0")  # it was taken since
        assert set(seen.found) == {"1", "2"}

    asyncio.run(look())


class Slow(FileSnapshots):
    """A store that is slow with the first partition, until the second one is written a
    second time.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.writes: list[str] = []
        self.second = asyncio.Event()

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        self.writes.append(partition)
        if self.writes.count(partition) == 2 and partition == "0":
            await self.second.wait()
        await super().write(partition, body, position)
        if self.writes.count(partition) == 2:
            self.second.set()


def test_before_partitions_are_let_go_their_snapshots_are_written_at_once(tmp_path: Path) -> None:
    async def write() -> None:
        kept = Kept(tmp_path, snapshots := Slow(tmp_path))
        await asyncio.gather(*map(kept.keeper.take, ("0", "1")))
        kept.parts.clock.hear(1000.0)
        # what was written before the first record sets no time
        assert kept.parts.clock.now() < 2000.0
        await asyncio.wait_for(kept.keeper.let_go("0", "1"), 20)
        assert await snapshots.read("0")

    asyncio.run(write())


class Broken(FileSnapshots):
    """Fails with ``error`` from the second writing on."""

    tried = 0
    error: Exception = OSError()

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        self.tried += 1
        if self.tried > 1:
            raise self.error
        await super().write(partition, body, position)


@pytest.mark.parametrize(
    ("error", "part"),
    [(OSError(errno.ENOSPC, "no space left"), "store"), (KeyError("nobody foresaw it"), "fold")],
)
def test_what_cannot_be_written_is_counted_and_said_tried_again_and_keeps_nothing_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, part: str
) -> None:
    monkeypatch.setattr(keeper, "EVERY", 0.1)
    monkeypatch.setattr(Broken, "error", error)

    async def write() -> None:
        kept, log = Kept(tmp_path, Broken(tmp_path)), Log()
        log.fold = await kept.keeper.take("0")
        log.add(A, "announced", after=0)
        kept.outbox.commit("0", log.last)
        await asyncio.to_thread(eventually, lambda: kept.keeper.figures.errors[part] >= 2)
        assert str(error.args[-1]) in kept.keeper.trouble
        assert len(kept.outbox.exchange([], {"hook": 1})) == 1

    asyncio.run(write())


def test_that_nothing_is_coming_is_said_where_each_partition_of_the_hub_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> None:
        kept = Kept(tmp_path)
        assert kept.config.fleet
        consumer = Consumer(kept.config.fleet, kept.parts)
        view = FleetView(
            kept.config, consumer, kept.parts, Supervisor(make_orders(kept.config), kept.outbox)
        )
        consumer.connected, consumer.keeper.ends = True, {"0": -1, "1": -1, "2": -1}
        monkeypatch.setattr(AgentClient, "ask", lambda *_: json.loads(json_line(view.fleet({}))))
        for name, unread in (("0", 2), ("1", 1), ("2", 0)):
            await consumer.keeper.take(name)
            assert (
                main(["events", "--fleet"])
                == main(["events", "--fleet", "--json"])
                == int(unread > 0)
            )
            out, err = capsys.readouterr()
            assert err.count(
                f": {unread} of the hub's 3 partitions could not be read yet\n"
            ) == 2 * (unread > 0)
            assert [
                ("No event is scheduled" in said) for said in (out, view.page({}).decode())
            ] == [not unread] * 2
            assert view.calendar({}).status[:3] == ("503" if unread else "200")
        only = view.page({"vm": "web_1"}).decode()
        assert ("No event is scheduled" in only, "No event matches the filter." in only) == (
            False,
            True,
        )
        (log := Log()).fold, consumer.keeper.ends["3"] = consumer.keeper.partitions["0"].fold, -1
        log.add(A, "announced")
        assert "This may be outdated or incomplete: 1 of the hub" in view.page({}).decode()
        consumer.connected = False
        for part, text in (
            ("hub", "an hour ago"),
            ("store", "no container"),
            ("history", "no disk"),
        ):
            consumer.keeper.failed(part, OSError(text))
        assert view.ready().reasons == (
            "the hub is not being read: the checkpoint store: OSError: no container",
        )

    asyncio.run(look())


def test_without_an_inventory_nobody_of_an_earlier_one_is_missing(tmp_path: Path) -> None:
    async def take() -> None:
        kept, log = Kept(tmp_path), Log()
        log.beat(A)
        log.fold.missing.expect({"gone": ("gone", Place())}, log.now, 900.0)
        await FileSnapshots(tmp_path).write(
            "0", compressed(log.fold.snapshot(0.0)), Position("", 0, 0.0)
        )
        log.fold = await kept.keeper.take("0")
        assert log.pass_time(2000, A) == []

    asyncio.run(take())


class Hung(History):
    """A disk that hangs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked, self.over = threading.Event(), threading.Event()

    def write(self, past: Sequence[PastEvent], now: float) -> None:
        self.asked.set()
        self.over.wait(60)
        super().write(past, now)


def test_while_the_disk_of_the_history_hangs_so_many_events_wait_and_each_of_them_is_written(
    tmp_path: Path,
) -> None:
    log = Log()

    def end(numbers: range) -> None:
        for number in numbers:
            for kind in ("announced", "canceled"):
                log.add(A, kind, f"E{number}", after=0.001)

    async def write() -> None:
        kept = Kept(tmp_path, history=(hung := Hung(tmp_path)))
        kept.keeper.ends = {"0": -1}
        log.fold = await kept.keeper.take("0")
        end(range(2))
        writing = asyncio.create_task(kept.keeper.write_history())
        try:
            assert await asyncio.to_thread(hung.asked.wait, 20)
            end(range(2, MAX_WAITING + 3))
            assert len(log.fold.state.past) == MAX_WAITING
        finally:
            hung.over.set()
            await writing
        assert [one.event_id for one in log.fold.state.past] == [
            f"E{number}" for number in range(2, MAX_WAITING)
        ]
        end(range(MAX_WAITING + 3, MAX_WAITING + 4))
        await kept.keeper.write_history()
        found = [one.event_id for one in read_past(hung.past(0.0))]
        assert found == [f"E{number}" for number in (*range(MAX_WAITING), MAX_WAITING + 3)]
        assert log.fold.state.past == []

    asyncio.run(write())


def test_time_goes_on_from_the_newest_record_and_a_late_one_does_not_set_it_back() -> None:
    now = [10.0]
    clock = HubClock(lambda: now[0])
    assert abs(clock.now() - time.time()) < 60  # nothing is known yet
    clock.hear(1000.0)
    now[0] = 11.0
    clock.hear(900.0)
    clock.advance_to(990.0)
    now[0] = 15.0
    assert clock.now() == 1005.0
    clock.hear(1020.0)
    assert clock.now() == 1020.0
    now[0] = 700.0
    clock.advance_to(1050.0)  # a client that has just begun
    assert clock.now() == 1705.0
    clock.hear(1100.0)  # a clock of the hub that was set back is believed in the end
    assert clock.now() == 1100.0
