"""The keeper of an instance and its view of the fleet, without a hub."""

import asyncio
import errno
import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from notbefore.commands.client import AgentClient
from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import Bounds, SendResult
from notbefore.core.record import json_line
from notbefore.core.routing import Match, Route, Routing, Terms
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.fleet import keeper, snapshot_store
from notbefore.fleet import outbox as fleet_outbox
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.events import MAX_WAITING
from notbefore.fleet.fleet_view import FleetView
from notbefore.fleet.history import History, PastEvent, read_past
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.hub_records import Place
from notbefore.fleet.keeper import Keeper, Parts
from notbefore.fleet.mutes import Mute, is_muted
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.snapshot import Position, compressed
from notbefore.fleet.snapshot_store import FileSnapshots, Others
from support.agent import eventually
from support.azure import T0
from support.fleet_log import A, Log

CONFIG = """
fleet: {hub: {namespace: fleet.servicebus.windows.net, hub: changes, auth: managed_identity}}
sinks: {hook: {webhook: {url: "http://127.0.0.1:9/", allow_private: true}}}
"""


def do_nothing() -> None:
    pass


def discard(_record: bytes) -> None:
    pass


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
        self.config = load(path, {}, {})
        assert self.config.fleet is not None
        self.outbox = FleetOutbox(self.config.routing, do_nothing, T0.timestamp)
        self.parts = Parts(
            snapshots=snapshots or FileSnapshots(directory),
            outbox=self.outbox,
            clock=HubClock(),
            history=history or History(directory),
            write_record=discard,
        )
        self.keeper = Keeper(self.config.fleet, self.parts)


def outbox_with(routes: tuple[Route, ...], sinks: dict[str, Terms]) -> FleetOutbox:
    return FleetOutbox(Routing(routes, sinks), do_nothing, T0.timestamp)


def lease(outbox: FleetOutbox, sink: str = "hook") -> list[Delivery]:
    """Return the deliveries to a sink, once they are due."""
    # on Windows, the clock advances in steps of 16 ms: what was just committed may not be due yet
    return list(eventually(lambda: outbox.exchange([], {sink: 1})))


def accept_with_thread(outbox: FleetOutbox, thread: str, sink: str = "hook") -> None:
    """Let the sink accept its only delivery, in this thread."""
    (delivery,) = lease(outbox, sink)
    outbox.exchange([SendResult(delivery.delivery_id, "accepted", thread=thread)], {})


def hand_over(before: FleetOutbox, after: FleetOutbox, log: Log) -> None:
    """Let the outbox of another instance adopt the partition."""
    after.adopt("0", before.part("0", log.fold.event_keys()), 1.0)


def waiting(outbox: FleetOutbox, log: Log) -> list[Delivery]:
    return list(outbox.part("0", log.fold.event_keys()).rows)


def test_full_outbox_makes_room_once_for_each_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_outbox, "OF_A_FLEET", Bounds(rows=2, size=1_000_000))
    outbox = outbox_with((Route(sinks=("hook",)),), {"hook": Terms()})
    log = Log()
    for number in range(6):
        log.add(A, "announced", f"E{number}")

    with outbox.opened():
        for notification in log.notifications:
            outbox.commit("0", notification)

    assert len(waiting(outbox, log)) == 2
    overflows = [record for record in caplog.records if "hook: " in record.getMessage()]
    assert len(overflows) == 1


# ---- mutes


@pytest.mark.parametrize(
    ("muted_from", "sent_kinds"),
    [
        pytest.param(0, [], id="muted before the announcement"),
        pytest.param(1, ["announced", "finished"], id="muted after the announcement"),
    ],
)
def test_end_is_sent_when_the_beginning_was_sent_before_the_mute(
    muted_from: int,
    sent_kinds: list[str],
) -> None:
    log = Log()
    for kind in ("announced", "started", "finished"):
        log.add(A, kind)
    mute = Mute("id", {"event_type": "Reboot"}, "me", "why", log.now + 3600)
    muted_keys: set[str] = set()
    kinds = []

    for number, notification in enumerate(log.notifications):
        mutes = [mute] if number >= muted_from else []
        if not is_muted(mutes, log.now, notification, muted_keys):
            kinds.append(notification.change.kind)

    assert kinds == sent_kinds


