"""Partitions are added to the hub: events that move to another one are notified and ended once."""

import random
from collections import Counter
from typing import Any

import pytest

from notbefore.core.lifecycle import OUTCOMES
from notbefore.fleet.waves import Grouping
from support import random_fleets
from support.fleet_log import EACH, LIMIT, WAVES, A, B, Log, snapshot_of

SCALE_SET = [A.name, B.name]


def logs(grouping: Grouping) -> tuple[Log, Log]:
    """Return the log of the first partition of a hub, which has read events, and a new one."""
    old = Log(grouping)
    old.fold.hub_has(1)
    return old, Log(grouping)


def add_partition(old: Log, new: Log) -> None:
    """Let the hub have two partitions; from now on the VMs send to the new one."""
    new.now = old.now
    old.fold.hub_has(2, [], old.now)
    new.fold.hub_has(2, [snapshot_of(old.fold)], new.now)


def follow(log: Log, *others: Log) -> set[str]:
    """Let a partition see the states of others."""
    states = [snapshot_of(other.fold) for other in others]
    return log.fold.events.follow(states, log.now)


def let_pass(seconds: float, old: Log, new: Log) -> None:
    """Let time pass in which both partitions see each other's states."""
    end = new.now + seconds
    old.now = new.now
    while new.now < end:
        new.wait(60)
        old.wait(60)
        follow(old, new)
        follow(new, old)


def keys(log: Log) -> set[str]:
    return {notification.change.event.key for notification in log.notifications}


@pytest.mark.parametrize("grouping", [EACH, WAVES], ids=["each event", "waves"])
def test_moved_event_continues_under_its_event_key_and_ends_once(grouping: Grouping) -> None:
    old, new = logs(grouping)
    old.add(A, "announced", resources=SCALE_SET)
    old.wait(30)
    add_partition(old, new)

    new.add(B, "started", resources=SCALE_SET)
    let_pass(60, old, new)
    for vm in (A, B):
        new.add(vm, "finished", resources=SCALE_SET)
    let_pass(3 * LIMIT, old, new)

    assert old.kinds == ["announced"]
    assert new.kinds == ["started", "finished"]
    assert keys(old) == keys(new)
    assert not old.fold.events.open
    assert not new.fold.events.open
    assert len(old.fold.state.past) == 0
    assert len(new.fold.state.past) == 1


def test_moved_wave_keeps_the_events_that_are_still_to_come() -> None:
    old, new = logs(WAVES)
    old.add(A, "announced", "E0")
    old.add(B, "announced", "E1")
    old.wait(30)
    add_partition(old, new)

    new.add(B, "started", "E1")
    new.add(B, "finished", "E1")
    let_pass(700, old, new)

    assert new.kinds == ["started", "updated"]
    assert new.last.facts.fleet_events == 2
    assert new.last.change.event.key == old.last.change.event.key


def logs_with_heartbeats_of_a_moved_event() -> tuple[Log, Log]:
    """Return a log with an event, and a new one whose heartbeats list it without a report."""
    old, new = logs(EACH)
    old.add(A, "announced", not_before=None, notice=3 * LIMIT)
    add_partition(old, new)
    for _ in range(100):
        new.beat_listing(A, "EVENT-1")
        let_pass(60, old, new)
    return old, new


def test_event_stays_announced_when_new_partition_has_only_heartbeats() -> None:
    old, new = logs_with_heartbeats_of_a_moved_event()

    assert old.kinds == ["announced"]
    assert new.kinds == []
    assert new.fold.state.unknown_events(new.now) == 0
    assert old.fold.events.continued == {"sub/rg/event-1"}


def test_moved_event_ends_in_a_new_partition_that_had_only_heartbeats() -> None:
    old, new = logs_with_heartbeats_of_a_moved_event()

    new.add(A, "canceled")
    let_pass(60, old, new)

    assert new.kinds == ["canceled"]
    assert not old.fold.events.open


def test_reminders_end_when_the_new_partition_has_notified() -> None:
    old, new = logs(EACH)
    old.add(A, "announced")
    add_partition(old, new)
    new.beat_listing(A, "EVENT-1")
    assert follow(old, new) == set()

    new.add(A, "canceled")

    assert follow(old, new) == {"event-1"}


