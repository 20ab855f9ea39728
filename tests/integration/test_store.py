"""The store: its memory, and the file that follows on a healthy or a sick disk."""

import errno
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from notbefore.core.change import Change
from notbefore.core.delivery import Delivery, Targets
from notbefore.core.outbox import SendResult
from notbefore.core.record import Vm
from notbefore.core.routing import Terms
from notbefore.errors import StoreError
from notbefore.process.clock import Clock
from notbefore.store.file import FILE_NAME, StateFile, StoredChange, StoredState
from notbefore.store.store import HistoryRecords, Store
from notbefore.wording.records import record_of
from support import box
from support.agent import PATIENCE, eventually
from support.azure import T0
from support.box import change, rows_of
from support.locked_disk import LockedDisk, wait_until_written
from support.state_file import read_records, read_state
from support.tracking import SteppedClock

ME = StoredState(vm=Vm(name="me"))


@contextmanager
def store_in(directory: Path, clock: Clock | None = None, **settings: Any) -> Iterator[Store]:
    with closing(Store(directory, clock or Clock(), **settings)) as store:
        yield store


def stored(number: int, *deliveries: Delivery) -> StoredChange:
    """Return the announcement of the event number ``number``, with its deliveries."""
    announced = change("announced", f"e{number}")
    announced = Change(
        id=f"c{number}",
        kind="announced",
        reason=announced.reason,
        time=T0,
        event=announced.event,
        scope="self",
        incarnation=1,
        first_seen=T0,
    )
    return StoredChange(announced, record_of(announced, None).line(), deliveries)


def delivery(event_key: str = "e", **fields: Any) -> Delivery:
    """Return a delivery that is due now and does not expire for a week."""
    now = time.time()
    times = {"created": now, "due": now, "expires": now + 7 * 86_400.0}
    return box.delivery(event_key, **{**times, **fields})


def write(store: Store, *changes: StoredChange, state: StoredState = ME) -> None:
    store.commit(state, changes)
    wait_until_written(store)


def events(store: Store) -> list[str]:
    return [row.event_key for row in rows_of(store)]


