"""Snapshots of other versions, snapshots that are lost, and events that no VM has reported."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from notbefore.config.load import load
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.fleet.blob_snapshots import MAX_OWNER_IDS, OwnerIds
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.events import MAX_UNKNOWN, UNKNOWN_SECONDS
from notbefore.fleet.fleet_view import FleetView
from notbefore.fleet.history import History
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.keeper import Parts
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.snapshot import (
    FORM,
    LOST_SECONDS,
    PREVIOUS_FORM,
    REPORT_SECONDS,
    NewerSnapshotError,
    Position,
    check_form,
    compressed,
    read_snapshot,
)
from notbefore.fleet.snapshot_store import FileSnapshots, LostPartitionError
from notbefore.wording.records import heartbeat_of
from support.azure import T0
from support.fleet_log import A, B, Log
from support.fleet_records import body, report

CONFIG = """
fleet: {hub: {namespace: fleet.servicebus.windows.net, hub: changes, auth: managed_identity}}
sinks: {hook: {webhook: {url: "http://127.0.0.1:9/", allow_private: true}}}
"""
DAY = 86_400.0
ADDED_STORY_FIELDS = 3  # the last fields of a story, which the previous form lacks


def do_nothing() -> None:
    pass


def discard(_record: bytes) -> None:
    pass


class Instance:
    """The parts of an instance without a hub: snapshots in files, and a view."""

    def __init__(self, directory: Path) -> None:
        path = directory / "fleet.yaml"
        path.write_text(CONFIG, encoding="utf-8")
        config = load(path, {}, {})
        assert config.fleet is not None
        self.snapshots = FileSnapshots(directory / "partitions")
        self.clock = HubClock()
        outbox = FleetOutbox(config.routing, do_nothing, self.clock.now)
        parts = Parts(self.snapshots, outbox, self.clock, History(directory), discard)
        self.consumer = Consumer(config.fleet, parts)
        self.keeper = self.consumer.keeper
        self.keeper.ends = {"0": -1}
        self.consumer.connected = True
        supervisor = Supervisor(make_orders(config), outbox)
        self.view = FleetView(config, self.consumer, parts, supervisor)

    def metric(self, name: str) -> float:
        text, _ = self.view.metrics("")
        (line,) = [line for line in text.decode().splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path)


def run(do: Callable[[], Any]) -> None:
    asyncio.run(do())


def with_form(snapshot: bytes, form: int) -> bytes:
    """Return a snapshot as a version with another form writes it."""
    values = msgspec.msgpack.decode(snapshot)
    values[0] = form
    if form == PREVIOUS_FORM:
        del values[-1:]
        for wave in values[5].values():
            for story in wave[1].values():
                del story[-ADDED_STORY_FIELDS:]
        for closed in values[8].values():
            del closed[-1:]
    if form > FORM:
        values.append("what a newer version adds")
    return compressed(msgspec.msgpack.encode(values))


def snapshot_of_an_event() -> bytes:
    log = Log()
    log.add(A, "announced", "OVER")
    log.add(A, "canceled", "OVER")
    log.add(A, "announced", not_before=T0 + timedelta(days=6), event_type="Redeploy")
    return log.fold.snapshot(log.now)


# ---- other forms


def test_snapshot_of_the_previous_form_is_read() -> None:
    stored = with_form(snapshot_of_an_event(), PREVIOUS_FORM)

    snapshot = read_snapshot(stored)

    assert snapshot.form == FORM
    (wave,) = snapshot.waves.values()
    (story,) = wave.stories.values()
    (closed,) = snapshot.closed.values()
    assert story.event.event_type == "Redeploy"
    assert story.azure is None
    assert closed.azure is None


def test_check_of_the_form_refuses_a_newer_one() -> None:
    newer = with_form(snapshot_of_an_event(), FORM + 1)

    with pytest.raises(NewerSnapshotError, match=f"form {FORM + 1}"):
        check_form(newer)


def test_check_of_the_form_refuses_a_newer_one_in_a_damaged_snapshot() -> None:
    with pytest.raises(NewerSnapshotError):
        check_form(compressed(b"\x93\x7f"))


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(with_form(snapshot_of_an_event(), FORM), id="this form"),
        pytest.param(b"", id="empty"),
        pytest.param(b"no snapshot", id="not compressed"),
        pytest.param(compressed(b"\x93"), id="truncated"),
        pytest.param(compressed(b"{}"), id="no list"),
        pytest.param(compressed(b"\x93\xcd\x01\x00"), id="a form of two bytes"),
    ],
)
def test_check_of_the_form_accepts_all_but_newer_ones(stored: bytes) -> None:
    check_form(stored)


def test_snapshot_of_an_old_form_is_refused() -> None:
    old = with_form(snapshot_of_an_event(), 3)

    with pytest.raises(ValueError, match="form 3"):
        read_snapshot(old)


def test_snapshot_of_a_newer_form_is_never_overwritten(instance: Instance) -> None:
    newer = with_form(snapshot_of_an_event(), FORM + 1)
    claim = {"partition_id": "0", "owner_id": "this"}
    release = {"partition_id": "0", "owner_id": ""}

    async def take() -> None:
        await instance.snapshots.write("0", newer, Position())

        with pytest.raises(LostPartitionError):
            await instance.keeper.take("0")

        assert await instance.snapshots.read("0") == newer
        assert instance.keeper.partitions == {}
        claimed = await instance.snapshots.claim_ownership([claim, release])
        assert [ownership["owner_id"] for ownership in claimed] == [""]

    run(take)

    assert "partition 0 is left to a newer version" in instance.view.ready().reasons[0]
    assert instance.metric("notbefore_fleet_snapshots_newer") == 1


# ---- lost snapshots


def test_lost_snapshot_is_rebuilt_from_the_start_of_retention(instance: Instance) -> None:
    now = datetime.now(UTC)
    instance.clock.advance_to(now.timestamp())

    async def lose() -> None:
        await instance.snapshots.write("0", b"damaged", Position())
        with pytest.raises(LostPartitionError):
            await instance.keeper.take("0")
        (checkpoint,) = await instance.snapshots.list_checkpoints()
        assert checkpoint["offset"] == "-1"

        fold = await instance.keeper.take("0")
        log = Log()
        log.fold = fold
        read_days(log, now)

        assert log.kinds == ["announced", "announced", "started"]
        event_ids = {notification.change.event.event_id for notification in log.notifications}
        assert event_ids == {"PENDING", "FRESH"}
        assert instance.view.ready().reasons
        assert instance.view.calendar({}).status.startswith("503")
        assert instance.metric("notbefore_fleet_snapshots_lost") == 1
        assert not fold.state.was_lost(now.timestamp() + 2 * LOST_SECONDS)

    run(lose)


def read_days(log: Log, now: datetime) -> None:
    """Read an event that ended days ago, one that is still to come, and one of this hour."""
    steps: list[tuple[float, Any, str]] = [
        (5.0 * DAY, "announced", "OVER"),
        (5.0 * DAY - 60, "announced", "PENDING"),
        (4.0 * DAY, "canceled", "OVER"),
        (900.0, "announced", "FRESH"),
        (600.0, "started", "FRESH"),
    ]
    for number, (ago, kind, event_id) in enumerate(steps):
        then = now - timedelta(seconds=ago)
        record = report(A, kind, event_id, at=then, not_before=now + timedelta(days=1))
        enqueued = then.timestamp()
        log.notifications += log.fold.add(body(record), Position(str(number), number, enqueued))
    log.notifications += log.fold.advance(now.timestamp())


# ---- events that no VM has reported


def beat_listing(log: Log, *event_ids: str) -> None:
    """Append a heartbeat that lists these events, even more than an agent would list."""
    now = datetime.fromtimestamp(log.now, UTC)
    log.read(body(replace(heartbeat_of(B, (), "1", now, 300.0), listed=event_ids)))


def test_listed_event_is_unknown_until_it_is_reported() -> None:
    log = Log()
    beat_listing(log, "EVENT-1")
    state = log.fold.state
    assert state.unknown_events(log.now) == 0

    log.wait(REPORT_SECONDS + 1)
    assert state.unknown_events(log.now) == 1
    assert read_snapshot(compressed(log.fold.snapshot(log.now))).unknown_events(log.now) == 1

    log.add(A, "announced")
    assert state.unknown_events(log.now) == 0
    beat_listing(log, "EVENT-1")
    assert state.unknown == {}


def test_unknown_event_is_forgotten_when_no_vm_lists_it() -> None:
    log = Log()
    beat_listing(log, "EVENT-1")
    log.wait(60)
    beat_listing(log, "EVENT-1")

    log.wait(UNKNOWN_SECONDS + 100)

    assert log.fold.state.unknown == {}


def test_unknown_events_are_bounded() -> None:
    log = Log()

    for number in range(3):
        beat_listing(log, *(f"E{number}-{event}" for event in range(MAX_UNKNOWN // 2)))

    assert len(log.fold.state.unknown) == MAX_UNKNOWN


def test_calendar_is_an_error_when_a_listed_event_is_unknown(instance: Instance) -> None:
    async def look() -> None:
        fold = await instance.keeper.take("0")
        assert instance.view.calendar({}).status.startswith("200")
        log = Log()
        log.fold = fold
        log.now = datetime.now(UTC).timestamp() - 300
        beat_listing(log, "EVENT-1")
        instance.clock.advance_to(log.now + 300)

        trouble = "1 event that VMs list was never reported here"
        assert instance.view.fleet({}).trouble == trouble
        assert trouble in instance.view.ready().reasons
        assert instance.view.calendar({}).status.startswith("503")
        assert instance.metric("notbefore_fleet_events_unknown") == 1

    run(look)


# ---- owner ids


def test_owner_id_is_former_once_another_client_begins(tmp_path: Path) -> None:
    owner_ids = OwnerIds(tmp_path / "owners")
    owner_ids.note("id-0")
    assert not owner_ids.is_former("id-0")

    owner_ids.begin_client()

    assert owner_ids.is_former("id-0")


def test_owner_ids_of_a_directory_are_former_after_a_restart(tmp_path: Path) -> None:
    OwnerIds(tmp_path / "owners").note("id-0")

    restarted = OwnerIds(tmp_path / "owners")
    restarted.note("new")

    assert restarted.is_former("id-0")
    assert not restarted.is_former("new")
    assert not restarted.is_former("of another instance")


def test_oldest_owner_ids_are_forgotten_above_the_bound(tmp_path: Path) -> None:
    owner_ids = OwnerIds(tmp_path / "owners")
    for number in range(MAX_OWNER_IDS + 5):
        owner_ids.note(f"id-{number}")
    owner_ids.note(f"id-{MAX_OWNER_IDS + 4}")  # a known one pushes none out

    restarted = OwnerIds(tmp_path / "owners")

    assert not restarted.is_former("id-4")
    assert restarted.is_former("id-5")


def test_owner_ids_are_optional_when_the_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "owners"
    path.write_bytes(b"\xff\xfe")

    assert not OwnerIds(path).is_former("id")
