"""The outbox on disk: order, leases, expiry, bounds, and the sum that must always be right."""

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.core.record import Record
from notbefore.errors import StoreError
from notbefore.metrics.outbox import OutboxView
from notbefore.store import outbox_fallback, outbox_intake, outbox_reader
from notbefore.store.copying import copy_readable
from notbefore.store.disk import DiskThread
from notbefore.store.outbox import BATCH_ROWS, DEAD_SECONDS, REPEAT_SECONDS, CourierTurn, Outbox
from notbefore.store.outbox_reader import OutboxReader, read_outbox
from notbefore.store.schema import connect, transaction
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME
from support.box import Box, delivered, delivery, ids
from support.messages import message


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with closing(Box(tmp_path)) as made:
        yield made


def test_what_is_leased_is_not_leased_again_whatever_the_clock_says(box: Box) -> None:
    one = delivery()
    box.put(one)
    (first,) = box.lease(1)
    assert (first.delivery_id, first.attempts) == (one.delivery_id, 0)
    assert box.lease(1e8) == []
    box.outbox.release_leases(2)
    (again,) = box.lease(2)
    assert (again.delivery_id, again.attempts) == (one.delivery_id, 1)


def test_a_new_courier_takes_over_at_once(box: Box) -> None:
    box.put(delivery())
    box.lease(1)
    box.outbox.release_leases(1)
    assert len(box.lease(1)) == 1


def test_nothing_is_sent_before_what_comes_before_it(box: Box) -> None:
    first, second, other = delivery(), delivery(kind="started"), delivery("other")
    box.put(first, second, other)
    assert ids(box.lease(1)) == [first.delivery_id, other.delivery_id]
    assert box.lease(2, DeliveryResult(first.delivery_id, "retry", 2, due=30)) == []
    assert ids(box.lease(31)) == [first.delivery_id]
    assert ids(box.lease(32, delivered(first))) == [second.delivery_id]


def test_a_dead_delivery_holds_nothing_back(box: Box) -> None:
    first, second = delivery(), delivery(kind="started")
    box.put(first, second)
    box.lease(1)
    assert ids(box.lease(2, DeliveryResult(first.delivery_id, "dead", 2, error="404"))) == [second.delivery_id]
    assert [(one.state, one.error) for one in box.outbox.rows("dead")] == [("dead", "404")]


def test_a_sink_that_is_stuck_holds_no_other_back(box: Box) -> None:
    box.put(delivery(), delivery(sink="hub"), delivery("f", sink="hub"))
    assert len(box.lease(1, chat=0, hub=9)) == 2


def test_the_most_severe_goes_first(box: Box) -> None:
    box.put(delivery("a"), delivery("b", severity="critical"), delivery("c", severity="warning"))
    assert [one.severity for one in box.lease(1)] == ["critical", "warning", "info"]


def test_nothing_is_sent_before_it_is_due(box: Box) -> None:
    box.put(delivery(due=20.0))
    assert box.lease(19) == []
    assert box.outbox.next_due() == box.next_due == 20
    assert len(box.lease(20)) == 1