def test_unchanged_state_is_not_written_again(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        write(store)
        store.commit(ME)

        store.exchange([], {"chat": 1})

        assert store.disk.wait_written(0)


def test_delivery_is_leased_once_it_is_written(tmp_path: Path) -> None:
    clock = SteppedClock()
    with store_in(tmp_path, clock) as store:
        with LockedDisk(store) as disk:
            store.put([delivery(created=clock.time(), due=clock.time())])

            assert store.exchange([], {"chat": 1}) == []

            disk.heal()
        wait_until_written(store)

        assert len(store.exchange([], {"chat": 1})) == 1


def test_new_delivery_is_reported_at_once_and_when_it_is_written(tmp_path: Path) -> None:
    to_deliver = Mock()
    with store_in(tmp_path, to_deliver=to_deliver) as store:
        with LockedDisk(store) as disk:
            store.put([delivery()])

            assert to_deliver.call_count == 1

            disk.heal()

        eventually(lambda: to_deliver.call_count == 2)


def test_delivery_of_an_ended_courier_is_not_reported(tmp_path: Path) -> None:
    to_deliver = Mock()
    with store_in(tmp_path, to_deliver=to_deliver) as store:
        store.put([delivery()])
        wait_until_written(store)
        eventually(lambda: store.exchange([], {"chat": 1}))
        eventually(lambda: to_deliver.call_count == 2)

        store.courier_ended()  # the caller knows that it may deliver again
        wait_until_written(store)

        assert to_deliver.call_count == 2


def test_failed_delivery_is_due_again_after_a_random_pause(tmp_path: Path) -> None:
    clock = SteppedClock()
    deliveries = [delivery(f"{number}", due=clock.time(), expires=1e12) for number in range(40)]

    with store_in(tmp_path, clock) as store:
        store.put(deliveries)
        wait_until_written(store)
        leased = store.exchange([], {"chat": 40})
        store.exchange([SendResult(delivery.delivery_id, "failed") for delivery in leased], {})
        pauses = sorted(row.due - clock.boot_time() for row in rows_of(store))

    assert 0.0 <= pauses[0] < 0.5 < pauses[-1] <= 1.0


def test_delivery_waits_at_most_a_second_for_a_sick_disk(tmp_path: Path) -> None:
    clock = SteppedClock()
    with store_in(tmp_path, clock) as store, LockedDisk(store):
        store.put([delivery(created=clock.time(), due=clock.time())])

        assert not store.disk.wait_written(PATIENCE)
        assert store.disk.degraded == "database is locked"
        assert store.next_due() == 1.0
        assert store.exchange([], {"chat": 9}) == []

        clock.go(1.0)

        assert len(store.exchange([], {"chat": 9})) == 1


def test_next_delivery_of_an_event_waits_a_second_for_a_sick_disk(tmp_path: Path) -> None:
    clock = SteppedClock()
    times: dict[str, Any] = {"created": clock.time(), "due": clock.time(), "expires": 1e12}
    with store_in(tmp_path, clock) as store, LockedDisk(store):
        store.put([delivery(**times), delivery(**times)])
        clock.go(1.0)
        (first,) = store.exchange([], {"chat": 9})

        assert store.exchange([SendResult(first.delivery_id, "accepted")], {"chat": 9}) == []

        clock.go(1.0)

        assert len(store.exchange([], {"chat": 9})) == 1


def test_change_is_in_the_history_before_a_sick_disk_has_it(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        with LockedDisk(store) as disk:
            store.commit(ME, [stored(1)])

            assert len(store.history(None, 10).records) == 1

            disk.heal()
        wait_until_written(store)

    assert len(read_records(tmp_path)) == 1


def replace_file(path: Path, older: bytes) -> None:
    new = path.parent.with_name("older")
    new.write_bytes(older)
    new.replace(path)


def remove_directory(path: Path, _older: bytes) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda path, _older: path.unlink(), id="deleted"),
        pytest.param(replace_file, id="replaced"),
        pytest.param(lambda path, older: path.write_bytes(older), id="overwritten"),
        pytest.param(lambda path, older: os.truncate(path, len(older) // 2), id="truncated"),
        pytest.param(lambda path, _older: os.truncate(path, 0), id="emptied"),
        pytest.param(remove_directory, id="directory"),
    ],
)
def test_replaced_or_damaged_file_is_written_again(
    tmp_path: Path, harm: Callable[[Path, bytes], object]
) -> None:
    path = tmp_path / "state" / FILE_NAME
    newer = StoredState(vm=Vm(name="newer"))
    with store_in(path.parent) as store:
        write(store, stored(1, delivery("e1")))
        older_file = path.read_bytes()
        write(store, stored(2, delivery("e2")), state=newer)

        harm(path, older_file)
        store.commit(store.state, [stored(3, delivery("e3"))])

    with store_in(path.parent) as store:
        assert events(store) == ["e1", "e2", "e3"]
        assert store.state == newer
        assert stored(3).record in store.history(None, 10).records


@pytest.mark.parametrize(
    "harm",
    [Path.unlink, lambda path: os.truncate(path, 0), lambda path: path.write_bytes(b"?")],
    ids=["deleted", "emptied", "overwritten"],
)
def test_harmed_file_is_written_again_when_nothing_else_happens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], object],
) -> None:
    monkeypatch.setattr("notbefore.store.disk.LOOK_INTERVAL", 0.05)
    with store_in(tmp_path) as store:
        write(store)

        harm(store.path)
        eventually(lambda: "the state file cannot be written" in caplog.text)
        wait_until_written(store)

    with store_in(tmp_path) as store:
        assert store.state == ME


def test_start_sets_a_damaged_file_aside_and_keeps_readable_rows(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        write(store, *(stored(number, delivery(f"e{number}")) for number in range(200)))
    path = tmp_path / FILE_NAME
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 20_000)

    with store_in(tmp_path) as store:
        damaged = store.disk.file.damaged
        wait_until_written(store)
        readable_events = events(store)

    assert damaged == 1
    assert readable_events
    assert (tmp_path / f"{FILE_NAME}.damaged").exists()

    with store_in(tmp_path) as store:
        assert events(store) == readable_events


