"""The store on a real disk: what it keeps, and what it does when the disk does not."""

import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from notbefore.core.approval import ApprovalAttempt
from notbefore.core.change import Change
from notbefore.core.delivery import Delivery, Routing, Terms, deliveries
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.core.tracked import Tracked
from notbefore.errors import StoreError
from notbefore.store import history as history_module
from notbefore.store import schema
from notbefore.store.confirmed_time import uptime
from notbefore.store.history import read_history
from notbefore.store.lock import CourierLock, is_zombie
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME, StoredChange, StoredState
from support.agent import eventually
from support.azure import ME, at, document, instant, item, now
from support.needs import needs

FOR_EVER = Terms(expire_after=1e10, expire_on_end=False)
DAY_AND_AGE = time.time() - at(0).timestamp() + 86_400.0  # from when the changes of these tests are, to tomorrow


def stored(change: Change, terms: Terms = FOR_EVER) -> StoredChange:
    routing = Routing(sinks={"hub": terms})
    return StoredChange(change, line(change), deliveries(change, line(change), routing, Vm(name=ME)))


class Writer:
    """A store that one document after the other is written to."""

    def __init__(self, directory: Path, terms: Terms = FOR_EVER, **limits: int) -> None:
        self.store = Store(directory, **limits)
        self.terms = terms
        self.memory = self.store.load()
        self.second = 0

    def sees(self, *items: object) -> "Writer":
        self.second += 1
        step = diff(self.memory.tracked, document(*items, incarnation=self.second), now(self.second))
        totals = self.memory.totals
        for change in step.changes:
            totals = totals.plus(change)
        self.memory = replace(self.memory, tracked=step.tracked, totals=totals)
        self.store.commit(self.memory, [stored(change, self.terms) for change in step.changes])
        return self


def line(change: Change) -> bytes:
    return Record.of(change, None).line()


def waiting(directory: Path) -> list[Delivery]:
    with closing(Outbox(directory / FILE_NAME)) as outbox:
        return outbox.rows()


def rows(directory: Path) -> int:
    return len(read_history(directory / FILE_NAME, None, 1_000_000).records)