def test_muted_step_is_neither_sent_nor_counted(tmp_path: Path) -> None:
    log = Log()
    outbox = Kept(tmp_path).outbox
    log.add(A, "announced", after=0)
    outbox.commit("0", log.last)
    log.add(A, "started", after=0)

    outbox.mute("0", log.last)

    assert [delivery.kind for delivery in waiting(outbox, log)] == ["announced"]
    assert sum(outbox.totals.changes.values()) == 1


# ---- deliveries after a takeover


def test_takeover_keeps_the_thread_of_an_open_event(tmp_path: Path) -> None:
    log = Log()
    before = Kept(tmp_path).outbox
    after = Kept(tmp_path).outbox
    log.add(A, "announced", after=0)
    before.commit("0", log.last)
    accept_with_thread(before, "thread-1")

    hand_over(before, after, log)
    log.add(A, "started", after=0)
    after.commit("0", log.last)

    assert [delivery.thread for delivery in lease(after)] == ["thread-1"]


def test_takeover_sends_end_to_a_sink_that_opened_an_incident() -> None:
    log = Log()
    sinks = {"old": Terms(keeps_incidents=True), "new": Terms()}
    before = outbox_with((Route(sinks=("old",)),), sinks)
    after = outbox_with((Route(sinks=("new",)),), sinks)
    log.add(A, "started", after=0)
    before.commit("0", log.last)
    accept_with_thread(before, "incident", sink="old")
    hand_over(before, after, log)
    log.add(A, "finished", after=0)

    after.commit("0", log.last)

    assert sorted(delivery.sink for delivery in waiting(after, log)) == ["new", "old"]


def test_removed_sink_is_logged_when_its_wave_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    before = Kept(tmp_path).outbox
    after = outbox_with((), {"new": Terms()})
    log.add(A, "started", after=0)
    before.commit("0", log.last)
    accept_with_thread(before, "incident")
    hand_over(before, after, log)
    log.add(A, "finished", after=0)

    after.commit("0", log.last)

    assert "sink hook is no longer configured, so it does not get the end of event" in caplog.text


def test_takeover_routes_waiting_deliveries_by_its_own_sinks(tmp_path: Path) -> None:
    log = Log()
    before = Kept(tmp_path).outbox
    routes = (
        Route(Match(resource_group=("other",)), ("others",)),
        Route(Match(resource_group=("rg",)), ("new",)),
    )
    after = outbox_with(routes, {"others": Terms(), "new": Terms()})
    log.add(A, "announced", after=0)
    before.commit("0", log.last)

    hand_over(before, after, log)

    deliveries = eventually(lambda: after.exchange([], {"others": 1, "new": 1}))
    assert [delivery.sink for delivery in deliveries] == ["new"]


# ---- snapshots


@pytest.fixture
def others_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_store, "READ_OTHERS_EVERY", 0.0)


def readable_snapshot() -> bytes:
    log = Log()
    log.add(A, "announced")
    return compressed(log.fold.snapshot(0.0))


async def write_three(snapshots: FileSnapshots) -> None:
    """Write the snapshots of three partitions, of which the second is unreadable."""
    for partition, body in (
        ("0", readable_snapshot()),
        ("1", b"broken"),
        ("2", readable_snapshot()),
    ):
        await snapshots.write(partition, body, Position("", 0, 0.0))


@pytest.mark.usefixtures("others_are_read_at_once")
def test_unreadable_snapshot_hides_no_other(tmp_path: Path) -> None:
    async def look_twice() -> None:
        snapshots = FileSnapshots(tmp_path)
        await write_three(snapshots)
        others = Others(snapshots, set())

        await others.look()
        assert set(others.found) == {"0", "2"}
        await others.look()
        assert set(others.found) == {"0", "2"}

    asyncio.run(look_twice())