def test_start_leaves_an_unreadable_row_out(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        write(store, stored(1, delivery("e1"), delivery("e2")))
        first, _ = rows_of(store)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("UPDATE rows SET body = x'ff' WHERE key = ?", (first.delivery_id,))

    with store_in(tmp_path) as store:
        assert events(store) == ["e2"]
        assert store.disk.file.damaged == 1
        assert store.state == ME

        wait_until_written(store)

    with store_in(tmp_path) as store:
        assert events(store) == ["e2"]
        assert store.disk.file.damaged == 0


def set_schema(directory: Path, version: int) -> None:
    with closing(sqlite3.connect(directory / FILE_NAME)) as db:
        db.execute(f"PRAGMA user_version = {version}")


def test_file_of_an_older_schema_is_set_aside(tmp_path: Path) -> None:
    set_schema(tmp_path, 1)

    with store_in(tmp_path) as store:
        wait_until_written(store)
        state = store.state

    assert state == StoredState()
    assert (tmp_path / f"{FILE_NAME}.damaged").exists()


def test_file_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    set_schema(tmp_path, 99)

    with pytest.raises(StoreError, match="written by a newer notbefore"):
        Store(tmp_path, Clock())


def test_state_directory_may_be_a_symbolic_link(tmp_path: Path) -> None:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    link = tmp_path / "notbefore"
    link.symlink_to(directory)

    with store_in(link) as store:
        store.put([delivery("e1")])
        wait_until_written(store)

    with store_in(directory) as store:
        assert events(store) == ["e1"]


def test_history_names_its_problem_when_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notbefore.store.store.READ_PATIENCE", 0.1)
    with store_in(tmp_path) as store:
        write(store, stored(1))
        with LockedDisk(store):
            store.commit(ME, [stored(2)])

            history = store.history(None, 10)

            assert history.records == [stored(2).record]
            assert history.problem == "the disk has not answered for 0.1 s"


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o644])
def test_state_file_gets_private_permissions(tmp_path: Path, mode: int) -> None:
    with store_in(tmp_path) as store:
        write(store)
    store.path.chmod(mode)

    with store_in(tmp_path) as store:
        assert store.state == ME

    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_records_beyond_the_limit_are_counted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("notbefore.store.store.MAX_RECORDS", 3)
    with store_in(tmp_path) as store:
        wait_until_written(store)
        with LockedDisk(store) as disk:
            for number in range(5):
                store.commit(ME, [stored(number)])
            eventually(lambda: store.disk.degraded)

            assert store.history(T0.timestamp(), 2).records == [stored(3).record, stored(4).record]

            disk.heal()

        write(store, stored(9))

        assert caplog.text.count("missing") == 2
        assert caplog.text.count("1 records are missing in the history:") == 2
        assert len(store.history(None, 100).records) == 4


def test_full_outbox_makes_room_once_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with store_in(tmp_path) as store:
        changes = [
            stored(number, delivery(f"e{number}"), delivery(f"e{number}", sink="hub"))
            for number in range(600)
        ]

        write(store, *changes)

        assert len(rows_of(store)) == 1_000

    (warning,) = (message for message in caplog.messages if "outbox is full" in message)
    assert warning == (
        "the outbox is full: 200 deliveries are removed and not sent (chat: 100, hub: 100)"
    )