def test_a_restart_finds_everything_as_it_was(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a"), item("b")).sees(item("b", EventStatus="Started"))
    writer.memory = replace(writer.memory, vm=Vm(name=ME), seen=instant(9), seen_by=Vm(name=ME), clean=True)
    writer.sees(item("b", EventStatus="Started"))
    writer.store.close()
    store = Store(tmp_path)
    assert store.load() == writer.memory
    assert [b"announced" in row for row in store.history(None, 10).records] == [True, True, False, False]
    store.close()


def test_departed_events_come_back_in_their_order(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for name in ("z", "a", "m"):
        writer.sees(item(name)).sees()
    writer.store.close()
    store = Store(tmp_path)
    assert list(store.load().tracked.departed) == ["z", "a", "m"]
    store.close()


def test_the_beat_is_written_without_the_rest(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item())
    writer.store.note_running(replace(writer.memory, seen=instant(70, "boot-2"), last_running=instant(77, "boot-2")))
    writer.store.close()
    store = Store(tmp_path)
    memory = store.load()
    assert (memory.seen, memory.last_running, memory.boot_id, memory.clean) == (
        instant(70, "boot-2"),
        instant(77, "boot-2"),
        "boot-2",
        False,
    )
    store.close()


def test_the_outbox_holds_a_delivery_for_each_change_the_earliest_first(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a")).sees(item("b"))
    writer.store.close()
    found = waiting(tmp_path)
    assert [one.due for one in found] == [at(1).timestamp(), at(2).timestamp(), at(2).timestamp()]
    assert {one.event_key for one in found} == {"a", "b"}
    assert len({one.delivery_id for one in found}) == 3


def spoil(directory: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(directory / FILE_NAME)) as db, db:
        assert db.execute(statement, values).rowcount > 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tracked SET body = CAST(replace(body, '\"self\"', '\"host_group\"') AS BLOB) WHERE event_key = 'a'",
        "UPDATE tracked SET body = 'nonsense' WHERE event_key = 'a'",
        "UPDATE tracked SET body = 7 WHERE event_key = 'a'",
        "UPDATE tracked SET version = 2 WHERE event_key = 'a'",
    ],
)
def test_a_row_that_cannot_be_read_costs_that_row_and_is_kept_beside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    writer = Writer(tmp_path).sees(item("a"), item("b"))
    writer.store.close()
    spoil(tmp_path, statement)
    store = Store(tmp_path)
    assert list(store.load().tracked.events) == ["b"]
    assert store.load().totals == writer.memory.totals
    assert (store.unreadable_rows, store.damaged_files, store.degraded) == (1, 0, None)
    store.close()
    assert len(waiting(tmp_path)) == 2
    assert caplog.text.count("1 rows of the state cannot be read") == 1
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        ((source, key, error),) = db.execute("SELECT source, row_key, error FROM unreadable_rows").fetchall()
    assert (source, key) == ("tracked", "a")
    assert error
    again = Store(tmp_path)
    assert (again.unreadable_rows, list(again.load().tracked.events)) == (0, ["b"])
    again.close()


@pytest.mark.parametrize("key", ["totals", "vm", "seen", "confirmed_time"])
def test_a_figure_that_cannot_be_read_costs_no_other(tmp_path: Path, key: str) -> None:
    writer = Writer(tmp_path).sees(item("a"))
    writer.memory = replace(writer.memory, vm=Vm(name=ME), seen=instant(9))
    writer.sees(item("a"), item("b"))
    writer.store.close()
    spoil(tmp_path, "UPDATE meta SET body = 'nonsense' WHERE key = ?", key)
    store = Store(tmp_path)
    expected = replace(writer.memory, **({key: getattr(StoredState(), key)} if key != "confirmed_time" else {}))
    assert (store.load(), store.unreadable_rows) == (expected, 1)
    store.close()


def test_a_word_of_a_newer_version_among_the_figures_is_kept_beside(tmp_path: Path) -> None:
    Writer(tmp_path).sees(item("a")).store.close()
    spoil(tmp_path, "INSERT INTO meta VALUES ('leader', 1, 'x')")
    store = Store(tmp_path)
    assert (store.unreadable_rows, list(store.load().tracked.events)) == (1, ["a"])
    store.close()


def test_each_approval_is_a_row_and_only_what_differs_is_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a"))
    (one,) = writer.memory.tracked.events.values()
    approvals = {f"{number:04}": ApprovalAttempt(one, "rule") for number in range(1000)}
    writer.memory = replace(writer.memory, approvals=approvals)
    writer.store.commit(writer.memory, [])
    db = writer.store._main.db
    before = db.total_changes
    approvals = {**approvals, "0500": ApprovalAttempt(one, "another")}
    del approvals["0001"]
    writer.memory = replace(writer.memory, approvals=approvals)
    writer.store.commit(writer.memory, [])
    assert db.total_changes - before < 20
    writer.store.close()
    store = Store(tmp_path)
    assert list(store.load().approvals.items()) == list(approvals.items())
    store.close()


TWO_YEARS = 2 * 365 * 86_400.0


def at_present(*names: str) -> list[dict[str, object]]:
    """Events as Azure lists them, of which the changes are seen now: their deliveries expire a day from now."""
    return [item(name) for name in names]


def shift_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + seconds)


def test_a_clock_that_is_ahead_for_one_commit_deletes_no_history_and_expires_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, Terms(expire_after=DAY_AND_AGE)).sees(item("a"))
    with monkeypatch.context() as patch:
        shift_clock(patch, TWO_YEARS)
        writer.sees(item("a"), item("b"))
        with closing(Outbox(tmp_path / FILE_NAME)) as outbox:  # the courier looks at the same clock
            assert len(outbox.exchange(CourierTurn([], {"hub": 9}, time.time()))) == 2
    assert rows(tmp_path) == 2
    assert len(waiting(tmp_path)) == 2
    writer.store.close()


def test_a_time_that_is_confirmed_expires_what_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, Terms(expire_after=DAY_AND_AGE)).sees(item("a"))
    shift_clock(monkeypatch, TWO_YEARS)
    writer.store.confirm_time(time.time())
    writer.sees(item("a"), item("b"))
    assert waiting(tmp_path) == []
    writer.store.close()