def test_nothing_waits_for_a_clock_that_was_set_back(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: dict[str, Any] = {"created": 5000.0, "due": 5000.0}
    first, second = delivery(**ahead), delivery(kind="started", **ahead)
    reminder = delivery("f", kind="reminder", **ahead)
    box.put(first, second, reminder)
    for clock, due in ((6000.0, 5000.0), (1000.0, 1000.0)):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        assert box.outbox.next_due() == box.next_due == due
    taken = box.outbox.exchange(CourierTurn([], {"chat": 10}, 1000, {"chat"}))
    assert ids(taken) == [first.delivery_id, second.delivery_id]
    failed = DeliveryResult(first.delivery_id, "retry", 1001, due=1010)
    assert ids(box.lease(1002, failed, delivered(second, 1001))) == []  # a pause is a pause
    assert ids(box.lease(1010)) == [first.delivery_id]


def test_nor_does_what_was_on_its_way_or_had_failed_before_the_clock_was_set_back(box: Box) -> None:
    killed, failed = (delivery(name, created=50_000.0, due=50_000.0) for name in ("e", "f"))
    box.put(killed, failed)
    assert len(box.lease(50_000)) == 2
    box.lease(50_001, DeliveryResult(failed.delivery_id, "retry", 50_001, due=50_200))
    box.outbox.release_leases(1_000)
    assert ids(box.lease(1_000)) == [killed.delivery_id, failed.delivery_id]


def test_nor_does_what_failed_while_the_clock_was_ahead(box: Box) -> None:
    one = delivery(created=1_000.0, due=1_000.0)
    box.put(one)
    box.lease(1_000)
    box.lease(50_000, DeliveryResult(one.delivery_id, "retry", 50_000, due=50_060))
    assert ids(box.lease(1_002)) == [one.delivery_id]
    box.lease(1_003, DeliveryResult(one.delivery_id, "retry", 1_003, due=1_003 + 3_600))
    assert box.lease(1_004) == []  # a pause is a pause


def test_whose_turn_comes_later_is_not_early_because_of_some_milliseconds(box: Box) -> None:
    box.put(delivery(created=1_000.4, due=1_020.4))
    assert box.lease(1_000) == []


def test_what_only_helps_before_the_end_expires_with_the_event(box: Box) -> None:
    announced, started = delivery(), delivery(kind="started", expires_with_event=False)
    box.put(announced, started)
    box.ended("e")
    assert ids(box.lease(6)) == [started.delivery_id]
    assert box.count("expired") == 1


def test_what_is_on_its_way_when_the_event_ends_is_delivered_or_expires(box: Box) -> None:
    arrives, fails = delivery(), delivery("f")
    box.put(arrives, fails)
    box.lease(1)
    for key in ("e", "f"):
        box.ended(key)
    box.lease(3, delivered(arrives), DeliveryResult(fails.delivery_id, "retry", 3, due=4))
    assert (box.count("delivered"), box.count("expired"), box.outbox.rows()) == (1, 1, [])


def test_a_delivery_that_is_too_old_expires(box: Box) -> None:
    box.put(delivery(expires=10.0))
    assert box.lease(10) == []
    assert box.count("expired") == 1


def test_a_reminder_waits_for_its_time_and_nothing_waits_for_it(box: Box) -> None:
    announced, reminder, moved = delivery(), delivery(kind="reminder", due=100.0), delivery(kind="updated")
    box.put(announced, reminder)
    box.lease(1, *[delivered(one) for one in box.lease(1)])
    assert box.outbox.next_due() == 100
    box.put(moved)
    assert ids(box.lease(2)) == [moved.delivery_id]


@pytest.mark.parametrize("what", ["moved", "started", "ended"])
def test_a_reminder_is_withdrawn_when_its_time_means_nothing_any_more(box: Box, what: str) -> None:
    box.put(delivery(kind="reminder", due=100.0))
    if what == "moved":
        box.put(delivery(kind="updated"))
    else:
        (box.started if what == "started" else box.ended)("e")
    assert "reminder" not in {one.kind for one in box.lease(6)}
    assert box.count("withdrawn") == 1


@pytest.mark.parametrize("seconds", [-60.0, 7200.0])
def test_a_reminder_moves_with_not_before_also_where_its_sink_is_not_notified(box: Box, seconds: float) -> None:
    gone = delivery(kind="reminder", due=100.0, expires=160.0)
    box.put(delivery(), gone)
    box.started("e")  # it is withdrawn, and stays so
    reminder = delivery(kind="reminder", created=100.0, due=100.0, expires=160.0)
    box.put(reminder, delivery("f", kind="reminder", due=100.0))
    with transaction(box.outbox._db) as db:
        outbox_intake.not_before_changed(db, "e", seconds, b'{"moved":1}')
    found = {one.delivery_id: one for one in box.outbox.rows()}
    moved = found[reminder.delivery_id]
    assert (moved.created, moved.due, moved.expires) == (100 + seconds, 100 + seconds, 160 + seconds)
    assert moved.record == b'{"moved":1}'
    assert found[gone.delivery_id].expires == outbox_intake.WITHDRAWN
    assert [one.due for one in found.values() if one.event_key == "f"] == [100]


def test_what_is_repeated_is_held_until_the_event_ends(box: Box) -> None:
    one = delivery()
    box.put(one)
    box.lease(1)
    box.lease(2, delivered(one, 2, repeat=30.0))
    assert box.view.rows == {("chat", "repeating"): 1}
    (again,) = box.lease(32)
    assert again.state == "repeating"
    box.lease(33, DeliveryResult(one.delivery_id, "retry", 33, due=40))
    assert [row.delivery_id for row in box.lease(40)] == [one.delivery_id]
    box.lease(41, delivered(one, 41, repeat=30.0))
    box.ended("e")
    assert box.outbox.rows() == []
    assert (box.count("accepted"), box.count("delivered"), box.count("failed")) == (1, 1, 1)


def test_a_repetition_that_is_refused_is_tried_again_and_can_be_sent_now(box: Box) -> None:
    box.put(delivery())
    (one,) = box.lease(1)
    box.lease(2, delivered(one, 2, repeat=30.0))
    assert len(box.lease(32)) == 1
    box.lease(33, DeliveryResult(one.delivery_id, "dead", 33, error="401"))
    (row,) = box.outbox.rows("repeating")
    assert (row.due, row.error, box.count("failed"), box.count("dead")) == (93, "401", 1, 0)
    assert box.outbox.retry([one.delivery_id], 40, 60) == 1
    (again,) = box.lease(40)
    assert again.state == "repeating"
    box.lease(41, delivered(one, 41, repeat=30.0))
    (row,) = box.outbox.rows("repeating")
    assert (row.attempts, row.error) == (0, "")  # the next failure is a first one


def test_what_is_repeated_gives_way_to_what_is_newer(box: Box) -> None:
    one, newer = delivery(), delivery(kind="updated")
    box.put(one)
    box.lease(1)
    box.put(newer)
    assert ids(box.lease(2, delivered(one, 2, repeat=30.0))) == [newer.delivery_id]
    assert ids(box.outbox.rows()) == [newer.delivery_id]
    box.lease(3, delivered(newer, 3, repeat=30.0))
    box.put(delivery(kind="started"))
    assert [row.kind for row in box.outbox.rows()] == ["started"]


def test_a_reminder_that_waits_does_not_end_the_repetition(box: Box) -> None:
    announced = delivery()
    box.put(announced, delivery(kind="reminder", due=500.0))
    box.lease(1)
    box.lease(2, delivered(announced, 2, repeat=30.0))
    assert ids(box.outbox.rows("repeating")) == [announced.delivery_id]


def test_what_is_repeated_lasts_as_long_as_its_event(box: Box) -> None:
    box.put(delivery(expires=100.0))
    (one,) = box.lease(1)
    box.lease(2, delivered(one, 2, repeat=30.0))
    assert len(box.lease(200)) == 1


def test_what_arrives_after_the_event_has_ended_is_not_repeated(box: Box) -> None:
    started = delivery(kind="started", expires_with_event=False)
    box.put(started)
    box.ended("e")
    box.lease(1)
    box.lease(2, delivered(started, 2, repeat=30.0))
    assert box.outbox.rows() == []


def test_a_sink_that_takes_several_gets_all_that_is_due_of_an_event_in_order(box: Box) -> None:
    first, second, later, last = delivery(), delivery(kind="started"), delivery(due=50.0), delivery()
    box.put(first, delivery("f"), second, later, last)
    taken = box.outbox.exchange(CourierTurn([], {"chat": 10}, 1, {"chat"}))
    assert [one.event_key for one in taken] == ["e", "e", "f"]
    assert ids(taken)[:2] == [first.delivery_id, second.delivery_id]
    assert box.outbox.exchange(CourierTurn([], {"chat": 10}, 2, {"chat"})) == []


def test_one_event_is_repeated_once_at_a_time(box: Box) -> None:
    announced, reminder = delivery(), delivery(kind="reminder", due=50.0)
    box.put(announced, reminder)
    box.lease(1)
    box.lease(2, delivered(announced, 2, repeat=100.0))
    box.lease(50)
    box.lease(51, delivered(reminder, 51, repeat=100.0))
    assert ids(box.outbox.rows("repeating")) == [reminder.delivery_id]


def test_later_deliveries_of_an_event_are_given_its_thread(box: Box) -> None:
    first, second, stranger = delivery(), delivery(kind="started"), delivery(sink="hub")
    box.put(first, second, stranger)
    assert [one.thread for one in box.lease(1)] == [None, None]
    (next_one,) = box.lease(2, delivered(first, thread="1234.5"))
    assert next_one.thread == "1234.5"


def test_the_same_delivery_is_taken_in_once(box: Box) -> None:
    one = delivery()
    box.put(one, one)
    assert box.count("accepted") == len(box.outbox.rows()) == 1


def test_a_full_outbox_pushes_out_the_oldest_of_the_least_severe_and_counts_it(box: Box) -> None:
    critical, old, new = delivery("a", severity="critical"), delivery("b"), delivery("c")
    box.put(critical, old, new, delivery("d", expires=3.0))
    box.expire(5, max_rows=2)
    assert ids(box.outbox.rows()) == [critical.delivery_id, new.delivery_id]
    assert (box.count("expired"), box.count("overflowed")) == (1, 1)


def test_a_full_outbox_pushes_out_repetitions_first_and_counts_none(box: Box) -> None:
    repeated, critical, new = delivery("a", severity="critical"), delivery("b", severity="critical"), delivery("c")
    box.put(repeated)
    box.lease(1)
    box.lease(2, delivered(repeated, 2, repeat=30.0))
    box.put(critical, new)
    box.expire(5, max_rows=2)
    assert ids(box.outbox.rows()) == [critical.delivery_id, new.delivery_id]
    assert box.count("overflowed") == 0


def test_a_thread_is_forgotten_a_month_after_its_last_message(box: Box) -> None:
    first, second, third = delivery(), delivery(kind="started"), delivery(kind="finished")
    month = 30 * 86_400.0
    box.put(first, second, third)
    box.lease(1)
    (next_one,) = box.lease(2, delivered(first, thread="1234.5"))
    assert next_one.thread == "1234.5"
    box.expire(1 + month)
    (last,) = box.lease(3, delivered(second, 3))
    assert last.thread == "1234.5"
    box.expire(2 + month)
    box.outbox.release_leases(2 + month)
    assert box.lease(3 + month)[0].thread is None


def test_a_dead_letter_is_sent_again_when_asked_for(box: Box) -> None:
    one = delivery(expires=10.0)
    box.put(one)
    box.lease(1)
    box.lease(2, DeliveryResult(one.delivery_id, "dead", 2, error="404"))
    assert box.lease(500) == []
    assert box.outbox.retry([one.delivery_id], 1000, 60) == 1
    assert box.outbox.rows()[0].expires == 1060
    assert ids(box.lease(1001)) == [one.delivery_id]


def test_what_is_on_its_way_is_not_sent_again_by_hand(box: Box) -> None:
    one = delivery()
    box.put(one)
    box.lease(1)
    assert box.outbox.retry([one.delivery_id], 1e6, 60) == 0
    box.outbox.release_leases(2)
    assert box.outbox.retry([one.delivery_id], 2, 60) == 1


def test_what_is_dropped_is_counted(box: Box) -> None:
    one, under_way = delivery(), delivery("f")
    box.put(one, under_way)
    box.lease(1, chat=2)
    assert box.outbox.drop([one.delivery_id]) == 0  # on its way: too late
    box.outbox.release_leases(2)
    assert box.outbox.drop([one.delivery_id, "unheard of"]) == 1
    assert box.count("dropped") == 1


def test_a_row_that_is_gone_is_settled_by_nobody(box: Box) -> None:
    box.lease(1, DeliveryResult("unheard of", "delivered", 1.0))
    assert box.view.counts == {}


def test_latency_is_from_the_change_to_its_acceptance(box: Box) -> None:
    one = delivery(created=10.0)
    box.put(one)
    box.lease(11)
    box.lease(12, delivered(one, 11.75))
    assert box.view.latency["chat"].sum == pytest.approx(1.75)
    assert box.view.latency["chat"].count == 1


def test_ids_are_found_by_their_beginning(box: Box) -> None:
    one = delivery(delivery_id="abc1")
    box.put(one, delivery(delivery_id="abd2"), delivery(delivery_id="a%"))
    assert ids(box.outbox.find("abc")) == ["abc1"]
    assert len(box.outbox.find("a")) == 3
    assert box.outbox.find("%") == []


def test_there_is_no_outbox_without_an_agent(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has `notbefore run` been started here"):
        Outbox(tmp_path / "none.db")


def test_the_reader_follows_a_file_that_is_set_aside_and_says_when_there_is_none(box: Box, tmp_path: Path) -> None:
    box.put(delivery())
    assert box.view.rows == {("chat", "pending"): 1}
    assert box.reader.readable
    for path in tmp_path.glob(FILE_NAME + "*"):
        path.rename(path.with_name("aside-" + path.name))
    assert box.view.rows == {("chat", "pending"): 1}  # nothing to read: what was known
    assert not box.reader.readable
    Store(tmp_path).close()
    assert box.view.rows == {}
    assert box.reader.readable


class Opened(list[sqlite3.Connection]):
    """The connections that readers have opened."""

    def connect(self, *values: Any) -> sqlite3.Connection:
        self.append(connect(*values))
        return self[-1]

    @property
    def still_open(self) -> list[str]:
        """Their files, of those that are open."""
        found: list[str] = []
        for one in self:
            with suppress(sqlite3.ProgrammingError):
                found.append(one.execute("PRAGMA database_list").fetchone()[2])
        return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    made = Opened()
    monkeypatch.setattr(outbox_reader, "connect", made.connect)
    return made


def test_an_outbox_that_has_not_changed_is_not_read_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    read: list[float] = []

    def noted(db: sqlite3.Connection, at: float) -> outbox_reader.OutboxRead:
        read.append(at)
        return read_outbox(db, at)

    monkeypatch.setattr(outbox_reader, "read_outbox", noted)
    monkeypatch.setattr("notbefore.store.outbox_reader.time.time", lambda: now)
    for _ in range(3):
        assert box.view.rows == {}
    now = 1001.0
    assert box.view.rows == {}
    assert read == [1000.0]
    box.put(delivery())
    assert box.view.rows == {("chat", "pending"): 1}
    now = 1000.5  # the clock was set back: by now something else may be due
    assert (box.next_due, read) == (0.0, [1000.0, 1001.0, 1000.5])


def test_the_reader_follows_the_outbox_into_the_spare_file_and_back_and_keeps_neither_open(
    tmp_path: Path, opened: Opened
) -> None:
    main, spare = Box(tmp_path), tmp_path / "spare"
    spare.mkdir()
    with closing(main), closing(OutboxReader(main.path, DiskThread(), spare / FILE_NAME)) as reader:
        assert reader.view == OutboxView()  # nothing was read yet
        main.put(delivery())
        assert (reader.refresh(), reader.view.rows) == (0.0, {("chat", "pending"): 1})
        with closing(Box(spare)) as other:
            other.put(delivery(), delivery(due=7.0))
            reader.refresh()
            assert reader.view.rows == {("chat", "pending"): 2}
        assert opened.still_open == [str(main.path), str(other.path)]
        reader.close()
        assert opened.still_open == []
        reader.refresh()
        assert reader.view.rows == {("chat", "pending"): 2}
        for path in list(spare.iterdir()):
            path.unlink()
        reader.refresh()
        assert reader.view.rows == {("chat", "pending"): 1}
        assert opened.still_open == [str(main.path)]


def test_what_cannot_be_read_stays_as_it_was_and_is_not_kept_open(
    box: Box, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.put(delivery())
    assert box.view.rows == {("chat", "pending"): 1}

    def damaged(_: sqlite3.Connection, __: float) -> outbox_reader.OutboxRead:
        raise sqlite3.DatabaseError

    with monkeypatch.context() as patched:
        patched.setattr(outbox_reader, "read_outbox", damaged)
        box.put(delivery())
        assert box.view.rows == {("chat", "pending"): 1}
        assert opened.still_open == []
    assert box.view.rows == {("chat", "pending"): 2}


def test_a_file_that_was_replaced_is_let_go_of(box: Box, opened: Opened, tmp_path: Path) -> None:
    assert box.view.rows == {}
    box.path.rename(tmp_path / "aside")
    Store(tmp_path).close()
    assert box.view.rows == {}
    assert len(opened) == 2
    assert len(opened.still_open) == 1


def test_what_is_withdrawn_expires_even_where_nobody_knows_what_time_it_is(box: Box) -> None:
    box.put(delivery(), delivery("other"))
    box.ended("e")
    box.expire(0.0)
    assert (box.count("expired"), [one.event_key for one in box.outbox.rows()]) == (1, ["other"])


def test_what_can_be_read_of_a_damaged_file_is_copied(box: Box, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with closing(Box(tmp_path / "old")) as old:
        old.put(delivery("a"), delivery("b"), delivery("c"))
        (first, _, third) = old.lease(1)
        old.lease(2, delivered(first, thread="1234.5"), DeliveryResult(third.delivery_id, "dead", 2))
        expected, counts = old.outbox.rows(), old.view.counts
    with closing(sqlite3.connect(old.path)) as damaged, transaction(box.outbox._db) as db:
        assert copy_readable(damaged, db) == 2
    assert box.outbox.rows() == expected
    assert box.view.counts == counts
    assert box.view.latency["chat"].count == 1
    box.put(delivery("a", kind="started"))
    box.outbox.release_leases(3)
    assert [one.thread for one in box.lease(3) if one.event_key == "a"] == ["1234.5"]


def test_what_became_of_each_delivery_is_counted(box: Box) -> None:
    box.put(delivery("a"), delivery("b"), delivery("c"), delivery("d", sink="hub"))
    a, b, c, d = box.lease(1)
    box.lease(
        2,
        delivered(a, fallback=True),
        DeliveryResult(b.delivery_id, "retry", 2, due=50),
        DeliveryResult(c.delivery_id, "dead", 2),
        DeliveryResult(d.delivery_id, "dead", 2),
    )
    assert box.view.counts == {
        ("chat", "accepted"): 3, ("chat", "fallback"): 1, ("chat", "delivered"): 1, ("chat", "failed"): 1,
        ("chat", "dead"): 1, ("hub", "accepted"): 1, ("hub", "dead"): 1,
    }  # fmt: skip
    assert box.view.rows == {("chat", "pending"): 1, ("chat", "dead"): 1, ("hub", "dead"): 1}


def test_a_dead_letter_is_kept_for_a_month_and_a_heartbeat_no_longer_than_before(box: Box) -> None:
    box.put(delivery("a", expires=100.0), delivery("b", kind="heartbeat", expires=100.0))
    box.lease(2, *[DeliveryResult(one.delivery_id, "dead", 2, error="404") for one in box.lease(1)])
    assert [(one.state, one.expires, one.error) for one in box.outbox.rows()] == [
        ("dead", 2 + DEAD_SECONDS, "404"),
        ("dead", 100, "404"),
    ]
    box.expire(2 + DEAD_SECONDS - 1)
    assert [one.event_key for one in box.outbox.rows()] == ["a"]
    box.expire(2 + DEAD_SECONDS)
    assert box.outbox.rows() == []


def test_a_pause_is_for_all_that_waits_for_the_sink_but_reminders_and_dead_letters(box: Box) -> None:
    dead, asks, waits, later, reminder, other = (
        delivery("a"), delivery("b"), delivery("c"), delivery("d", due=500.0),
        delivery("e", kind="reminder", due=10.0), delivery("f", sink="hub"),
    )  # fmt: skip
    box.put(dead, asks, waits, later, reminder, other)
    box.lease(1, chat=2)
    box.lease(
        2, DeliveryResult(dead.delivery_id, "dead", 2), DeliveryResult(asks.delivery_id, "retry", 2, due=90, pause=True)
    )
    assert [(one.event_key, one.due) for one in box.outbox.rows()] == [
        ("a", 0), ("b", 90), ("c", 90), ("d", 500), ("e", 10), ("f", 0),
    ]  # fmt: skip


def test_a_failed_attempt_is_made_again_at_its_time_and_says_why(box: Box) -> None:
    box.put(delivery())
    (one,) = box.lease(1)
    assert box.lease(2, DeliveryResult(one.delivery_id, "retry", 2, due=90, error="503")) == []
    assert [(row.due, row.error, row.attempts, row.state) for row in box.outbox.rows()] == [(90, "503", 1, "pending")]
    (again,) = box.lease(90)
    assert again.attempts == 1


def test_a_clock_that_was_set_back_makes_no_negative_latency(box: Box) -> None:
    box.put(delivery(created=100.0, due=100.0))
    (one,) = box.lease(100)
    box.lease(101, delivered(one, 40.0))
    assert box.view.latency["chat"].sum == 0
    assert box.view.latency["chat"].counts[0] == 1


def test_each_latency_has_its_bucket(box: Box) -> None:
    for seconds in (0.09, 0.11, 30_000.0):
        box.put(delivery(created=1.0, due=1.0))
        (one,) = box.lease(1)
        box.lease(2, delivered(one, 1.0 + seconds))
    counts = box.view.latency["chat"].counts
    assert {index: count for index, count in enumerate(counts) if count} == {0: 1, 1: 1, len(counts) - 1: 1}


def test_the_most_severe_goes_first_then_the_earliest_not_before_then_the_oldest(box: Box) -> None:
    keys = {"a": ("info", 5.0), "b": ("critical", 70.0), "c": ("critical", 20.0), "d": ("critical", 20.0)}
    box.put(*[delivery(key, severity=severity, not_before=time) for key, (severity, time) in keys.items()])
    assert [one.event_key for one in box.lease(1, chat=3)] == ["c", "d", "b"]


def test_no_more_is_leased_than_there_is_room_for(box: Box) -> None:
    box.put(*[delivery(key) for key in "abcd"])
    assert len(box.lease(1, chat=3)) == 3
    assert len(box.lease(1, chat=3)) == 1


def test_a_batch_of_one_event_is_bounded(box: Box) -> None:
    box.put(*[delivery() for _ in range(BATCH_ROWS + 5)])
    taken = box.outbox.exchange(CourierTurn([], {"chat": 1000}, 1, {"chat"}))
    assert len(taken) == BATCH_ROWS + 1


def test_a_batch_ends_once_there_is_no_more_room_and_before_what_is_on_its_way(box: Box) -> None:
    box.put(delivery("a"), delivery("a"), delivery("b", due=4.0))
    (first,) = box.lease(1, chat=1)
    box.lease(2, DeliveryResult(first.delivery_id, "retry", 2, due=3), chat=0)
    taken = box.outbox.exchange(CourierTurn([], {"chat": 2}, 4, {"chat"}))
    assert [one.event_key for one in taken] == ["a", "a"]
    assert box.outbox.exchange(CourierTurn([], {"chat": 0, "hub": 3}, 4, {"chat"})) == []


def test_nothing_overtakes_what_is_on_its_way(box: Box) -> None:
    first, second, third = delivery(), delivery(), delivery(due=5.0)
    box.put(first, second, third)
    assert len(box.outbox.exchange(CourierTurn([], {"chat": 9}, 1, {"chat"}))) == 2
    failed = DeliveryResult(first.delivery_id, "retry", 2, due=6)
    assert ids(box.outbox.exchange(CourierTurn([failed], {"chat": 9}, 10, {"chat"}))) == [first.delivery_id]


def test_what_a_dead_courier_left_is_due_at_once_and_nothing_else_is(box: Box) -> None:
    box.put(delivery("a"), delivery("b", due=900.0))
    box.lease(1)
    box.outbox.release_leases(1)
    assert [one.due for one in box.outbox.rows()] == [0, 900]


def test_dead_letters_are_no_work(box: Box) -> None:
    box.put(delivery(), delivery(sink="hub"))
    box.lease(2, *[DeliveryResult(one.delivery_id, "dead", 2) for one in box.lease(1, chat=1)], chat=0)
    assert box.outbox.sinks_with_work() == {"hub"}
    box.lease(4, *[DeliveryResult(one.delivery_id, "dead", 4) for one in box.lease(3, hub=1)], chat=0)
    assert (box.outbox.sinks_with_work(), box.outbox.next_due()) == (set(), None)


def test_the_rows_of_one_sink_or_one_state_are_listed_up_to_a_limit(box: Box) -> None:
    box.put(delivery("a"), delivery("b", sink="hub"), delivery("c"))
    box.lease(2, *[DeliveryResult(one.delivery_id, "dead", 2) for one in box.lease(1, chat=1)])

    def keys(**chosen: Any) -> list[str]:
        return [one.event_key for one in box.outbox.rows(**chosen)]

    assert (keys(), keys(sink="hub"), keys(state="dead"), keys(limit=2)) == (["a", "b", "c"], ["b"], ["a"], ["a", "b"])
    assert keys(state="dead", sink="hub") == []


def test_what_is_sent_again_by_hand_has_a_day_at_least_where_its_sink_is_not_known(box: Box) -> None:
    box.put(delivery("a", expires=50.0), delivery("b", expires=1e9), delivery("c", kind="heartbeat", expires=50.0))
    box.lease(2, *[DeliveryResult(one.delivery_id, "retry", 2, due=40) for one in box.lease(1)])
    assert box.outbox.retry([one.delivery_id for one in box.outbox.rows()], 10, None) == 3
    assert [(one.expires, one.due, one.attempts) for one in box.outbox.rows()] == [
        (10 + 86_400, 10, 0), (1e9, 10, 0), (50, 10, 0),
    ]  # fmt: skip
    assert box.outbox.retry(["unheard of"], 10, None) == 0


def test_an_approval_replaces_neither_a_reminder_nor_anything_of_another_sink_or_event(box: Box) -> None:
    box.put(
        delivery(kind="reminder", due=100.0),
        delivery(kind="reminder", due=100.0, sink="hub"),
        delivery("f", kind="reminder", due=100.0),
        delivery(kind="approved"),
    )
    assert {one.expires for one in box.outbox.rows()} == {1e9}
    box.put(delivery(kind="updated"))
    assert [one.expires for one in box.outbox.rows()] == [outbox_intake.WITHDRAWN, 1e9, 1e9, 1e9, 1e9]


def test_a_start_withdraws_reminders_alone_and_an_event_that_is_anothers_is_not_repeated(box: Box) -> None:
    said = delivery("e")
    box.put(said, delivery("f"))
    box.lease(2, *[delivered(one, 2, repeat=30.0) for one in box.lease(1)])
    box.put(delivery("e", kind="reminder", sink="hub", due=100.0))
    box.started("e")
    assert {one.kind: one.expires for one in box.outbox.rows() if one.event_key == "e"}[
        "reminder"
    ] == outbox_intake.WITHDRAWN
    assert box.view.rows == {("chat", "repeating"): 2, ("hub", "pending"): 1}
    with transaction(box.outbox._db) as db:
        outbox_intake.no_longer_affected(db, "e")
    assert [(one.event_key, one.state) for one in box.outbox.rows()] == [("f", "repeating"), ("e", "pending")]


def test_what_is_on_its_way_neither_expires_nor_is_pushed_out(box: Box) -> None:
    box.put(delivery("a", expires=10.0), delivery("b"), delivery("c"))
    box.lease(1, chat=2)
    box.expire(10, max_rows=1)
    assert [one.event_key for one in box.outbox.rows()] == ["a", "b"]
    assert (box.count("expired"), box.count("overflowed")) == (0, 1)
    box.outbox.release_leases(10)
    box.expire(9, max_rows=2)
    assert box.count("expired") == 0
    box.expire(10, max_rows=2)
    assert [one.event_key for one in box.outbox.rows()] == ["b"]


def test_an_outbox_that_is_just_full_pushes_out_nothing(box: Box) -> None:
    box.put(delivery("a"), delivery("b"))
    box.expire(1, max_rows=2)
    assert len(box.outbox.rows()) == 2
    assert box.count("overflowed") == 0


def test_a_repetition_is_due_after_its_interval_and_for_a_year_at_most(box: Box) -> None:
    box.put(delivery())
    (one,) = box.lease(1)
    box.lease(2, DeliveryResult(one.delivery_id, "retry", 2, due=3, error="503"))
    (one,) = box.lease(3)
    box.lease(4, delivered(one, 4, repeat=30.0))
    (row,) = box.outbox.rows()
    assert (row.due, row.expires, row.attempts, row.error) == (34, 4 + REPEAT_SECONDS, 0, "")
    box.expire(4 + REPEAT_SECONDS)
    assert box.outbox.rows() == []
    assert box.count("expired") == 0


def test_a_repetition_that_is_dropped_by_hand_is_counted_nowhere(box: Box) -> None:
    box.put(delivery())
    box.lease(2, *[delivered(one, 2, repeat=30.0) for one in box.lease(1)])
    assert box.outbox.drop([one.delivery_id for one in box.outbox.rows()]) == 1
    assert box.count("dropped") == 0


def test_a_reminder_of_an_event_that_is_anothers_is_withdrawn_and_a_second_one_replaces_none(box: Box) -> None:
    box.put(delivery(kind="reminder", due=100.0), delivery(kind="reminder", due=200.0), delivery("f", kind="reminder"))
    assert {one.expires for one in box.outbox.rows()} == {1e9}
    assert box.outbox.listed_events() == {"e", "f"}
    with transaction(box.outbox._db) as db:
        outbox_intake.no_longer_affected(db, "e")
    assert [one.expires for one in box.outbox.rows()] == [outbox_intake.WITHDRAWN] * 2 + [1e9]


class Sums(RuleBasedStateMachine):
    """Whatever happens to deliveries, each is in the outbox or counted as what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.box = Box(Path(self.directory.name))
        self.now = 0.0
        self.leased: list[Delivery] = []
        self.order: dict[tuple[str, str], list[str]] = {}

    def teardown(self) -> None:
        self.box.close()
        self.directory.cleanup()

    @rule(
        key=st.sampled_from("ab"),
        sink=st.sampled_from(["chat", "hub"]),
        kind=st.sampled_from(["announced", "started", "finished", "reminder"]),
        severity=st.sampled_from(["critical", "info"]),
        wait=st.sampled_from([0, 0, 5, 50]),
    )
    def put(self, key: str, sink: str, kind: str, severity: str, wait: float) -> None:
        one = delivery(
            key, sink, kind=kind, severity=severity, created=self.now, due=self.now + wait, expires=self.now + 100,
            expires_with_event=kind in ("announced", "reminder"),
        )  # fmt: skip
        if kind == "finished":
            self.box.ended(key)
        self.box.put(one)
        if kind != "reminder":
            self.order.setdefault((sink, key), []).append(one.delivery_id)

    @rule(
        results=st.lists(st.sampled_from(["delivered", "retry", "dead"]), max_size=4),
        repeat=st.sampled_from([None, 10.0]),
        room=st.integers(0, 3),
    )
    def work(self, results: list[Any], repeat: float | None, room: int) -> None:
        settled = [
            DeliveryResult(one.delivery_id, result, self.now, due=self.now + 7, repeat=repeat)
            for one, result in zip(self.leased, results, strict=False)
        ]
        self.leased = self.leased[len(settled) :]
        taken = self.box.outbox.exchange(CourierTurn(settled, {"chat": room, "hub": room}, self.now))
        waiting = set(ids(self.box.outbox.rows("pending")))
        for one in taken:
            earlier = self.order.get((one.sink, one.event_key), [])
            if one.delivery_id in earlier:
                before = earlier[: earlier.index(one.delivery_id)]
                assert one.state == "repeating" or not waiting & set(before)
        self.leased += [one for one in taken if one.delivery_id not in ids(self.leased)]

    @rule(seconds=st.sampled_from([1.0, 8.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def another_courier(self) -> None:
        self.box.outbox.release_leases(self.now)
        self.leased = []

    @rule(rows=st.integers(1, 5))
    def overflow(self, rows: int) -> None:
        self.box.expire(self.now, rows)

    @rule(nth=st.integers(0, 3), again=st.booleans())
    def by_hand(self, nth: int, *, again: bool) -> None:
        for row in self.box.outbox.rows()[nth : nth + 1]:
            if again:
                self.box.outbox.retry([row.delivery_id], self.now, 100)
            else:
                self.box.outbox.drop([row.delivery_id])

    @invariant()
    def the_sum_is_right(self) -> None:
        view = self.box.view
        for sink in ("chat", "hub"):
            counts = {name: count for (of, name), count in view.counts.items() if of == sink}
            left = sum(counts.get(name, 0) for name in ("delivered", "expired", "withdrawn", "overflowed", "dropped"))
            rows = view.rows.get((sink, "pending"), 0) + view.rows.get((sink, "dead"), 0)
            assert counts.get("accepted", 0) == left + rows


TestSums = Sums.TestCase
TestSums.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_delivery_comes_out_as_it_went_in(box: Box) -> None:
    one = delivery(record=b'{"x":"\\u2028"}', severity="critical", not_before=7.0)
    box.put(one)
    (leased,) = box.lease(1)
    assert msgspec.structs.replace(leased, attempts=0) == one


# ---- other VMs, other sinks


WAITING: dict[str, Any] = {"ahead": ("leader",), "due": 20.0}


@pytest.mark.parametrize("kind", ["updated", "started", "finished"])
def test_what_waits_for_another_vm_gives_way_to_a_newer_change_of_its_event(box: Box, kind: str) -> None:
    box.put(delivery(**WAITING), delivery("other", **WAITING))
    newer = delivery(kind=kind, **WAITING)
    box.put(newer)
    assert [one.event_key for one in box.lease(20)] == ["other", "e"]
    assert [one.delivery_id for one in box.outbox.rows() if one.event_key == "e"] == [newer.delivery_id]
    assert box.count("withdrawn") == 1


@pytest.mark.parametrize("step", ["started", "ended"])
def test_it_is_withdrawn_when_the_event_starts_or_ends(box: Box, step: str) -> None:
    box.put(delivery(kind="started", expires_with_event=False, **WAITING))
    getattr(box, step)("e")
    assert box.lease(20) == []
    assert box.outbox.rows() == []


def test_it_stays_once_it_was_tried(box: Box) -> None:
    one = delivery(kind="started", **WAITING)
    box.put(one)
    box.lease(20)
    box.lease(21, DeliveryResult(one.delivery_id, "retry", 21, due=30.0))
    box.started("e")
    assert ids(box.lease(30)) == [one.delivery_id]


def test_what_another_vm_sends_is_counted_as_yielded(box: Box) -> None:
    one = delivery(**WAITING)
    box.put(one)
    box.lease(20)
    box.lease(21, DeliveryResult(one.delivery_id, "yielded", 21))
    assert (box.outbox.rows(), box.count("accepted"), box.count("yielded")) == ([], 1, 1)


RECORD = message().line


def critical(**fields: Any) -> Delivery:
    return delivery(severity="critical", record=RECORD, fallback=("mail", "hub"), fallback_at=60.0, **fields)


def test_what_is_not_accepted_in_time_goes_to_the_fallback_as_well(box: Box) -> None:
    one = critical()
    box.put(one)
    assert ids(box.lease(1, chat=9, mail=9, hub=9)) == [one.delivery_id]
    box.lease(2, DeliveryResult(one.delivery_id, "retry", 2, due=100.0, error="503"))
    assert box.lease(59, chat=9, mail=9, hub=9) == []
    assert box.next_due == 60.0
    mail, hub = box.lease(60, chat=9, mail=9, hub=9)
    assert (mail.sink, hub.sink) == ("mail", "hub")
    assert mail.note == "chat has not accepted it within 60 s: 503"
    assert mail.delivery_id != hub.delivery_id
    assert (mail.due, mail.expires, mail.fallback, mail.expires_with_event) == (60.0, 60.0 + 86_400.0, (), True)
    # each copy is sent once: after its receiver has accepted it, it does not come back
    assert ids(box.lease(100, delivered(mail), delivered(hub), chat=9, mail=9, hub=9)) == [one.delivery_id]
    assert box.lease(1000, delivered(one), chat=9, mail=9, hub=9) == []


def test_what_is_dead_goes_to_the_fallback_at_once(box: Box) -> None:
    one = critical()
    box.put(one)
    box.lease(1, chat=9)
    found = box.lease(2, DeliveryResult(one.delivery_id, "dead", 2, error="401"), mail=9, hub=9)
    assert [(copy.sink, copy.note) for copy in found] == [
        ("mail", "chat refused it: 401"),
        ("hub", "chat refused it: 401"),
    ]


def test_what_was_accepted_has_no_fallback_and_what_two_sinks_refuse_is_one_message(box: Box) -> None:
    box.put(critical())
    (one,) = box.lease(1, chat=9)
    box.lease(2, delivered(one))
    assert box.lease(100, mail=9, hub=9) == []
    box.put(critical(), critical(sink="pager"))
    assert len(box.lease(100, mail=9, hub=9)) == 2


def test_the_end_of_an_event_follows_to_those_of_its_fallback_that_got_its_beginning(box: Box) -> None:
    box.put(critical())
    mail, hub = box.lease(60, mail=9, hub=9)
    box.lease(61, delivered(mail, thread="1234.5"))  # the hub has not answered yet
    box.put(delivery(sink="pager", expires=1e9))
    with transaction(box.outbox._db) as db:
        db.execute("UPDATE outbox SET expires = 0 WHERE sink = 'pager'")  # withdrawn: it gets no beginning
    record = msgspec.structs.replace(Record.read(RECORD), change_id="the end").line()
    end = critical(kind="finished", created=200.0, due=220.0, ahead=("leader",), others=("mail",))
    end = msgspec.structs.replace(end, record=record, fallback=("mail", "hub", "pager", "other"))
    for _ in range(2):  # a second time it is there already
        with transaction(box.outbox._db) as db:
            outbox_fallback.follow(db, [end])
    followed = [one for one in box.outbox.rows() if one.kind == "finished"]
    assert [one.sink for one in followed] == ["mail", "hub"]
    for one in followed:
        assert one.note == "an earlier message of this event came here instead of chat"
        assert (one.ahead, one.fallback, one.fallback_at, one.others, one.due) == ((), (), None, (), 200.0)
        assert one.delivery_id not in ids([end, mail, hub])
        assert (one.event_key, one.severity, one.record) == (end.event_key, "critical", record)


def test_a_sink_that_refuses_is_reported_through_another_one_once_an_hour(box: Box) -> None:
    def refused(now: float) -> list[Delivery]:
        one = delivery(f"e-{now}", record=RECORD, others=("mail", "hub"))
        box.put(one)
        box.lease(now, chat=9)
        return box.lease(now, DeliveryResult(one.delivery_id, "dead", now, error="403: invalid_token"), mail=9)

    (report,) = refused(10)
    box.lease(10, delivered(report))
    assert (report.sink, report.kind) == ("mail", "sink_failed")
    assert report.note == "sink chat refused a message: 403: invalid_token"
    assert refused(20) == refused(3_600) == []
    assert len(refused(3_611)) == 1


def test_a_report_does_not_go_to_a_sink_that_refuses_as_well(box: Box) -> None:
    for number, sink in enumerate(("mail", "chat")):
        one = delivery(sink, sink, record=RECORD, others=("mail", "chat", "hub"))
        box.put(one)
        box.lease(number, **{sink: 9})
        box.lease(number, DeliveryResult(one.delivery_id, "dead", 10, error="401"))
    reports = [one for one in box.outbox.rows() if one.kind == "sink_failed"]
    assert [one.sink for one in reports] == ["chat", "hub"]


# ---- where acceptances are written elsewhere before more is sent (`notbefore fleet`)


def exchange(box: Box, now: float, *results: DeliveryResult) -> list[str]:
    return ids(box.outbox.exchange(CourierTurn(results, {"chat": 1, "hub": 1}, now, confirm=True)))


def test_a_sink_is_given_nothing_until_its_last_acceptance_is_confirmed_or_five_seconds_have_passed(box: Box) -> None:
    first, second, third = (delivery(name) for name in "efg")
    other = delivery("e", sink="hub")
    box.put(first, second, third, other)
    assert exchange(box, 1) == [first.delivery_id, other.delivery_id]
    assert exchange(box, 2, delivered(first, 2)) == []
    assert exchange(box, 3, DeliveryResult(other.delivery_id, "dead", 3)) == []
    with transaction(box.outbox._db) as db:
        outbox_intake.confirm(db, [first.delivery_id])
    assert exchange(box, 4) == [second.delivery_id]
    assert exchange(box, 5, delivered(second, 5)) == []
    assert exchange(box, 11) == [third.delivery_id]


def test_what_was_accepted_and_is_not_confirmed_is_not_put_in_again(box: Box) -> None:
    one = delivery()
    box.put(one)
    exchange(box, 1)
    exchange(box, 2, delivered(one, 2))
    box.put(one)
    assert box.outbox.rows() == []


def test_what_another_instance_has_is_left_to_it(box: Box) -> None:
    leased, due, dead = (delivery(name) for name in "efg")
    box.put(leased, dead)
    assert len(box.lease(1)) == 2
    box.lease(1, DeliveryResult(dead.delivery_id, "dead", 1), chat=0)
    box.put(due, delivery("i", kind="sink_failed"))
    with transaction(box.outbox._db) as db:
        outbox_intake.leave(db, [due.delivery_id])
        outbox_intake.leave(db, None)
    assert [(one.kind, one.state) for one in box.outbox.rows()] == [
        (leased.kind, "pending"),
        (dead.kind, "dead"),
        ("sink_failed", "pending"),
    ]
    assert box.count("yielded") == 1
    box.lease(2, DeliveryResult(leased.delivery_id, "retry", 2, due=3.0), chat=0)
    assert leased.delivery_id not in ids(box.lease(4))  # it failed: the other one tries it again