@pytest.mark.usefixtures("others_are_read_at_once")
def test_unreadable_snapshot_is_read_once_it_was_replaced(tmp_path: Path) -> None:
    async def look_again() -> None:
        snapshots = FileSnapshots(tmp_path)
        await write_three(snapshots)
        others = Others(snapshots, set())
        await others.look()

        await snapshots.write("1", readable_snapshot(), Position("", 0, 0.0))
        await others.look()

        assert set(others.found) == {"0", "1", "2"}

    asyncio.run(look_again())


@pytest.mark.usefixtures("others_are_read_at_once")
def test_snapshot_of_a_taken_partition_is_no_longer_another(tmp_path: Path) -> None:
    async def take() -> None:
        snapshots = FileSnapshots(tmp_path)
        await write_three(snapshots)
        own_partitions: set[str] = set()
        others = Others(snapshots, own_partitions)
        await others.look()

        own_partitions.add("0")

        assert set(others.found) == {"2"}

    asyncio.run(take())


class SlowSnapshots(FileSnapshots):
    """Finishes the second write of partition 0 only after the second write of partition 1."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.writes: list[str] = []
        self.one_is_written_twice = asyncio.Event()

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        self.writes.append(partition)
        is_second = self.writes.count(partition) == 2
        if is_second and partition == "0":
            await self.one_is_written_twice.wait()
        await super().write(partition, body, position)
        if is_second:
            self.one_is_written_twice.set()


def test_released_partitions_are_written_concurrently(tmp_path: Path) -> None:
    async def let_go() -> None:
        snapshots = SlowSnapshots(tmp_path)
        kept = Kept(tmp_path, snapshots)
        await asyncio.gather(kept.keeper.take("0"), kept.keeper.take("1"))

        await asyncio.wait_for(kept.keeper.let_go("0", "1"), 20)

        assert await snapshots.read("0")

    asyncio.run(let_go())


def test_snapshot_before_the_first_record_sets_no_time(tmp_path: Path) -> None:
    async def take() -> None:
        kept = Kept(tmp_path)
        await kept.keeper.take("0")

        kept.parts.clock.hear(1000.0)

        assert kept.parts.clock.now() < 2000.0

    asyncio.run(take())


class BrokenSnapshots(FileSnapshots):
    """Fails with an error from the second write on."""

    def __init__(self, directory: Path, error: Exception) -> None:
        super().__init__(directory)
        self.error = error
        self.writes = 0

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        self.writes += 1
        if self.writes > 1:
            raise self.error
        await super().write(partition, body, position)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        pytest.param(OSError(errno.ENOSPC, "no space left"), "store", id="full disk"),
        pytest.param(KeyError("unforeseen"), "fold", id="defect"),
    ],
)
def test_failing_snapshot_is_retried_and_delays_no_delivery(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    part: str,
) -> None:
    monkeypatch.setattr(keeper, "SNAPSHOT_EVERY", 0.1)

    async def write() -> None:
        kept = Kept(tmp_path, BrokenSnapshots(tmp_path, error))
        log = Log()
        log.fold = await kept.keeper.take("0")
        log.add(A, "announced", after=0)
        kept.outbox.commit("0", log.last)

        await asyncio.to_thread(eventually, lambda: kept.keeper.figures.errors[part] >= 2)

        assert str(error.args[-1]) in kept.keeper.trouble
        assert len(kept.outbox.exchange([], {"hook": 1})) == 1

    asyncio.run(write())


def test_missing_vms_are_forgotten_without_an_inventory(tmp_path: Path) -> None:
    async def take() -> None:
        kept = Kept(tmp_path)
        log = Log()
        log.beat(A)
        log.fold.missing.expect({"gone": ("gone", Place())}, log.now, 900.0)
        snapshot = compressed(log.fold.snapshot(0.0))
        await FileSnapshots(tmp_path).write("0", snapshot, Position("", 0, 0.0))

        log.fold = await kept.keeper.take("0")
        log.pass_time(2000, A)

        assert log.kinds == []

    asyncio.run(take())


# ---- the view of a hub with three partitions


class Viewed(Kept):
    """An instance without a hub that has taken some of three partitions."""

    def __init__(self, directory: Path, taken: int) -> None:
        super().__init__(directory)
        assert self.config.fleet is not None
        self.consumer = Consumer(self.config.fleet, self.parts)
        self.consumer.connected = True
        self.consumer.keeper.ends = {"0": -1, "1": -1, "2": -1}
        supervisor = Supervisor(make_orders(self.config), self.outbox)
        self.view = FleetView(self.config, self.consumer, self.parts, supervisor)
        asyncio.run(self._take(taken))

    async def _take(self, count: int) -> None:
        for number in range(count):
            await self.consumer.keeper.take(str(number))

    def page(self, **filters: str) -> str:
        return self.view.page(filters).decode()


def run_events_command(
    viewed: Viewed,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> int:
    """Run ``notbefore events --fleet`` and return its exit code."""
    answer = json.loads(json_line(viewed.view.fleet({})))
    monkeypatch.setattr(AgentClient, "ask", lambda *_: answer)
    return main(["events", "--fleet", *options])


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("unread", [1, 2])
def test_events_command_fails_when_partitions_are_unread(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    unread: int,
    options: tuple[str, ...],
) -> None:
    viewed = Viewed(tmp_path, taken=3 - unread)

    exit_code = run_events_command(viewed, monkeypatch, *options)

    printed, errors = capsys.readouterr()
    assert exit_code == 1
    assert errors.count(f": {unread} of the hub's 3 partitions could not be read yet\n") == 1
    assert "No event is scheduled" not in printed


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_events_command_succeeds_when_each_partition_is_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    exit_code = run_events_command(Viewed(tmp_path, 3), monkeypatch, *options)

    assert exit_code == 0
    assert "could not be read yet" not in capsys.readouterr().err


def test_events_command_says_nothing_is_scheduled_when_all_is_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_events_command(Viewed(tmp_path, 3), monkeypatch)

    assert "No event is scheduled" in capsys.readouterr().out


@pytest.mark.parametrize(("taken", "is_complete"), [(1, False), (2, False), (3, True)])
def test_page_says_nothing_is_scheduled_only_when_all_is_read(
    tmp_path: Path,
    taken: int,
    *,
    is_complete: bool,
) -> None:
    page = Viewed(tmp_path, taken).page()

    assert ("No event is scheduled" in page) is is_complete


@pytest.mark.parametrize(("taken", "status"), [(1, "503"), (2, "503"), (3, "200")])
def test_calendar_is_an_error_when_partitions_are_unread(
    tmp_path: Path,
    taken: int,
    status: str,
) -> None:
    calendar = Viewed(tmp_path, taken).view.calendar({})

    assert calendar.status.startswith(status)


def test_filtered_page_says_that_nothing_matches(tmp_path: Path) -> None:
    page = Viewed(tmp_path, 3).page(vm="web_1")

    assert "No event is scheduled" not in page
    assert "No event matches the filter." in page


def test_page_with_events_says_that_it_may_be_incomplete(tmp_path: Path) -> None:
    viewed = Viewed(tmp_path, 3)
    viewed.consumer.keeper.ends["3"] = -1
    log = Log()
    log.fold = viewed.consumer.keeper.partitions["0"].fold

    log.add(A, "announced")

    assert "This may be outdated or incomplete: 1 of the hub" in viewed.page()


def test_page_shows_events_that_have_started_by_type_and_place(tmp_path: Path) -> None:
    viewed = Viewed(tmp_path, 3)
    log = Log()
    log.fold = viewed.consumer.keeper.partitions["0"].fold

    log.add(A, "announced")
    log.add(A, "started")

    page = viewed.page()
    section = page.partition('id="under-way"')[2].partition("</section>")[0]
    assert "<title>1 under way - fleet" in page
    assert "1 event is under way." in page
    assert "1 VM: <bdi>web_0</bdi>" in section
    assert "1 under way</span>" in section
    assert "since the first start" in section


def test_disconnected_instance_names_its_worst_trouble(tmp_path: Path) -> None:
    viewed = Viewed(tmp_path, 3)
    viewed.consumer.connected = False

    viewed.consumer.keeper.failed("hub", OSError("an hour ago"))
    viewed.consumer.keeper.failed("store", OSError("no container"))
    viewed.consumer.keeper.failed("history", OSError("no disk"))

    assert viewed.view.ready().reasons == (
        "the hub is not being read: the checkpoint store: OSError: no container",
    )


# ---- the history


class HungHistory(History):
    """A history whose disk hangs until it is released."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.is_writing = threading.Event()
        self.is_released = threading.Event()

    def write(self, past: Sequence[PastEvent], now: float) -> None:
        self.is_writing.set()
        self.is_released.wait(60)
        super().write(past, now)