def test_start_waits_for_a_file_that_another_process_locks(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        write(store, stored(1, delivery("e1")))
    with closing(
        sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    ) as other_process:
        other_process.execute("BEGIN EXCLUSIVE")
        threading.Timer(1.0, other_process.rollback).start()

        with store_in(tmp_path) as store:
            assert store.state == ME
            assert events(store) == ["e1"]


def test_file_that_was_unreadable_at_the_start_is_kept_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_in(tmp_path) as store:
        write(store)
    load = StateFile.load
    disk_answers = threading.Event()
    monkeypatch.setattr("notbefore.store.disk.START_PATIENCE", 0.1)
    monkeypatch.setattr(StateFile, "load", lambda file: disk_answers.wait(PATIENCE) and load(file))
    # the first check fails; by the second one there is a new file
    check = Mock(side_effect=[OSError(errno.EIO, "I/O error"), *repeat(None, 1_000)])
    monkeypatch.setattr(StateFile, "check", check)

    with store_in(tmp_path) as store:
        assert store.disk.degraded is not None
        assert store.state == StoredState()

        store.put([delivery("e1")])
        disk_answers.set()  # too late
        wait_until_written(store)

    with closing(sqlite3.connect(tmp_path / f"{FILE_NAME}.unread")) as db:
        (states,) = db.execute("SELECT count(*) FROM rows WHERE kind = 'state'").fetchone()
        assert states > 0


def test_file_is_written_again_after_a_reader_failed(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        write(store)
        with LockedDisk(store):
            assert store.history(None, 9).problem != ""

        store.path.unlink()

        eventually(lambda: store.path.exists() and store.disk.degraded is None)
        assert read_state(tmp_path, "vm")


def test_disk_does_no_call_that_it_has_not_begun_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()
    answers = threading.Event()
    calls: list[str] = []

    def hang() -> None:
        hanging.set()
        answers.wait(PATIENCE)

    with store_in(tmp_path) as store:
        wait_until_written(store)
        monkeypatch.setattr("notbefore.store.disk.SLOW", 1.0)
        first = threading.Thread(target=store.disk.do, args=(hang, PATIENCE))
        first.start()
        assert hanging.wait(PATIENCE)

        with pytest.raises(TimeoutError, match="has not answered"):
            store.disk.do(lambda: calls.append("behind the call that hangs"), 0.2)
        eventually(lambda: store.disk.hangs)
        with pytest.raises(TimeoutError, match="has not"):
            store.disk.do(lambda: calls.append("while the disk hangs"), PATIENCE)
        answers.set()
        first.join(PATIENCE)
        eventually(lambda: not store.disk.hangs)
        store.disk.do(lambda: calls.append("afterwards"), PATIENCE)

    assert calls == ["afterwards"]


def test_disk_has_time_to_answer_after_a_freeze_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = iter((0.0, PATIENCE))  # as if the first wait had passed in the freeze

    with store_in(tmp_path) as store, monkeypatch.context() as patched:
        patched.setattr(
            "notbefore.store.disk.wait", lambda futures, _: wait(futures, next(timeouts))
        )

        assert store.disk.do(lambda: threading.Event().wait(0.1), PATIENCE) is False


# ---- the time that deliveries have left


def test_deliveries_expire_while_no_agent_runs(tmp_path: Path) -> None:
    clock = SteppedClock()
    now = clock.time()
    with store_in(tmp_path, clock) as store:
        store.know_time(now)
        store.put([delivery(created=now, due=now, expires=now + seconds) for seconds in (20, 600)])
        wait_until_written(store)

    clock.go(50.0)

    with store_in(tmp_path, clock) as store:
        (row,) = rows_of(store)
        assert row.expires - clock.boot_time() == pytest.approx(550.0)


def test_answer_without_a_date_keeps_the_known_time(tmp_path: Path) -> None:
    clock = SteppedClock()
    now = clock.time()
    with store_in(tmp_path, clock) as store:
        store.know_time(now)

        store.know_time(None)
        store.put([delivery(created=now, due=now, expires=now + 20)])
        clock.go(50.0)
        store.put([])

        assert rows_of(store) == []


@pytest.mark.parametrize(
    ("downtime", "seconds_left"),
    [
        pytest.param(100.0, 200.0, id="short"),
        pytest.param(500.0, -200.0, id="longer than the delivery"),
        pytest.param(-1_000.0, 600.0, id="impossible"),
        pytest.param(None, 600.0, id="unknown"),
    ],
)
def test_downtime_shortens_deliveries_once_when_imds_tells_the_time(
    tmp_path: Path, downtime: float | None, seconds_left: float
) -> None:
    before = SteppedClock()
    stopped = before.time()
    with store_in(tmp_path, before) as store:
        store.know_time(stopped)
        store.put([delivery(created=stopped, due=stopped, expires=stopped + 600)])
        wait_until_written(store)
    after = SteppedClock("second")
    after.booted = 5.0
    for _ in range(2):  # agents that run for 150 s and learn no time
        with store_in(tmp_path, after) as store:
            wait_until_written(store)
            after.go(150.0)
            store.put([])  # writes that the agent has run until now
    now = None
    if downtime is not None:
        now = stopped + downtime + 300

    with store_in(tmp_path, after) as store:
        store.know_time(now)
        wait_until_written(store)
        (row,) = rows_of(store)

    assert row.expires - after.boot_time() == pytest.approx(seconds_left)


def test_age_of_waiting_deliveries_ignores_the_wall_clock(tmp_path: Path) -> None:
    clock = SteppedClock()
    with store_in(tmp_path, clock) as store:
        store.put([delivery(created=clock.time(), due=clock.time(), expires=1e12)])

        clock.go(-3_000.0, booted=60.0)

        view = store.view(clock.time())
        assert clock.time() - view.oldest[("chat", "info")] == pytest.approx(60.0)

        wait_until_written(store)
        assert len(store.exchange([], {"chat": 9})) == 1


def test_history_is_within_its_bytes_after_each_hundred_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notbefore.store.file.HISTORY_BYTES", 4_000)
    with store_in(tmp_path) as store:
        write(store, stored(0))
        for first in (1, 101):
            write(store, *[stored(number) for number in range(first, first + 100)])

            records = store.history(None, 1_000).records
            assert 0 < len(records) * len(records[0]) <= 4_000


def test_history_and_each_answer_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notbefore.store.file.HISTORY_BYTES", 4_000)
    monkeypatch.setattr("notbefore.store.file.HISTORY_CHECK", 1)
    with store_in(tmp_path) as store:
        for number in range(10):
            write(store, stored(number))

        assert store.history(None, 2) == HistoryRecords([stored(8).record, stored(9).record])

    with store_in(tmp_path) as store:
        history = store.history(None, 100)
        records = history.records
        size = len(stored(9).record)

        assert records == [stored(number).record for number in range(10 - len(records), 10)]
        assert not history.was_cut
        assert 2 * size < len(records) * size <= 4_000
        assert store.history(None, 100, 2 * size) == HistoryRecords(records[-2:], was_cut=True)
        assert store.history(None, 100, 1) == HistoryRecords(records[-1:], was_cut=True)


def test_damaged_page_is_noticed_when_only_a_reader_finds_it(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        write(store, stored(1), stored(2))

        for _ in range(3):
            with store.path.open("r+b") as file:
                # SQLite's counter of changes: without a change, SQLite reads its cache
                file.seek(24)
                file.write(b"\xff\xff")
                file.seek(4096)
                file.write(b"\xff" * (store.path.stat().st_size - 4096))
            store.history(None, 10)
            wait_until_written(store)

        assert store.disk.file.damaged == 3
        assert (tmp_path / f"{FILE_NAME}.damaged").exists()

    with store_in(tmp_path) as store:
        assert store.state == ME
        assert store.disk.file.damaged == 0


def test_failed_lock_of_the_directory_is_reported_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", no_locks)
        with store_in(tmp_path) as store:
            assert "No locks available" in str(store.disk.degraded)

    with store_in(tmp_path) as store:
        assert store.disk.degraded is None


def test_deliveries_of_a_removed_sink_move_when_their_courier_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with store_in(tmp_path) as store:
        store.put([delivery("a"), delivery("b")])
        wait_until_written(store)
        store.exchange([], {"chat": 1})

        store.use_sinks({"ops": Terms()}, lambda _row: Targets(("ops",)))

        assert "sink chat is no longer configured: 1 waiting deliveries" in caplog.text
        assert sorted(row.sink for row in rows_of(store)) == ["chat", "ops"]

        store.courier_ended()

        assert {row.sink for row in rows_of(store)} == {"ops"}