@pytest.mark.parametrize(("same_boot", "passed"), [(True, 100.0), (False, 0.0)])
def test_time_goes_on_from_the_last_commit_and_after_a_reboot_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, same_boot: bool, passed: float
) -> None:
    writer = Writer(tmp_path).sees(item("a"))
    before = writer.store._moment().surely
    writer.store.close()
    real = uptime()
    monkeypatch.setattr("notbefore.store.state.uptime", lambda: real + 100)
    shift_clock(monkeypatch, TWO_YEARS)
    if not same_boot:
        monkeypatch.setattr("notbefore.store.state.boot_id", lambda: "another")
    store = Store(tmp_path)
    assert store._moment().surely == pytest.approx(before + passed, abs=30)
    monkeypatch.setattr("notbefore.store.state.uptime", lambda: real + 150)
    assert store._moment().surely == pytest.approx(before + passed + 50, abs=30)
    store.close()


def test_the_history_is_bounded_by_bytes_and_the_file_gives_its_space_back(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number in range(300):
        writer.sees(item(f"id-{number}", Resources=[f"vm-{one}" for one in range(200)]))
    writer.store.close()
    path = tmp_path / FILE_NAME
    large = path.stat().st_size
    writer = Writer(tmp_path, history_bytes=64 * 1024).sees(item("last"))
    kept = writer.store.history(None, 10_000).records
    assert 10 < len(kept) < 100
    assert sum(map(len, kept)) <= 64 * 1024
    assert b'"last"' in b"".join(kept[-2:])
    for _ in range(100):
        writer.store.look_after()
    writer.store.close()
    assert path.stat().st_size < large / 2


@pytest.mark.parametrize(
    "how", ["deleted", "deleted with its log", "deleted with its directory", "replaced", "garbage"]
)
def test_a_file_that_is_deleted_or_replaced_is_written_anew_with_all_that_is_known(tmp_path: Path, how: str) -> None:
    state = tmp_path / "state"
    writer = Writer(state).sees(item("a")).sees(item("a"), item("b"))
    path = state / FILE_NAME
    if how == "deleted":
        path.unlink()
    elif how == "deleted with its log":
        for part in state.glob(FILE_NAME + "*"):
            part.unlink()
    elif how == "deleted with its directory":
        shutil.rmtree(state)
    elif how == "garbage":
        (state / "new").write_bytes(b"no database" * 1000)
        (state / "new").replace(path)
    else:
        Writer(tmp_path / "other").sees(item("z")).store.close()
        (tmp_path / "other" / FILE_NAME).replace(path)
    writer.store.look_after()
    assert writer.store.degraded is None
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT event_key FROM tracked").fetchall() == [("a",), ("b",)]
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert {"a", "b"} <= {one.event_key for one in waiting(state)}
    writer.sees(item("a"), item("b"), item("c"))
    writer.store.close()
    assert rows(state) >= 3
    store = Store(state)
    assert list(store.load().tracked.events) == ["a", "b", "c"]
    store.close()
    damaged = {path.name for path in state.glob("*.damaged-*")}
    assert bool(damaged) == (how == "garbage")
    assert {path.name for path in state.iterdir()} - damaged == {FILE_NAME, "agent.lock"}


def test_the_same_delivery_waits_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a"))
    (one,) = diff(Tracked(), document(item("a"), incarnation=1), now(1)).changes
    writer.store.commit(writer.memory, [stored(one)])
    assert len(waiting(tmp_path)) == 1
    writer.store.close()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "pages"])