def test_event_that_did_not_move_stays_with_its_partition() -> None:
    old, new = logs(EACH)
    old.add(A, "announced")
    add_partition(old, new)
    assert old.fold.events.may_have_moved

    old.add(A, "started")
    old.add(A, "finished")
    let_pass(3 * LIMIT, old, new)

    assert old.kinds == ["announced", "started", "finished"]
    assert new.kinds == []
    assert not new.fold.state.elsewhere
    assert not old.fold.events.may_have_moved


def test_late_report_changes_nothing_when_event_ended_before_its_move() -> None:
    old, new = logs(EACH)
    for kind in ("announced", "started", "finished"):
        old.add(A, kind)
    add_partition(old, new)

    new.add(B, "finished", resources=[A.name])
    let_pass(60, old, new)

    assert new.kinds == []
    assert new.fold.figures.records == {"late": 1}


def test_wave_under_another_key_ends_when_its_event_is_over_elsewhere() -> None:
    old, new = logs(WAVES)
    old.add(A, "announced", "E0")
    old.wait(30)
    add_partition(old, new)
    new.fold.state.elsewhere.clear()  # as if the store had not answered
    new.fold.events.expect_waves([])
    new.now += 20  # another first event: another key
    new.add(B, "announced", "E9", resources=[B.name])
    new.add(A, "started", "E0")
    let_pass(60, old, new)
    assert keys(old).isdisjoint(keys(new))
    assert old.kinds == ["announced"]

    for vm, event_id in ((A, "E0"), (B, "E9")):
        new.add(vm, "finished", event_id)
    let_pass(1200, old, new)

    assert old.kinds == ["announced", "finished"]
    assert not old.fold.events.open
    assert not new.fold.events.open


def test_muted_event_stays_muted_in_its_new_partition() -> None:
    old, new = logs(EACH)
    old.add(A, "announced")
    old.fold.state.muted.add("event-1")

    add_partition(old, new)

    assert new.fold.state.muted == {"event-1"}
    assert "event-1" in new.fold.event_keys()


@pytest.mark.parametrize(("step", "kinds"), [("announced", []), ("started", ["started"])])
def test_next_owner_of_a_new_partition_still_expects_moved_events(
    step: Any,
    kinds: list[str],
) -> None:
    old, new = logs(WAVES)
    old.add(A, "announced")
    old.wait(30)
    add_partition(old, new)

    successor = new.taken_over()
    successor.add(A, step)
    successor.wait(30)

    assert successor.kinds == kinds
    assert successor.fold.state.waves.keys() == old.fold.state.waves.keys()


def test_wave_of_which_one_event_moves_is_shared() -> None:
    old, new = logs(WAVES)
    old.add(A, "announced", "E0", notice=2 * LIMIT)
    old.add(B, "announced", "E1", notice=2 * LIMIT)
    old.wait(30)
    add_partition(old, new)

    new.add(B, "started", "E1")
    let_pass(60, old, new)
    old.add(A, "started", "E0")
    old.add(A, "finished", "E0")
    new.add(B, "finished", "E1")
    let_pass(4 * LIMIT, old, new)

    kinds = old.kinds + new.kinds
    assert kinds.count("announced") == 1
    assert kinds.count("started") == 1
    assert keys(old) == keys(new)
    assert not old.fold.events.open
    assert not new.fold.events.open


def test_copies_of_other_partitions_change_nothing_there() -> None:
    old, new = logs(EACH)
    old.add(A, "announced")
    state = old.fold.state
    new.now = old.now

    new.fold.hub_has(2, [state], new.now)
    new.add(A, "started")

    assert [story.standing.name for story in old.fold.events.open.values()] == ["SCHEDULED"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("group_by", random_fleets.GROUPINGS)
def test_random_fleet_is_notified_once_when_a_partition_is_added(
    group_by: tuple[str, ...],
    seed: int,
) -> None:
    plan = random_fleets.planned(random.Random(seed))  # noqa: S311 - not for cryptography
    dice = random.Random(seed)  # noqa: S311 - as above

    notifications = random_fleets.notified_by_two_partitions(plan, dice, group_by)

    # the new partition has not heard from VMs that vanished before: their events are given up
    wrong = random_fleets.wrong(plan, notifications)
    assert [text for text in wrong if not text.startswith("unsure")] == []
    ends = Counter(
        notification.change.event.key
        for notification in notifications
        if notification.change.kind in OUTCOMES and notification.change.reason != "corrected"
    )
    assert set(ends.values()) == {1}
    assert ends.keys() == {notification.change.event.key for notification in notifications}