def end_events(log: Log, numbers: range) -> None:
    """Announce and cancel an event of each of these numbers."""
    for number in numbers:
        log.add(A, "announced", f"E{number}", after=0.001)
        log.add(A, "canceled", f"E{number}", after=0.001)


def event_ids(past: Iterable[PastEvent]) -> list[str]:
    return [event.event_id for event in past]


def test_history_of_a_hanging_disk_is_bounded_and_written_later(
    tmp_path: Path,
) -> None:
    log = Log()

    async def write() -> None:
        history = HungHistory(tmp_path)
        kept = Kept(tmp_path, history=history)
        kept.keeper.ends = {"0": -1}
        log.fold = await kept.keeper.take("0")

        end_events(log, range(2))
        writing = asyncio.create_task(kept.keeper.write_history())
        try:
            assert await asyncio.to_thread(history.is_writing.wait, 20)
            end_events(log, range(2, MAX_WAITING + 3))
            assert len(log.fold.state.past) == MAX_WAITING
        finally:
            history.is_released.set()
            await writing
        # E0 and E1 are written; of the others, those above the bound are lost
        assert event_ids(log.fold.state.past) == [f"E{number}" for number in range(2, MAX_WAITING)]

        end_events(log, range(MAX_WAITING + 3, MAX_WAITING + 4))
        await kept.keeper.write_history()
        written_numbers = [*range(MAX_WAITING), MAX_WAITING + 3]
        written_ids = event_ids(read_past(history.past(0.0)))
        assert written_ids == [f"E{number}" for number in written_numbers]
        assert log.fold.state.past == []

    asyncio.run(write())