def test_a_damaged_file_is_set_aside_and_begun_anew(tmp_path: Path, damage: str) -> None:
    writer = Writer(tmp_path)
    for number in range(200):
        writer.sees(item(f"id-{number}"))
    writer.store.close()
    path = tmp_path / FILE_NAME
    octets = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(b"no database" * 1000)
    elif damage == "truncated":
        path.write_bytes(octets[: len(octets) // 2])
    else:
        path.write_bytes(octets[:4096] + b"\xa5" * (len(octets) - 4096))
    store = Store(tmp_path)
    memory = store.load()
    assert (store.damaged_files, store.degraded) == (1, None)
    assert memory.tracked.events.keys() <= {f"id-{number}" for number in range(200)}  # what could be read
    assert len(list(tmp_path.glob(f"{FILE_NAME}.damaged-*"))) >= 1
    store.close()
    Writer(tmp_path).sees(item()).store.close()
    assert rows(tmp_path) >= 1


def test_damage_that_shows_while_it_runs_loses_nothing_that_is_known(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET rootpage = 9999 WHERE name = 'tracked'")
        db.execute("PRAGMA schema_version = 99")
    writer.sees(item("a"), item("b"))
    assert (writer.store.damaged_files, writer.store.degraded) == (1, None)
    writer.store.close()
    store = Store(tmp_path)
    assert set(store.load().tracked.events) == {"a", "b"}
    store.close()


def test_a_full_disk_degrades_and_all_is_written_when_there_is_room_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a"))
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # no file may grow: as a full disk has it
    try:
        writer.sees(item("a"), item("b"))
        assert writer.store.degraded
        writer.sees(item("b"))
        writer.store.retry()
        assert writer.store.degraded
        assert [b"announced" in row for row in writer.store.history(None, 2).records] == [True, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.store.retry()
    assert writer.store.degraded is None
    assert len(waiting(tmp_path)) == 3
    writer.store.close()
    assert rows(tmp_path) == 3
    store = Store(tmp_path)
    assert set(store.load().tracked.events) == {"b"}
    store.close()


def test_a_directory_that_cannot_be_made_degrades_from_the_start_and_mends(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way", encoding="utf-8")
    writer = Writer(tmp_path / "state").sees(item())
    assert writer.store.degraded
    writer.store.note_running(replace(writer.memory, last_running=instant(1)))
    (tmp_path / "state").unlink()
    writer.store.retry()
    assert writer.store.degraded is None
    writer.store.close()
    assert rows(tmp_path / "state") == 1


def test_a_second_agent_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="another notbefore is running"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_the_id_of_a_courier_is_written_also_where_that_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    with CourierLock(tmp_path) as lock:
        monkeypatch.setattr("notbefore.store.lock._lock", lambda _: lock._disk.post(answers.wait))
        lock.acquire(1, lambda: None)
        assert (tmp_path / "courier.lock").read_bytes() == b""
        answers.set()
        eventually(lambda: int((tmp_path / "courier.lock").read_bytes() or 0) == os.getpid())


_KILLED: Final = """
import ctypes, sys, threading, time
from pathlib import Path
from notbefore.store.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
lock.acquire()
threading.Thread(target=time.sleep, args=(3600,)).start()  # as one that waits for the disk
print("held", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what has become of a process")
def test_an_agent_that_was_killed_and_waits_for_the_disk_is_not_another_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as previous:
        assert previous.stdout is not None
        assert previous.stdout.readline()
        eventually(lambda: is_zombie(previous.pid))
        writer = Writer(tmp_path).sees(item())
        assert "waits for the disk" in (writer.store.degraded or "")
        writer.store.retry()
        assert writer.store.degraded
        previous.kill()
    writer.store.retry()
    assert writer.store.degraded is None
    writer.store.close()
    assert rows(tmp_path) == 1


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    Writer(tmp_path).sees(item()).store.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="newer notbefore"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="newer notbefore"):  # as a command opens it
        schema.connect(tmp_path / FILE_NAME, "ro")
    assert rows(tmp_path) == 1


def test_an_older_file_is_copied_and_then_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Writer(tmp_path).sees(item("a")).store.close()
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
    steps = {1: "CREATE TABLE second (x);", 2: "CREATE TABLE third (x); INSERT INTO third VALUES (7);"}
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    store = Store(tmp_path)
    assert (list(store.load().tracked.events), store.damaged_files) == (["a"], 0)
    store.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        assert db.execute("SELECT x FROM third").fetchone() == (7,)
    with closing(sqlite3.connect(tmp_path / f"{FILE_NAME}.schema-1")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (1,)
        assert copy.execute("SELECT count(*) FROM tracked").fetchone() == (1,)
    assert not list(tmp_path.glob("*.schema-2"))


def test_a_file_of_this_version_is_not_copied(tmp_path: Path) -> None:
    Writer(tmp_path).sees(item()).store.close()
    Store(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, "agent.lock"}


def test_the_history_is_bounded_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_ROWS", 10)
    writer = Writer(tmp_path)
    for number in range(30):
        writer.sees(item(f"id-{number}"))
    assert rows(tmp_path) == 10
    writer.store.close()


def test_the_history_is_read_since_a_time_and_up_to_a_limit(tmp_path: Path) -> None:
    writer = Writer(tmp_path).sees(item("a")).sees(item("a"), item("b")).sees(item("a"), item("b"), item("c"))
    assert len(writer.store.history(at(2).timestamp(), 10).records) == 2
    assert b'"c"' in writer.store.history(None, 1).records[0]
    writer.store.close()


CHILD = """
import sys
from pathlib import Path
from msgspec.structs import replace
from datetime import UTC, datetime, timedelta
from notbefore.core.clock import Instant
from notbefore.core.document import Document, Event
from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Observation
from notbefore.core.delivery import Routing, Terms, deliveries
from notbefore.core.record import Vm
from notbefore.core.routing import Route
from notbefore.store.state import Store
from notbefore.store.state_file import StoredChange
routing = Routing((Route(sinks=("hub",), announce_by="all"),), {"hub": Terms(1e10, False)})
store = Store(Path(sys.argv[1]))
memory = store.load()
begin = int(memory.tracked.incarnation or 0) + 1
for number in range(begin, begin + 100_000):
    event = Event(f"id-{number}", "Freeze", "Scheduled")
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    step = diff(memory.tracked, Document(number, (event,)), Observation(Instant(time), "me"))
    totals = memory.totals
    for change in step.changes:
        totals = totals.plus(change)
    memory = replace(memory, tracked=step.tracked, totals=totals)
    changes = [StoredChange(change, b"", deliveries(change, b"", routing, Vm(name="me"))) for change in step.changes]
    store.commit(memory, changes)
    print(number, flush=True)
"""


def test_kill_9_at_any_moment_loses_nothing_that_was_committed_and_splits_nothing(tmp_path: Path) -> None:
    for _ in range(15):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as child:
            assert child.stdout
            reported = [int(child.stdout.readline()) for _ in range(1 + int.from_bytes(os.urandom(1)) // 8)]
            child.kill()
            reported += [int(number) for number in child.stdout.read().split(b"\n")[:-1]]
        store = Store(tmp_path)
        memory = store.load()
        store.close()
        assert store.damaged_files == 0
        incarnation = memory.tracked.incarnation or 0
        assert incarnation in (reported[-1], reported[-1] + 1)  # the last may have been committed and not yet reported
        assert set(memory.tracked.events) == {f"id-{incarnation}"}
        # one announcement an event, and an end for each but the last: tracked, totals, history and outbox agree
        assert sum(memory.totals.changes.values()) == 2 * incarnation - 1 == rows(tmp_path) == len(waiting(tmp_path))


def test_a_memory_begins_empty() -> None:
    assert StoredState().tracked.events == {}


def test_a_long_history_is_cut_at_its_old_end_and_says_so(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for name in ("a", "b", "c"):
        writer.sees(item(name))
    whole = writer.store.history(None, 100)
    assert (len(whole.records), whole.cut) == (5, False)
    part = writer.store.history(None, 100, sum(map(len, whole.records)) - 1)
    assert (part.records, part.cut) == (whole.records[1:], True)
    writer.store.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_whatever_the_umask_what_is_made_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    before = os.umask(umask)
    try:
        store = Store(directory)
        with CourierLock(directory) as lock:
            lock.acquire(1, lambda: None)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert {"notbefore.db", "agent.lock", "courier.lock"} <= modes.keys()
    assert set(modes.values()) == {0o600}, modes


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / "notbefore.db").chmod(0o644)
    Store(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "notbefore.db").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreError, match="can be written by other users: chmod go-w"):
        Store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    needs("root")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        Store(tmp_path)


@pytest.mark.parametrize("name", ["notbefore.db", "agent.lock", "courier.lock"])
def test_no_link_that_was_planted_is_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious", encoding="utf-8")
    state = tmp_path / "state"
    state.mkdir()
    (state / name).symlink_to(victim)
    with pytest.raises(StoreError, match=r"not a regular file|is a symbolic link"), CourierLock(state) as lock:
        lock.acquire(1, lambda: None) if name == "courier.lock" else Store(state)
    assert victim.read_text(encoding="utf-8") == "precious"


def test_nobody_is_killed_whose_id_stands_in_a_file_that_others_can_write(tmp_path: Path) -> None:
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats > 20:
            raise TimeoutError

    with subprocess.Popen(["/bin/sleep", "60"]) as bystander, CourierLock(tmp_path) as held:
        held.acquire(1, lambda: None)
        path = tmp_path / "courier.lock"
        path.write_text(str(bystander.pid), encoding="ascii")
        path.chmod(0o666)
        with CourierLock(tmp_path) as second, pytest.raises(TimeoutError):
            second.acquire(0, beat)
        assert bystander.poll() is None
        path.chmod(0o600)
        beats = 0
        with CourierLock(tmp_path) as second, pytest.raises(TimeoutError):
            second.acquire(0, beat)
        assert bystander.wait(20) == -signal.SIGKILL  # nothing but the check has kept it alive
