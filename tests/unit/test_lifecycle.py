"""``diff``: the life of an event, and that nothing is claimed which was not observed."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.clock import Instant
from notbefore.core.document import Document, parse
from notbefore.core.lifecycle import (
    MAX_DEPARTED,
    MAX_STEPS,
    OUTCOMES,
    TRANSITIONS,
    as_another_vm,
    diff,
)
from notbefore.core.tracked import WATCHED, Observation, Tracked
from support.azure import ID, ME, PEER, STARTED, Story, at, body, item, now

BLIND = {"silence": WATCHED + 1}


def rebooted(down: float, **fields: Any) -> dict[str, Any]:
    """The first answer after a boot.

    The machine had gone down ``down`` seconds after the tests' beginning.
    """
    return {
        "silence": 40.0,
        "rebooted": True,
        "gap": 40.0,
        "last": at(down - 1),
        "down": at(down),
        **fields,
    }


def booted(last: float | None) -> dict[str, Any]:
    """The first answer after the machine went down at 905.

    IMDS had answered last at this second.
    """
    return rebooted(905, last=None if last is None else at(last))


DOWN_UNKNOWN = {**rebooted(905), "down": None}
STARTS, NEVER = item(**STARTED), item(NotBefore=None)
LATER = {"NotBefore": "Sun, 01 Mar 2026 12:30:00 GMT"}


def test_an_event_is_announced_started_and_finished() -> None:
    story = Story().sees(0).sees(10, item()).sees(900, item(**STARTED)).sees(1500)
    assert story.kinds == ["announced", "started", "finished"]
    assert story.changes[0].notice_seconds == 890
    assert story.changes[1].scheduled_seconds == 890
    assert (story.last.started_seconds, story.last.outcome, story.last.reason) == (
        600,
        "finished",
        "gone_after_start",
    )
    assert story.last.not_before == at(900)  # the last one known


def test_a_hardware_failure_starts_without_notice() -> None:
    story = Story().sees(0).sees(1, item(EventType="Reboot", **STARTED)).sees(601)
    assert story.kinds == ["started", "finished"]
    assert (story.changes[0].reason, story.changes[0].notice_seconds) == ("first_seen_started", 0)
    assert story.last.started_seconds == 600


def test_a_moved_not_before_is_an_update_that_tells_the_old_one() -> None:
    story = Story().sees(0, item()).sees(1, item(NotBefore="Sun, 01 Mar 2026 12:25:00 GMT"))
    assert (story.last.kind, story.last.reason) == ("updated", "content_changed")
    assert story.last.previous is not None
    assert (story.last.previous.not_before, story.last.event.not_before) == (at(900), at(1500))
    assert [change.not_before_changed for change in story.changes] == [False, True]


def test_the_same_content_is_no_change_whatever_the_incarnation() -> None:
    story = Story().sees(0, item(Resources=[ME, PEER]))
    story.incarnation = -40
    story.sees(1, item(Resources=[PEER.upper(), ME]))
    assert story.kinds == ["announced"]
    assert story.tracked.incarnation == -39
    assert story.tracked.events[ID.casefold()].event.resources == (PEER.upper(), ME)


LISTED: dict[str, tuple[Any, ...]] = {
    "absent": (),
    "Scheduled": (item(),),
    "Started": (item(**STARTED),),
    "other": (item(EventStatus="Pondered"),),
}


@pytest.mark.parametrize(("before", "after"), TRANSITIONS)
def test_every_step_that_an_event_can_make(before: str, after: str) -> None:
    assert len(TRANSITIONS) == len(LISTED) ** 2 - 1  # all pairs, but for absent before and after
    story = Story().sees(0).sees(1, *LISTED[before])
    story.sees(2, *({**one, "Description": "changed"} for one in LISTED[after]))
    assert (story.last.kind, story.last.reason) == TRANSITIONS[before, after]
    assert story.last.outcome == OUTCOMES.get(story.last.kind)


UNREAD = item(EventStatus="")
NAMELESS = {**item(), "EventId": 5}
REBOOT, REDEPLOY = {"EventType": "Reboot"}, {"EventType": "Redeploy"}


def unread(story: Story, unreadable: Any) -> Story:
    for second in range(1, 31):
        story.sees(second, unreadable)
    return story


@pytest.mark.parametrize(
    ("ending", "play"),
    [
        # nobody watched
        ("ended unknown not_watched", lambda new: new.sees(0, item()).sees(3600, by=2, **BLIND)),
        (
            "ended unknown not_watched",
            lambda new: new.sees(0, item()).sees(3600, by=2, silence=None),
        ),
        (
            "ended unknown not_watched",
            lambda new: new.sees(0, *LISTED["other"]).sees(3600, **BLIND),
        ),
        *(
            (
                "finished finished gone_after_start_unwatched",
                lambda new, how=how: new.sees(1, STARTS).sees(3600, **how),
            )
            for how in (BLIND, {"silence": 90_000.0}, {"silence": None}, rebooted(30))
        ),
        # over some missed polls NotBefore decides; a second is not enough: both count whole ones
        (
            "canceled canceled gone_before_start",
            lambda new: new.sees(890, item()).sees(898, by=2, silence=8.0),
        ),
        (
            "ended unknown start_may_be_missed",
            lambda new: new.sees(890, item()).sees(899, by=2, silence=8.0),
        ),
        (
            "ended unknown start_may_be_missed",
            lambda new: new.sees(890, item()).sees(900, by=1, silence=8.0),
        ),
        (
            "canceled canceled gone_before_start",
            lambda new: new.sees(897, item()).sees(902, silence=5.0),
        ),
        (
            "ended unknown start_may_be_missed",
            lambda new: new.sees(897, item()).sees(902, silence=5.1),
        ),
        (
            "canceled canceled gone_before_start",
            lambda new: new.sees(0, NEVER).sees(8, silence=8.0, interval=2.0),
        ),
        (
            "canceled canceled gone_before_start",
            lambda new: new.sees(0, NEVER).sees(10, silence=10.0, interval=10.0),
        ),
        ("ended unknown start_may_be_missed", lambda new: new.sees(0, NEVER).sees(8, silence=8.0)),
        # what a boot proves: of this VM's, and due when it went down
        (
            "ended finished machine_rebooted",
            lambda new: new.sees(895, item(**REDEPLOY)).sees(930, **booted(895)),
        ),
        (
            "ended unknown machine_rebooted",
            lambda new: new.sees(894, item(**REDEPLOY)).sees(930, **booted(894)),
        ),
        (
            "ended unknown machine_rebooted",
            lambda new: new.sees(850, item(**REBOOT)).sees(930, **rebooted(899)),
        ),
        (
            "ended unknown machine_rebooted",
            lambda new: new.sees(850, item(**REBOOT)).sees(930, **booted(890)),
        ),
        (
            "ended unknown machine_rebooted",
            lambda new: new.sees(850, item(**REBOOT)).sees(930, **booted(None)),
        ),
        (
            "ended unknown machine_rebooted",
            lambda new: new.sees(850, item(**REBOOT)).sees(930, **DOWN_UNKNOWN),
        ),
        (
            "ended unknown machine_rebooted",
            lambda new: new.sees(890, item()).sees(940, **rebooted(910)),
        ),
        *(
            (
                "ended unknown machine_rebooted",
                lambda new, of=of: new.sees(890, item(**of)).sees(940, **rebooted(910)),
            )
            for of in (REBOOT | {"Resources": [PEER]}, REBOOT | LATER, REBOOT | {"NotBefore": None})
        ),
        # what could not be read
        ("ended unknown not_readable", lambda new: unread(new.sees(0, item()), UNREAD).sees(31)),
        ("ended unknown not_readable", lambda new: unread(new.sees(0, item()), NAMELESS).sees(31)),
        (
            "canceled canceled gone_before_start",
            lambda new: unread(new.sees(0, item()), UNREAD).sees(31, item()).sees(32),
        ),
        (
            "canceled canceled gone_before_start",
            lambda new: new.sees(0, item()).sees(1, UNREAD).sees(2, item()).sees(3),
        ),
        # it had begun, whatever was listed of it after that
        (
            "ended unknown status_went_back",
            lambda new: new.sees(1, STARTS).sees(5, *LISTED["other"]).sees(9),
        ),
    ],
)
def test_how_an_event_ended_is_said_as_far_as_that_is_certain(
    ending: str, play: Callable[[Story], Story]
) -> None:
    last = play(Story().sees(-1)).last
    assert f"{last.kind} {last.outcome} {last.reason}" == ending
    if last.reason not in ("gone_after_start", "gone_before_start"):
        assert last.started_seconds is None
    assert (
        last.interruption is None or last.outcome == "finished" or last.reason == "status_went_back"
    )


def test_what_was_there_at_the_first_look_gives_no_notice() -> None:
    story = Story().sees(0, item(), silence=None).sees(1, item(**STARTED)).sees(2)
    assert [change.notice_seconds for change in story.changes] == [None, None, None]
    assert [change.scheduled_seconds for change in story.changes] == [None, None, None]
    assert story.last.started_seconds == 1


def test_changed_vm_sees_listed_events_for_the_first_time() -> None:
    story = Story().sees(0).sees(1, item("mine", EventType="Reboot", **STARTED), item("theirs"))
    story.tracked = as_another_vm(story.tracked)
    story.sees(60, item("theirs", Resources=[PEER]), vm=PEER, **rebooted(30))
    assert story.kinds == ["started", "announced", "announced"]
    assert (story.last.scope, story.last.reason, story.last.notice_seconds) == (
        "self",
        "first_seen_scheduled",
        None,
    )
    assert len({change.id for change in story.changes}) == 3
    assert list(story.tracked.events) == ["theirs"]
    assert story.tracked.events["theirs"].seen.wall == at(60)


def test_ids_are_the_same_on_every_vm_that_sees_the_same_step() -> None:
    mine, theirs = Story(), Story()
    theirs.incarnation = 77
    for story, vm in ((mine, ME), (theirs, PEER)):
        story.sees(0, vm=vm).sees(1, item(), vm=vm).sees(2, item(DurationInSeconds=9), vm=vm)
        story.sees(900, item(**STARTED), vm=vm).sees(1500, vm=vm)
    assert [change.id for change in mine.changes] == [change.id for change in theirs.changes]
    assert {change.scope for change in mine.changes} == {"self"}
    assert {change.scope for change in theirs.changes} == {"peer"}


def test_an_event_that_is_never_readable_takes_nothing_from_the_others() -> None:
    broken = item("broken", EventType=None)
    story = (
        Story()
        .sees(0, broken)
        .sees(1, broken, item())
        .sees(900, broken, item(**STARTED))
        .sees(1500, broken)
    )
    assert [(change.kind, change.notice_seconds) for change in story.changes] == [
        ("announced", 899),
        ("started", 899),
        ("finished", 899),
    ]
    assert story.last.started_seconds == 600


def test_a_start_after_a_time_in_which_the_event_could_not_be_read_was_not_seen() -> None:
    story = (
        Story()
        .sees(0, item())
        .sees(1, item(EventStatus=""))
        .sees(20, item(**STARTED), silence=15.0)
        .sees(25)
    )
    assert story.kinds == ["announced", "started", "finished"]
    assert [change.scheduled_seconds for change in story.changes] == [None, None, None]
    assert story.last.started_seconds is None


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("Resources", [ME, 17], "resources"),
        ("NotBefore", "soon", "not_before"),
        ("Description", 5, "description"),
    ],
)
def test_a_field_that_cannot_be_read_keeps_its_last_value(
    field: str, value: Any, name: str
) -> None:
    story = (
        Story()
        .sees(0, item(Resources=[ME, PEER]))
        .sees(1, item(**{"Resources": [ME, PEER], field: value}))
    )
    story.sees(2, item(Resources=[ME, PEER]))
    assert story.kinds == ["announced"]
    assert getattr(story.tracked.events[ID.casefold()].event, name) == getattr(
        story.changes[0].event, name
    )


def test_resources_that_cannot_be_read_once_leave_open_nothing_that_was_known() -> None:
    story = (
        Story()
        .sees(0, item(Resources=[PEER]))
        .sees(1, item(Resources=[PEER, 17], DurationInSeconds=9))
    )
    assert (story.last.kind, story.last.scope) == ("updated", "peer")
    assert Story().sees(0, item(Resources=[PEER, 17])).last.scope == "unknown"  # it may be this VM


@pytest.mark.parametrize("unreadable", [item(EventStatus=""), {**item(), "EventId": 5}])
def test_the_beginning_of_an_event_that_could_not_be_read_before_was_not_seen(
    unreadable: dict[str, Any],
) -> None:
    story = Story().sees(0, unreadable).sees(1, item())
    assert story.tracked.events[ID.casefold()].beginning_seen is False
    assert story.last.notice_seconds is None
    assert Story().sees(0, unreadable).sees(1).sees(2, item()).last.notice_seconds is not None


def test_durations_are_left_out_where_the_clocks_do_not_agree() -> None:
    def stepped(seconds: float, by: float) -> dict[str, Any]:
        return {"at": Instant(at(seconds + by), "boot", seconds, at(seconds))}

    story = (
        Story().sees(0).sees(1, item(), **stepped(1, -86_400)).sees(900, item(**STARTED)).sees(1500)
    )
    assert story.changes[0].notice_seconds == 899  # by IMDS's clock
    # by the clock since the boot
    assert (story.changes[1].scheduled_seconds, story.last.started_seconds) == (
        899,
        600,
    )
    frozen = {"at": Instant(at(900), "boot", 900, at(1500))}
    story = Story().sees(0).sees(1, item()).sees(900, item(**STARTED), **frozen).sees(1500)
    assert story.changes[1].scheduled_seconds is None


@pytest.mark.parametrize(
    ("items", "seconds", "imminent"),
    [
        ((), 0, False),
        ((item(),), 900 - 15.5, False),  # NotBefore is at 900 s
        ((item(),), 900 - 15, True),
        ((item(),), 5_000, True),
        ((item(NotBefore=""),), 0, True),
        ((item(**STARTED),), 0, True),
        ((item(Resources=[PEER], **STARTED),), 900, False),
        ((item(Resources=[]),), 900, True),  # nobody knows whom it affects
        (
            (
                item("a", Resources=[PEER]),
                item("b", NotBefore="Sun, 01 Mar 2026 12:00:10 GMT"),
                item("c"),
            ),
            0,
            True,
        ),
    ],
)
def test_an_event_of_this_vm_is_imminent_from_shortly_before_it_may_start(
    items: tuple[dict[str, Any], ...], seconds: float, *, imminent: bool
) -> None:
    begin = Story().sees(0, *items).tracked.imminent_from
    assert (begin is not None and at(seconds) >= begin) is imminent


def test_what_is_remembered_of_the_departed_is_bounded() -> None:
    story = Story()
    for first in range(0, 3 * MAX_DEPARTED, 500):
        story.sees(first, *(item(f"id-{first + n}") for n in range(500)))
    story.sees(9999)
    assert len(story.tracked.departed) == MAX_DEPARTED
    assert f"id-{3 * MAX_DEPARTED - 1}" in story.tracked.departed


def test_of_many_steps_those_are_remembered_that_tell_the_beginnings_apart() -> None:
    story = Story()
    for _ in range(2):
        for seconds in range(2 * MAX_STEPS):
            story.sees(seconds, item(Description=f"step {seconds}"))
        story.sees(9999)
        assert len(story.tracked.departed[ID.casefold()]) <= MAX_STEPS
    announced = [change.id for change in story.changes if change.kind == "announced"]
    assert len(set(announced)) == 2


def test_what_starts_again_was_scheduled_once() -> None:
    story = (
        Story()
        .sees(0)
        .sees(1, item())
        .sees(5, item(**STARTED))
        .sees(9, item())
        .sees(12, item(**STARTED))
    )
    first, second = (change for change in story.changes if change.kind == "started")
    assert (first.scheduled_seconds, second.scheduled_seconds) == (4, None)
    assert story.tracked.events[ID.casefold()].started == at(5)


def test_that_resources_moved_says_whom_it_was_to_hit_before() -> None:
    story = Story().sees(0, item(Resources=[ME, PEER])).sees(1, item(Resources=[PEER]))
    assert (story.last.kind, story.last.scope, story.last.previous_scope) == (
        "updated",
        "peer",
        "self",
    )
    assert story.last.no_longer_affected
    story.sees(2, item(Resources=[PEER, ME]))
    assert (story.last.scope, story.last.previous_scope, story.last.no_longer_affected) == (
        "self",
        "peer",
        False,
    )
    story.sees(3, item(Resources=[ME]))
    assert (story.last.previous_scope, story.last.no_longer_affected) == (None, False)


INTERVAL = 5.0  # seconds
ids = st.sampled_from(["a", "b", "C", "c"])
listed = st.fixed_dictionaries(
    {
        "EventId": ids,
        "EventStatus": st.sampled_from(["Scheduled", "Started", "Pondered"]),
        "EventType": st.sampled_from(["Freeze", "Reboot"]),
        "Resources": st.sampled_from([[ME], [PEER], [ME, PEER], []]),
        "NotBefore": st.sampled_from(["Sun, 01 Mar 2026 12:00:30 GMT", "", None]),
    }
)
moments = st.fixed_dictionaries(
    {
        "silence": st.sampled_from([INTERVAL, INTERVAL, INTERVAL, 60.0, None]),
        "rebooted": st.booleans(),
        "down": st.sampled_from([None, at(20)]),
        "another": st.sampled_from([False, False, True]),
        "gap": st.sampled_from([None, 0.0, 3.0]),
        "vm": st.sampled_from([ME, None]),
    }
)


@given(st.lists(st.tuples(st.lists(listed, max_size=4), moments, st.booleans()), max_size=12))
def test_whatever_comes_the_changes_tell_one_story(
    steps: list[tuple[list[dict[str, Any]], dict[str, Any], bool]],
) -> None:
    tracked, seen, alive = Tracked(), set[str](), set[str]()
    for number, (items, fields, damaged) in enumerate(steps):
        another = fields.pop("another")
        moment: Observation = now(number * INTERVAL, **fields)
        content = parse(body(*items, *([{"EventId": 5}] if damaged else []), incarnation=number))
        if another:  # all that was known is forgotten
            tracked, alive = as_another_vm(tracked), set()
        step = diff(tracked, content, moment)
        assert diff(tracked, content, moment) == step  # pure
        for change in step.changes:
            key = change.event.key
            assert change.id not in seen
            seen.add(change.id)
            begins, ends = key not in alive, change.kind in OUTCOMES
            assert begins == (change.previous is None and not ends)
            assert not begins or change.kind in ("announced", "started")
            assert not ends or not damaged  # the unreadable one may be it
            for seconds in (
                change.notice_seconds,
                change.scheduled_seconds,
                change.started_seconds,
            ):
                assert seconds is None or seconds >= 0
            assert change.interruption is None or (ends and change.scope == "self")
            (alive.discard if ends else alive.add)(key)
        tracked = step.tracked
        present = {event.key for event in content.events}
        assert alive == set(tracked.events)
        assert present <= alive
        assert not tracked.departed.keys() & set(tracked.events)


@pytest.mark.parametrize(
    ("moment", "notice"),
    [
        ({"silence": WATCHED}, 885),
        ({"silence": WATCHED + 0.1}, None),
        ({"silence": None}, None),
        ({"silence": 1.0, "rebooted": True}, None),
    ],
)
def test_the_beginning_of_an_event_was_seen_if_there_was_an_answer_shortly_before(
    moment: dict[str, Any], notice: float | None
) -> None:
    assert Story().sees(0).sees(15, item(), **moment).last.notice_seconds == notice


@pytest.mark.parametrize(
    ("first", "measured"),
    [({"gap": 2.0}, 2.0), ({"gap": None}, None), ({"silence": WATCHED + 1}, None)],
)
def test_the_interruption_of_what_is_started_at_first_sight(
    first: dict[str, Any], measured: float | None
) -> None:
    assert Story().sees(0).sees(5, item(**STARTED), **first).sees(6).last.interruption == measured


def test_gaps_while_another_vms_event_runs_are_not_measured() -> None:
    story = Story().sees(0).sees(1, item(Resources=[PEER], **STARTED), gap=4.0)
    story.sees(2, item(Resources=[PEER, ME], **STARTED)).sees(3)
    # none of the time before it was ours
    assert (story.last.scope, story.last.interruption) == (
        "self",
        0.0,
    )
    story = (
        Story()
        .sees(0)
        .sees(1, item(Resources=[PEER], **STARTED))
        .sees(2, item(Resources=[PEER], **STARTED), gap=4.0)
    )
    assert story.tracked.events[ID.casefold()].interruption == 0


@pytest.mark.parametrize(("before", "after", "scope"), [(ME, None, "peer"), (None, ME, "self")])
def test_what_goes_while_the_name_is_unknown_keeps_whom_it_affects(
    before: Any, after: Any, scope: str
) -> None:
    story = (
        Story()
        .sees(0, item(Resources=[PEER if scope == "peer" else ME]), vm=before)
        .sees(1, vm=after)
    )
    assert (story.last.kind, story.last.scope) == ("canceled", scope)


def test_scheduled_event_ends_as_unknown_when_bodies_get_empty() -> None:
    tracked = diff(Tracked(), parse(body(item())), now(0)).tracked
    nothing = Document(0, (), was_empty_body=True)

    change = diff(tracked, nothing, now(1)).changes[0]

    assert (change.kind, change.reason, change.outcome) == ("ended", "empty_answer", "unknown")