# ---- the hub's clock


class ManualClock:
    """A monotonic clock that a test sets."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def read(self) -> float:
        return self.seconds


def test_hub_clock_follows_the_machine_before_the_first_record() -> None:
    clock = HubClock(ManualClock(10.0).read)

    assert abs(clock.now() - time.time()) < 60


def test_hub_clock_continues_from_the_newest_record() -> None:
    monotonic = ManualClock(10.0)
    clock = HubClock(monotonic.read)

    clock.hear(1000.0)
    monotonic.seconds = 15.0

    assert clock.now() == 1005.0


def test_hub_clock_is_not_set_back_by_a_late_record() -> None:
    monotonic = ManualClock(10.0)
    clock = HubClock(monotonic.read)
    clock.hear(1000.0)

    monotonic.seconds = 11.0
    clock.hear(900.0)
    clock.advance_to(990.0)
    monotonic.seconds = 15.0

    assert clock.now() == 1005.0


def test_hub_clock_is_set_ahead_by_a_newer_record() -> None:
    monotonic = ManualClock(10.0)
    clock = HubClock(monotonic.read)
    clock.hear(1000.0)
    monotonic.seconds = 15.0

    clock.hear(1020.0)

    assert clock.now() == 1020.0


def clock_after_a_pause() -> HubClock:
    """Return a clock that heard nothing for 685 s, when a client has just begun."""
    monotonic = ManualClock(15.0)
    clock = HubClock(monotonic.read)
    clock.hear(1020.0)
    monotonic.seconds = 700.0
    clock.advance_to(1050.0)
    return clock


def test_hub_clock_continues_when_a_client_begins() -> None:
    assert clock_after_a_pause().now() == 1705.0


def test_hub_clock_follows_a_hub_whose_clock_was_set_back() -> None:
    clock = clock_after_a_pause()

    clock.hear(1100.0)

    assert clock.now() == 1100.0
