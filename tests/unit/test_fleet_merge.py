"""Many VMs' reports of one event become one story: the same in any order, and each step is notified once."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.change import LifecycleKind
from notbefore.core.document import Event
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.core.routing import Match, Route
from notbefore.fleet import waves
from notbefore.fleet.hub_records import Report, read
from notbefore.fleet.shown_waves import coming
from notbefore.fleet.snapshot import FORM, compressed, read_snapshot
from notbefore.fleet.story import Standing, Story
from notbefore.fleet.waves import Grouping
from support.azure import T0, at
from support.fleet_log import EACH, LIMIT, VMS, WAVES, A, B, C, D, Log, grouped, written
from support.fleet_records import body, report, vm


def reported(*words: Any, **fields: Any) -> Report:
    found = read(body(report(*words, **{"at": T0, **fields})))
    assert isinstance(found, Report)
    return found


def story_of(reports: Sequence[Report]) -> Story:
    story = Story.begin(reports[0])
    for one in reports:
        story.add(one)
    return story


KINDS: list[LifecycleKind] = ["announced", "updated", "started", "canceled", "finished", "ended"]
STEP = st.tuples(st.integers(0, 3), st.sampled_from(KINDS), st.integers(0, 20), st.sampled_from([600.0, 900.0]))
AGAIN = st.builds(lambda step, back: (*step, back), STEP, st.booleans())  # whether what is announced came back


@given(st.lists(AGAIN, min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_with_any_repetitions_gives_the_same_story(
    steps: list[tuple[int, LifecycleKind, int, float, bool]], shuffled: random.Random, times: int
) -> None:
    names = [A.name, B.name]
    vms = [vm(one.name, zone=str(number % 2), team="web", number=str(number)) for number, one in enumerate(VMS)]
    marks = ({"reason": "came_back"} if back and kind == "announced" else {} for _, kind, _, _, back in steps)
    reports = [
        reported(vms[who], kind, at=at(seconds), resources=names, notice=notice, id=f"{who}-{kind}-{seconds}", **mark)
        for (who, kind, seconds, notice, _), mark in zip(steps, marks, strict=True)
    ]
    # what a VM says of a step is the same each time
    unique = list({(one.vm, one.change_id): one for one in reports}.values())
    mixed = unique * times
    shuffled.shuffle(mixed)
    one, other = story_of(mixed), story_of(unique)
    assert msgspec.structs.replace(one, sender=other.sender) == other  # the one that is heard from first


# ---- one event


def again(number: int = 1) -> dict[str, Any]:
    """What marks a report of an event that was gone and is listed again; the id is the same on each VM."""
    return {"reason": "came_back", "id": f"again-{number}"}


LOST_SIGHT = "A announced, B announced, C announced, D announced, A canceled, A again"
BACK = "A announced, B announced, A canceled, A again"


@pytest.mark.parametrize(
    ("affected", "reports", "notified"),
    [
        ("A", "B announced, A announced, C announced, C started", "announced started"),
        # what looked canceled was not
        ("A", "A announced, A canceled, B started, B finished", "announced canceled started finished"),
        # the claim that takes more to have been seen stands
        ("A B", "A finished, B ended", "finished"),
        ("A B", "A announced, A canceled, B ended", "announced canceled"),
        ("A B", "A announced, A ended, B ended", "announced ended"),
        ("A B", "B announced, A canceled, B finished", "announced finished"),
        ("A B", "A announced, B announced, A finished, B started, C finished", "announced started"),
        ("A B", "A announced, B started, C finished, A finished, B finished", "announced started finished"),
        # it comes back, under other ids; what is repeated after it is over is nothing
        ("A", "A announced, A canceled, A again, A canceled2, A again@3", "announced canceled announced canceled"),
        # what is reported late of the first event ends nothing of the second one
        ("A", f"{BACK}, B canceled, B again, A canceled@3, B canceled@3", "announced canceled announced"),
        # one VM loses sight of it for a moment: it has not said that it is over
        ("A B", f"{LOST_SIGHT}, A started, B started, C started, D started, B finished", "announced started"),
        ("A B", f"{LOST_SIGHT}, A started, B started, B finished, A finished", "announced started finished"),
        # what is repeated of an event that came back neither opens nor ends it
        ("A B", f"{BACK}, A canceled@3, B announced, A canceled2, A again@4", "announced"),
        ("A B", f"{BACK}, B announced, A canceled2, A again@4, B canceled", "announced canceled"),
    ],
)
def test_the_reports_of_several_vms_are_one_story(affected: str, reports: str, notified: str) -> None:
    """A report a second; ``@``: it is repeated, of that second."""
    log, vms = Log(), {"A": A, "B": B, "C": C, "D": D}
    resources = [vms[one].name for one in affected.split()]
    for step in reports.split(", "):
        who, _, what = step.partition(" ")
        kind, _, second = what.partition("@")
        marks: dict[str, Any] = again() if kind == "again" else {"id": f"again-{kind}"} if kind.endswith("2") else {}
        if second:
            marks["at"] = at(float(second))
        kind = "announced" if kind == "again" else kind.removesuffix("2")
        log.add(vms[who], kind, resources=resources, **marks)
    assert " ".join(log.kinds) == notified
    assert len({one.change.id for one in log.made}) == len(log.made)


def test_after_a_preempt_the_word_of_another_vm_is_enough() -> None:
    log = Log()
    log.add(A, "announced", event_type="Preempt")
    log.add(B, "announced", resources=[A.name], event_type="Preempt")
    assert log.add(B, "finished", resources=[A.name], event_type="Preempt")[-1] == "finished"


def test_what_nobody_ends_is_over_as_far_as_is_known() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started")
    assert log.wait(900 + LIMIT - 60) == ["announced", "started"]
    assert log.wait(200) == ["announced", "started", "finished"]
    assert log.last.change.reason == "as_far_as_known"
    assert log.add(B, "ended", resources=[A.name], after=20 * 86_400) == ["announced", "started", "finished"]  # was off
    assert log.fold.figures.records["late"] == 1


def test_what_is_over_as_far_as_known_and_starts_is_notified() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "updated", not_before=at(1200))
    log.wait(1200 + LIMIT + 60)
    log.add(B, "started", resources=[A.name])
    log.add(B, "updated", resources=[A.name, C.name])
    assert log.add(B, "finished") == ["announced", "updated", "ended", "started", "updated", "finished"]
    assert {one.change.reason for one in log.made[3:]} == {"status_started", "content_changed", "gone_after_start"}
    assert len({one.change.id for one in log.made}) == 6


def test_an_event_that_is_over_as_far_as_known_starts_while_its_wave_is_open() -> None:
    log = Log(WAVES)
    log.add(A, "announced")
    log.wait(20)
    log.wait(900 + LIMIT + 60)  # it is over, and its end waits for those of other VMs
    assert log.add(A, "started") == ["announced", "started"]
    log.add(A, "finished")
    log.wait(400)
    assert (log.kinds, log.last.change.reason) == (["announced", "started", "finished"], "gone_after_start")


def test_a_notification_of_a_fleet_is_no_report_of_a_vm() -> None:
    log = Log()
    log.add(A, "announced")
    log.read(body(Record.of(log.last.change, log.last.vm, fleet=log.last.facts)))
    assert log.fold.figures.records == {"news": 1, "skipped": 1}


def test_an_event_that_heartbeats_list_is_not_over() -> None:
    log = Log()
    log.add(A, "announced")
    for _ in range(4):
        log.wait(LIMIT / 2)
        log.read(body(Heartbeat.of(A, ("Event-1",), "1", at(0), 300.0)))
    assert log.kinds == ["announced"]
    assert log.wait(LIMIT + 60) == ["announced", "ended"]


def test_an_event_that_comes_back_while_its_wave_is_open_is_counted_and_its_wave_goes_on() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    log.wait(10)
    log.add(A, "canceled", "E0")
    log.add(A, "announced", "E0", after=5, **again())
    log.add(A, "canceled", "E0", at=at(12))  # repeated
    log.wait(400)
    assert log.kinds == ["announced"]
    assert log.add(A, "started", "E0", id="again-started")[-1] == "started"
    log.add(A, "finished", "E0", id="again-finished")
    assert log.wait(400) == ["announced", "started", "finished"]
    assert [one.nth for one in log.fold.state.past] == [0, 1]


def test_an_event_that_comes_back_in_another_wave_is_in_that_one_alone() -> None:
    log = Log(WAVES)
    log.add(C, "announced", "E2", event_type="Freeze")
    for number, event in enumerate(("E0", "E1")):
        log.add(VMS[number], "announced", event)
    log.wait(10)
    log.add(A, "canceled", "E0")
    log.add(A, "announced", "E0", event_type="Freeze", **again())
    assert log.wait(300) == ["announced", "announced", "updated", "updated"]
    log = log.taken_over()
    log.add(B, "canceled", "E1")
    assert (log.wait(400), log.last.change.not_before_changed) == (["canceled"], False)
    assert log.fold.events.open.keys() == {"sub/rg/e0", "sub/rg/e2"}
    log.add(A, "started", "E0", event_type="Freeze", id="again-started")
    assert (log.kinds, log.last.facts.fleet_events) == (["canceled", "started"], 2)


def test_a_moved_not_before_is_notified_once() -> None:
    log = Log()
    later = at(7200)
    log.add(A, "announced")
    for who in (A, B, C):
        log.add(who, "updated", resources=[A.name], not_before=later)
    assert log.kinds == ["announced", "updated"]
    assert log.last.change.not_before == later


# ---- where its VMs are


def story_place(log: Log) -> tuple[str, str, dict[str, str]]:
    """What the VMs of the last notification have in common."""
    return log.last.vm.scale_set, log.last.vm.zone, log.last.vm.tags


def test_what_its_vms_have_in_common_is_that_of_the_affected_ones() -> None:
    ours, other = vm("a", zone="1", Team="web", role="x"), vm("b", "WEB", zone="2", team="web", role="y")
    theirs = vm("c", zone="3", team="data")
    log = Log(grouped(routes=(Route(Match(tags={"team": ("web",)}), ("web",)), Route(Match(), ("rest",)))))
    both = [ours.name, other.name]
    log.add(theirs, "announced", resources=both)
    assert story_place(log) == ("web", "3", {"team": "data"})  # nobody else was heard from
    log.add(ours, "announced", resources=both)
    log.add(ours, "started", resources=both)
    assert story_place(log) == ("web", "1", {"team": "web", "role": "x"})
    log.add(other, "started", resources=both)
    for who in (ours, other):
        log.add(who, "finished", resources=both)
    assert log.kinds == ["announced", "started", "finished"]
    assert story_place(log) == ("WEB", "", {"team": "web"})  # one scale set, in any case
    assert [one.tags for one in log.last.routed] == [{"team": "data"}, {"team": "web", "role": "x"}]  # by other routes


def test_an_event_that_moves_to_another_vm_is_where_that_one_is() -> None:
    left, joined = vm("a", zone="1", team="web"), vm("b", zone="2", team="data")
    log = Log()
    log.add(left, "announced")
    log.add(joined, "announced", resources=[left.name])
    log.add(joined, "updated", resources=[joined.name])
    log.add(left, "updated", resources=[joined.name])
    log.add(joined, "started")
    assert log.kinds == ["announced", "updated", "started"]
    assert story_place(log) == ("web", "2", {"team": "data"})


def test_events_may_be_grouped_by_a_tag() -> None:
    log = Log(grouped(("tags.Team", "event_type"), 10.0, 300.0))
    for number, team in enumerate(("web", "data", "web")):
        log.add(vm(f"vm_{number}", team=team), "announced", f"E{number}")
    log.add(vm("vm_3"), "announced", "E3")
    log.wait(10)
    waves = [(one.vm.tags.get("team"), one.facts.fleet_events) for one in log.made]
    assert waves == [("web", 2), ("data", 1), (None, 1)]


def test_an_event_stays_in_its_wave_whatever_becomes_of_it() -> None:
    log = Log(grouped(("tags.team", "scale_set"), 10.0, 300.0))
    tagged = vm("vm_0", team="web")
    log.add(B, "announced", resources=[tagged.name])
    log.wait(10)
    log.add(tagged, "announced")
    log.add(tagged, "started")
    log.add(tagged, "finished")
    log.wait(301)
    assert log.kinds == ["announced", "started", "finished"]
    assert len({one.change.event.key for one in log.made}) == 1


# ---- waves


def test_a_wave_is_one_notification_with_digests() -> None:
    log = Log(WAVES)
    for number, who in enumerate(VMS[:3]):
        log.add(who, "announced", f"E{number}")
    assert log.kinds == []
    assert log.wait(10) == ["announced"]
    first = log.last
    assert (first.facts.fleet_events, first.facts.fleet_vms, first.vm.scale_set) == (3, 3, "web")
    log.add(vm(D.name, "WEB"), "announced", "E3")
    assert log.wait(250) == ["announced"]
    assert log.wait(60) == ["announced", "updated"]
    assert log.last.facts.fleet_events == 4
    assert log.add(A, "started", "E0")[-1] == "started"
    log.add(A, "finished", "E0")
    for number, who in enumerate(VMS[1:], start=1):
        log.add(who, "started", f"E{number}")
        log.add(who, "finished", f"E{number}", interruption=9.0 - number)
    assert log.kinds == ["announced", "updated", "started"]
    assert (log.wait(301)[-1], log.last.change.interruption) == ("finished", 8.0)
    assert (log.last.change.event.event_status, log.last.change.ahead_seconds) == ("Started", None)
    assert {one.change.event.key for one in log.made} == {log.last.change.event.key}
    assert not log.fold.events.waves.open


@pytest.mark.parametrize("pause", [0.5, 4.0])
def test_events_that_are_over_at_once_are_one_wave_that_is_notified_while_more_of_them_come(pause: float) -> None:
    log = Log(WAVES)
    for number in range(12):
        log.add(A, "announced", f"E{number}", after=pause)
        log.add(B, "announced", f"E{number}", resources=[A.name], after=8.0 - pause)  # it changes the place alone
        log.add(A, "canceled", f"E{number}", after=pause)
    assert log.kinds[:1] == ["announced"]
    assert log.wait(11)[1:] == ["canceled"]  # at once: nobody is to be reminded of them
    assert log.last.facts.fleet_events == 12


def test_what_is_over_is_not_coming_although_its_last_notification_still_waits() -> None:
    log = Log(WAVES)
    for number in (0, 1):
        log.add(A, "announced", f"E{number}", resources=(A.name,))
        log.add(A, "started", f"E{number}", resources=(A.name,))
    log.add(A, "finished", "E0", resources=(A.name,))
    (wave,) = coming(log.fold.events.waves.open.values(), at(0))
    assert (wave.status, wave.events, wave.over) == ("started", 2, 1)
    log.add(A, "finished", "E1", resources=(A.name,))
    assert log.fold.events.waves.open
    assert coming(log.fold.events.waves.open.values(), at(0)) == ()


def test_of_the_ends_in_a_wave_the_least_known_one_counts() -> None:
    for ends, kind in (("finished canceled", "finished"), ("finished ended", "ended"), ("canceled ended", "ended")):
        log = Log(WAVES)
        for number, end in enumerate(ends.split()):
            log.add(A, "announced", f"E{number}")
            log.add(A, end, f"E{number}")
        assert log.wait(400)[-1] == kind


def test_one_event_of_a_wave_may_start_after_all_when_the_wave_is_over() -> None:
    log = Log(WAVES)
    for event in ("E0", "E1"):
        log.add(A, "announced", event)
    log.wait(10)
    log.add(A, "canceled", "E0")
    log.add(A, "started", "E1")
    log.add(A, "finished", "E1")
    assert log.wait(400) == ["announced", "started", "finished"]
    log.add(B, "started", "E0", resources=[A.name])
    assert log.wait(10) == ["announced", "started", "finished", "started"]
    log.add(B, "finished", "E0", resources=[A.name])
    assert log.wait(400)[-1] == "finished"
    assert len({one.change.id for one in log.made}) == 5


OTHERS = [msgspec.structs.replace(one, resource_group="other") for one in (A, B)]  # with the same EventIds
WORD = st.tuples(
    st.sampled_from([A, B, *OTHERS]),
    st.sampled_from([*KINDS, "came back"]),
    st.integers(0, 1),  # of the event
    st.sampled_from([0.0, 1.0, 40.0, 400.0]),  # seconds after the report before
    st.sampled_from([0.0, 5.0, 1000.0]),  # seconds by which it is late
    st.booleans(),  # another instance takes over before it
)


@given(st.lists(WORD, max_size=30), st.sampled_from([EACH, WAVES]))
def test_who_goes_on_from_a_snapshot_notifies_what_the_other_would_have(
    words: list[tuple[Vm, Any, int, float, float, bool]], grouping: Grouping
) -> None:
    whole, taken = Log(grouping), Log(grouping)
    for number, (who, kind, event, after, late, takes_over) in enumerate(words):
        if takes_over:
            made, taken = taken.made, taken.taken_over()
            taken.made = made
        marks = again(number % 3) if kind == "came back" else {"id": f"{event}-{kind}-{number % 3}"}
        step = "announced" if kind == "came back" else kind
        for log in (whole, taken):
            seen = datetime.fromtimestamp(log.now + after - late, UTC)
            log.add(who, step, f"E{event}", after=after, at=seen, resources=[A.name, B.name], **marks)
    for log in (whole, taken):
        log.wait(20_000)
        log.wait(20_000)
    assert [one.change for one in taken.made] == [one.change for one in whole.made]
    assert len({one.change.id for one in whole.made}) == len(whole.made)
    assert (+whole.fold.figures.errors, whole.fold.events.open) == ({}, {})


def test_records_before_the_snapshot_say_nothing_again() -> None:
    log = Log()
    log.add(A, "announced")
    again = log.taken_over()
    again.sequence = 0
    again.add(A, "announced", after=0)
    assert again.made == []


def test_a_snapshot_that_is_cut_off_or_has_a_wrong_byte_or_another_form_is_refused() -> None:
    log = Log()
    log.add(A, "announced")
    body = compressed(log.fold.snapshot(0.0))
    other = msgspec.structs.replace(written(log.fold), form=FORM + 1)
    damaged = [b"", body[:1], body[:20], body[:-1], body[:30] + b"\xff" + body[31:], b"not a snapshot"]
    for one in (*damaged, compressed(msgspec.msgpack.encode(other))):
        with pytest.raises(ValueError, match=r"\w"):
            read_snapshot(one)


def test_records_that_were_deleted_unread_are_counted_and_a_log_that_counts_from_zero_again_is_another_one() -> None:
    log = Log()
    for event in ("E0", "E1", "E2"):
        log.add(A, "announced", event)
        log.sequence += 5
    assert log.fold.figures.missing == 10
    log.sequence = 0
    log.add(A, "started", "E0")
    assert log.add(A, "announced", "E3") == ["announced"] * 3 + ["started", "announced"]
    assert log.fold.state.position.sequence == 1


# ---- what cannot be read

READABLE = body(report(A, "announced", at=T0))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not_json"),
        (READABLE.replace(b":00.000Z", b":00.000"), "wrong_shape"),
        (READABLE.replace(b"2026-03-01T12:00:00.000Z", b"0001-01-01T00:00:00+14:00"), "wrong_shape"),
        (READABLE.replace(b'event.type":"Reboot"', b'event.type":""'), "wrong_shape"),
        (READABLE.replace(b'status":"Scheduled"', b'status":""'), "wrong_shape"),
        (b'{"x": ' + b"[" * 100_000, "not_json"),
        (b'{"type": "com.example.order", "data": {}}', "foreign"),
        (b'{"type": "notbefore.scheduled_event.started.v2", "data": {}}', "newer"),
        (b'{"type": "notbefore.scheduled_event.started.v1", "data": {}}', "wrong_shape"),
        (b'{"type": "notbefore.heartbeat.v1", "data": {"time": 3}}', "wrong_shape"),
        (b" " * (1024 * 1024 + 1), "too_large"),
    ],
)
def test_what_cannot_be_read_is_counted(data: bytes, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    log.read(data)
    log.add(A, "announced")
    assert f"partition 0, sequence number 0: a record is not used ({reason}: " in caplog.text
    assert log.fold.figures.poison == {reason: 1}
    assert log.kinds == ["announced"]


def test_a_record_that_the_fold_fails_on_is_set_aside_and_what_its_batch_made_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = Story.add

    def fails(story: Story, told: Report) -> bool:
        if told.event_id == "E1":
            raise KeyError("nobody foresaw it")
        return add(story, told)

    monkeypatch.setattr(Story, "add", fails)
    log = Log()
    for event in ("E0", "E1", "E2"):
        log.add(A, "announced", event)
    assert [one.change.event.event_id for one in log.made] == ["E0", "E2"]
    assert (log.fold.figures.poison, log.fold.figures.errors) == ({"failed": 1}, {"fold": 1})
    assert "sequence number 1: a record is not used (failed: please report it: KeyError: 'nobody for" in caplog.text


def test_a_wave_whose_notification_fails_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = waves.event_of_wave

    def fails(wave: waves.Wave, standing: Standing) -> Event:
        if "e0" in wave.stories:
            raise KeyError("nobody foresaw it")
        return whole(wave, standing)

    monkeypatch.setattr(waves, "event_of_wave", fails)
    log = Log()
    for event in ("E0", "E1"):
        log.add(A, "announced", event, after=0)
    log.wait(1)
    log.wait(1)
    assert [one.change.event.event_id for one in log.made] == ["E1"]
    assert log.fold.figures.errors == {"fold": 1}
    monkeypatch.undo()
    assert log.add(A, "started", "E0")[-1] == "started"


def test_where_a_clock_is_ahead_what_others_say_of_an_event_that_came_back_counts() -> None:
    log = Log()
    for kind in ("announced", "canceled"):
        log.add(B, kind)
    log.wait(60)
    log.add(A, "announced", resources=[B.name], reason="came_back", id="again", at=at(log.now - T0.timestamp() + 40))
    assert log.add(B, "started", id="started-again", after=10)[-1] == "started"


def test_others_have_their_turn_between_two_events_that_are_given_up() -> None:
    log = Log(WAVES)
    for number in range(20):
        log.add(A, "announced", f"E{number}")
    assert list(log.fold.advance(log.now + 900 + 2 * LIMIT)).count(None) >= 20
