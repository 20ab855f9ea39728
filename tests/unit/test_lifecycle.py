"""``diff``: the life of an event. A change claims only what the agent observed."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.document import MAX_DESCRIPTION, Document, parse
from notbefore.core.lifecycle import (
    MAX_DEPARTED,
    MAX_STEPS,
    OUTCOMES,
    TRANSITIONS,
    as_another_vm,
    diff,
)
from notbefore.core.tracked import WATCHED, Observation, Tracked, TrackedEvent
from support.azure import ID, ME, PEER, STARTED, Story, at, body, item, observation

UNWATCHED = {"silence": WATCHED + 1}
RESTARTED = {"silence": None}

SCHEDULED_ITEM = item()
STARTED_ITEM = item(**STARTED)
OTHER_STATUS = item(EventStatus="Pondered")
WITHOUT_NOT_BEFORE = item(NotBefore=None)
WITHOUT_STATUS = item(EventStatus="")
WITHOUT_ID = {**item(), "EventId": 5}
REBOOT = item(EventType="Reboot")
REDEPLOY = item(EventType="Redeploy")


def rebooted(down: float, **fields: Any) -> dict[str, Any]:
    """Return the fields of the first answer after a reboot; the machine went down at ``down``."""
    return {
        "silence": 40.0,
        "rebooted": True,
        "gap": 40.0,
        "last": at(down - 1),
        "down": at(down),
        **fields,
    }


class Look(NamedTuple):
    """The arguments of one ``Story.sees``."""

    seconds: float
    items: tuple[Any, ...]
    fields: dict[str, Any]


def look(seconds: float, *items: Any, **fields: Any) -> Look:
    return Look(seconds, items, fields)


def end_of(*looks: Look) -> Change:
    """Return the last change that an agent reports after these looks: the end of the event."""
    story = Story().sees(-1)
    for seconds, items, fields in looks:
        story.sees(seconds, *items, **fields)
    return story.last


def assert_end(change: Change, kind: str, outcome: str, reason: str) -> None:
    """Assert how an event ended, and that it has no duration that was not observed."""
    assert change.kind == kind
    assert change.outcome == outcome
    assert change.reason == reason
    if reason not in ("gone_after_start", "gone_before_start"):
        assert change.started_seconds is None
    if outcome != "finished" and reason != "status_went_back":
        assert change.interruption is None


def tracked_event(story: Story, event_id: str = ID) -> TrackedEvent:
    return story.tracked.events[event_id.casefold()]


def notices(story: Story) -> list[float | None]:
    return [change.notice_seconds for change in story.changes]


def scheduled_durations(story: Story) -> list[float | None]:
    return [change.scheduled_seconds for change in story.changes]


def change_ids(story: Story) -> list[str]:
    return [change.id for change in story.changes]


# ---- the changes of an event


def test_event_is_announced_started_and_finished() -> None:
    story = Story()

    story.sees(0)
    story.sees(10, SCHEDULED_ITEM)
    story.sees(900, STARTED_ITEM)
    story.sees(1500)

    announced, started, finished = story.changes
    assert story.kinds == ["announced", "started", "finished"]
    assert announced.notice_seconds == 890
    assert started.scheduled_seconds == 890
    assert finished.started_seconds == 600
    assert finished.outcome == "finished"
    assert finished.reason == "gone_after_start"


def test_end_keeps_last_not_before() -> None:
    story = Story()
    story.sees(0)
    story.sees(10, SCHEDULED_ITEM)
    story.sees(900, STARTED_ITEM)  # its NotBefore is empty

    story.sees(1500)

    assert story.last.not_before == at(900)


def test_hardware_failure_starts_without_notice() -> None:
    story = Story()

    story.sees(0)
    story.sees(1, item(EventType="Reboot", **STARTED))
    story.sees(601)

    started, finished = story.changes
    assert story.kinds == ["started", "finished"]
    assert started.reason == "first_seen_started"
    assert started.notice_seconds == 0
    assert finished.started_seconds == 600


def test_update_has_the_new_description_when_it_was_cut() -> None:
    story = Story()
    story.sees(0, SCHEDULED_ITEM)

    story.sees(1, item(Description="x" * (MAX_DESCRIPTION + 1)))

    _, updated = story.changes
    assert updated.event.description == "x" * MAX_DESCRIPTION


def test_update_carries_previous_not_before_when_it_moves() -> None:
    story = Story()
    story.sees(0, SCHEDULED_ITEM)

    story.sees(1, item(NotBefore="Sun, 01 Mar 2026 12:25:00 GMT"))

    announced, updated = story.changes
    assert updated.kind == "updated"
    assert updated.reason == "content_changed"
    assert updated.previous is not None
    assert updated.previous.not_before == at(900)
    assert updated.event.not_before == at(1500)
    assert announced.not_before_changed is False
    assert updated.not_before_changed is True


def test_same_content_is_no_change_when_incarnation_falls() -> None:
    story = Story()
    story.sees(0, item(Resources=[ME, PEER]))

    story.incarnation = -40
    story.sees(1, item(Resources=[PEER.upper(), ME]))

    assert story.kinds == ["announced"]
    assert story.tracked.incarnation == -39
    assert tracked_event(story).event.resources == (PEER.upper(), ME)


ITEMS_BY_STATE: dict[str, tuple[Any, ...]] = {
    "absent": (),
    "Scheduled": (SCHEDULED_ITEM,),
    "Started": (STARTED_ITEM,),
    "other": (OTHER_STATUS,),
}


@pytest.mark.parametrize(("before", "after"), TRANSITIONS)
def test_transition_gives_its_kind_reason_and_outcome(before: str, after: str) -> None:
    story = Story()
    story.sees(0)
    story.sees(1, *ITEMS_BY_STATE[before])

    items = [{**fields, "Description": "changed"} for fields in ITEMS_BY_STATE[after]]
    story.sees(2, *items)

    kind, reason = TRANSITIONS[before, after]
    assert story.last.kind == kind
    assert story.last.reason == reason
    assert story.last.outcome == OUTCOMES.get(story.last.kind)


def test_transitions_cover_all_pairs_of_states() -> None:
    pairs = len(ITEMS_BY_STATE) ** 2

    assert len(TRANSITIONS) == pairs - 1  # from absent to absent is no transition


def test_change_ids_are_equal_on_all_vms_that_see_a_step() -> None:
    of_this_vm = Story()
    of_peer = Story()
    of_peer.incarnation = 77

    for story, vm in ((of_this_vm, ME), (of_peer, PEER)):
        story.sees(0, vm=vm)
        story.sees(1, SCHEDULED_ITEM, vm=vm)
        story.sees(2, item(DurationInSeconds=9), vm=vm)
        story.sees(900, STARTED_ITEM, vm=vm)
        story.sees(1500, vm=vm)

    assert change_ids(of_this_vm) == change_ids(of_peer)
    assert {change.scope for change in of_this_vm.changes} == {"self"}
    assert {change.scope for change in of_peer.changes} == {"peer"}


def test_restarted_event_has_no_second_scheduled_duration() -> None:
    story = Story()
    story.sees(0)
    story.sees(1, SCHEDULED_ITEM)
    story.sees(5, STARTED_ITEM)
    story.sees(9, SCHEDULED_ITEM)

    story.sees(12, STARTED_ITEM)

    first, second = (change for change in story.changes if change.kind == "started")
    assert first.scheduled_seconds == 4
    assert second.scheduled_seconds is None
    assert tracked_event(story).started == at(5)


# ---- how certain an end is


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            (look(0, SCHEDULED_ITEM), look(3600, by=2, **UNWATCHED)),
            id="scheduled",
        ),
        pytest.param(
            (look(0, SCHEDULED_ITEM), look(3600, by=2, **RESTARTED)),
            id="scheduled, agent restarted",
        ),
        pytest.param(
            (look(0, OTHER_STATUS), look(3600, **UNWATCHED)),
            id="other status",
        ),
    ],
)
def test_end_is_unknown_when_event_goes_unwatched(looks: tuple[Look, ...]) -> None:
    change = end_of(*looks)

    assert_end(change, "ended", "unknown", "not_watched")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(UNWATCHED, id="unwatched"),
        pytest.param({"silence": 90_000.0}, id="silent for a day"),
        pytest.param(RESTARTED, id="agent restarted"),
        pytest.param(rebooted(30), id="rebooted"),
    ],
)
def test_started_event_is_finished_when_it_goes_unwatched(moment: dict[str, Any]) -> None:
    change = end_of(look(1, STARTED_ITEM), look(3600, **moment))

    assert_end(change, "finished", "finished", "gone_after_start_unwatched")


# After some missed polls NotBefore decides. A second of difference is not enough:
# both clocks count whole seconds.


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            (look(890, SCHEDULED_ITEM), look(898, by=2, silence=8.0)),
            id="two seconds before NotBefore",
        ),
        pytest.param(
            (look(897, SCHEDULED_ITEM), look(902, silence=5.0)),
            id="a usual poll after NotBefore",
        ),
        pytest.param(
            (look(0, WITHOUT_NOT_BEFORE), look(8, silence=8.0, interval=2.0)),
            id="no NotBefore, interval of 2 s",
        ),
        pytest.param(
            (look(0, WITHOUT_NOT_BEFORE), look(10, silence=10.0, interval=10.0)),
            id="no NotBefore, a usual poll",
        ),
    ],
)
def test_event_is_canceled_when_it_goes_before_its_start(looks: tuple[Look, ...]) -> None:
    change = end_of(*looks)

    assert_end(change, "canceled", "canceled", "gone_before_start")


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            (look(890, SCHEDULED_ITEM), look(899, by=2, silence=8.0)),
            id="a second before NotBefore",
        ),
        pytest.param(
            (look(890, SCHEDULED_ITEM), look(900, by=1, silence=8.0)),
            id="at NotBefore",
        ),
        pytest.param(
            (look(897, SCHEDULED_ITEM), look(902, silence=5.1)),
            id="a late poll after NotBefore",
        ),
        pytest.param(
            (look(0, WITHOUT_NOT_BEFORE), look(8, silence=8.0)),
            id="no NotBefore",
        ),
    ],
)
def test_end_is_unknown_when_start_may_be_missed(looks: tuple[Look, ...]) -> None:
    change = end_of(*looks)

    assert_end(change, "ended", "unknown", "start_may_be_missed")


def test_due_event_of_this_vm_is_finished_when_machine_reboots() -> None:
    change = end_of(look(895, REDEPLOY), look(930, **rebooted(905, last=at(895))))

    assert_end(change, "ended", "finished", "machine_rebooted")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            look(894, REDEPLOY),
            look(930, **rebooted(905, last=at(894))),
            id="IMDS silent too long before",
        ),
        pytest.param(
            look(850, REBOOT),
            look(930, **rebooted(899)),
            id="down before NotBefore",
        ),
        pytest.param(
            look(850, REBOOT),
            look(930, **rebooted(905, last=at(890))),
            id="IMDS silent too long before a reboot",
        ),
        pytest.param(
            look(850, REBOOT),
            look(930, **rebooted(905, last=None)),
            id="last answer unknown",
        ),
        pytest.param(
            look(850, REBOOT),
            look(930, **{**rebooted(905), "down": None}),
            id="time of the shutdown unknown",
        ),
        pytest.param(
            look(890, SCHEDULED_ITEM),
            look(940, **rebooted(910)),
            id="a freeze causes no boot",
        ),
        pytest.param(
            look(890, item(EventType="Reboot", Resources=[PEER])),
            look(940, **rebooted(910)),
            id="event of another VM",
        ),
        pytest.param(
            look(890, item(EventType="Reboot", NotBefore="Sun, 01 Mar 2026 12:30:00 GMT")),
            look(940, **rebooted(910)),
            id="event not due",
        ),
        pytest.param(
            look(890, item(EventType="Reboot", NotBefore=None)),
            look(940, **rebooted(910)),
            id="event without NotBefore",
        ),
    ],
)
def test_end_is_unknown_when_boot_proves_nothing(before: Look, after: Look) -> None:
    change = end_of(before, after)

    assert_end(change, "ended", "unknown", "machine_rebooted")


def unreadable_for_half_a_minute(unreadable: Any) -> list[Look]:
    return [look(second, unreadable) for second in range(1, 31)]


@pytest.mark.parametrize("unreadable", [WITHOUT_STATUS, WITHOUT_ID], ids=["status", "id"])
def test_end_is_unknown_when_event_was_unreadable(unreadable: Any) -> None:
    change = end_of(
        look(0, SCHEDULED_ITEM),
        *unreadable_for_half_a_minute(unreadable),
        look(31),
    )

    assert_end(change, "ended", "unknown", "not_readable")


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [
                *unreadable_for_half_a_minute(WITHOUT_STATUS),
                look(31, SCHEDULED_ITEM),
                look(32),
            ],
            id="unreadable for half a minute",
        ),
        pytest.param(
            [look(1, WITHOUT_STATUS), look(2, SCHEDULED_ITEM), look(3)],
            id="unreadable once",
        ),
    ],
)
def test_event_is_canceled_when_it_gets_readable_before_its_end(looks: list[Look]) -> None:
    change = end_of(look(0, SCHEDULED_ITEM), *looks)

    assert_end(change, "canceled", "canceled", "gone_before_start")


def test_end_is_unknown_when_status_went_back_after_start() -> None:
    change = end_of(look(1, STARTED_ITEM), look(5, OTHER_STATUS), look(9))

    assert_end(change, "ended", "unknown", "status_went_back")


def test_scheduled_event_ends_as_unknown_when_bodies_get_empty() -> None:
    tracked = diff(Tracked(), parse(body(SCHEDULED_ITEM)), observation(0)).tracked
    nothing = Document(0, (), was_empty_body=True)

    (change,) = diff(tracked, nothing, observation(1)).changes

    assert change.kind == "ended"
    assert change.reason == "empty_answer"
    assert change.outcome == "unknown"


# ---- notice and other durations


def test_first_look_gives_no_notice() -> None:
    story = Story()

    story.sees(0, SCHEDULED_ITEM, **RESTARTED)
    story.sees(1, STARTED_ITEM)
    story.sees(2)

    assert notices(story) == [None, None, None]
    assert scheduled_durations(story) == [None, None, None]
    assert story.last.started_seconds == 1


def test_notice_is_known_when_an_answer_came_shortly_before() -> None:
    story = Story()
    story.sees(0)

    story.sees(15, SCHEDULED_ITEM, silence=WATCHED)

    assert story.last.notice_seconds == 885


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param({"silence": WATCHED + 0.1}, id="silent too long"),
        pytest.param(RESTARTED, id="agent restarted"),
        pytest.param({"silence": 1.0, "rebooted": True}, id="rebooted"),
    ],
)
def test_notice_is_unknown_when_event_may_be_older(moment: dict[str, Any]) -> None:
    story = Story()
    story.sees(0)

    story.sees(15, SCHEDULED_ITEM, **moment)

    assert story.last.notice_seconds is None


@pytest.mark.parametrize("unreadable", [WITHOUT_STATUS, WITHOUT_ID], ids=["status", "id"])
def test_notice_is_unknown_when_event_was_unreadable_before(unreadable: dict[str, Any]) -> None:
    story = Story()
    story.sees(0, unreadable)

    story.sees(1, SCHEDULED_ITEM)

    assert tracked_event(story).beginning_seen is False
    assert story.last.notice_seconds is None


@pytest.mark.parametrize("unreadable", [WITHOUT_STATUS, WITHOUT_ID], ids=["status", "id"])
def test_notice_is_known_when_unreadable_event_was_gone_before(unreadable: dict[str, Any]) -> None:
    story = Story()
    story.sees(0, unreadable)
    story.sees(1)

    story.sees(2, SCHEDULED_ITEM)

    assert story.last.notice_seconds is not None


def test_start_is_unseen_when_event_was_unreadable_before() -> None:
    story = Story()
    story.sees(0, SCHEDULED_ITEM)
    story.sees(1, WITHOUT_STATUS)

    story.sees(20, STARTED_ITEM, silence=15.0)
    story.sees(25)

    assert story.kinds == ["announced", "started", "finished"]
    assert scheduled_durations(story) == [None, None, None]
    assert story.last.started_seconds is None


def test_durations_survive_a_wall_clock_step() -> None:
    a_day_back = Instant(at(1 - 86_400), "boot", 1, at(1))
    story = Story()

    story.sees(0)
    story.sees(1, SCHEDULED_ITEM, at=a_day_back)
    story.sees(900, STARTED_ITEM)
    story.sees(1500)

    announced, started, finished = story.changes
    assert announced.notice_seconds == 899  # by the clock of IMDS
    assert started.scheduled_seconds == 899  # by the clock since the boot
    assert finished.started_seconds == 600


def test_duration_is_unknown_when_clocks_disagree() -> None:
    imds_ahead = Instant(at(900), "boot", 900, at(1500))
    story = Story()

    story.sees(0)
    story.sees(1, SCHEDULED_ITEM)
    story.sees(900, STARTED_ITEM, at=imds_ahead)
    story.sees(1500)

    assert story.changes[1].scheduled_seconds is None


# ---- interruptions


def test_interruption_is_measured_when_event_is_first_seen_started() -> None:
    story = Story()
    story.sees(0)

    story.sees(5, STARTED_ITEM, gap=2.0)
    story.sees(6)

    assert story.last.interruption == 2.0


@pytest.mark.parametrize(
    "moment",
    [pytest.param({"gap": None}, id="no gap known"), pytest.param(UNWATCHED, id="unwatched")],
)
def test_interruption_is_unknown_when_start_was_not_watched(moment: dict[str, Any]) -> None:
    story = Story()
    story.sees(0)

    story.sees(5, STARTED_ITEM, **moment)
    story.sees(6)

    assert story.last.interruption is None


def test_interruption_excludes_gaps_before_event_affects_this_vm() -> None:
    story = Story()
    story.sees(0)
    story.sees(1, item(Resources=[PEER], **STARTED), gap=4.0)

    story.sees(2, item(Resources=[PEER, ME], **STARTED))
    story.sees(3)

    assert story.last.scope == "self"
    assert story.last.interruption == 0.0


def test_gap_is_not_measured_while_event_affects_another_vm() -> None:
    story = Story()
    story.sees(0)

    story.sees(1, item(Resources=[PEER], **STARTED))
    story.sees(2, item(Resources=[PEER], **STARTED), gap=4.0)

    assert tracked_event(story).interruption == 0


# ---- unreadable events and fields


def test_unreadable_event_does_not_affect_others() -> None:
    broken = item("broken", EventType=None)
    story = Story()

    story.sees(0, broken)
    story.sees(1, broken, SCHEDULED_ITEM)
    story.sees(900, broken, STARTED_ITEM)
    story.sees(1500, broken)

    assert story.kinds == ["announced", "started", "finished"]
    assert notices(story) == [899, 899, 899]
    assert story.last.started_seconds == 600


@pytest.mark.parametrize(
    ("field", "value", "attribute"),
    [
        ("Resources", [ME, 17], "resources"),
        ("NotBefore", "soon", "not_before"),
        ("Description", 5, "description"),
    ],
)
def test_unreadable_field_keeps_its_last_value(field: str, value: Any, attribute: str) -> None:
    readable = item(Resources=[ME, PEER])
    story = Story()
    story.sees(0, readable)

    story.sees(1, {**readable, field: value})
    story.sees(2, readable)

    announced = story.changes[0].event
    assert story.kinds == ["announced"]
    assert getattr(tracked_event(story).event, attribute) == getattr(announced, attribute)


def test_scope_stays_known_when_resources_become_unreadable() -> None:
    story = Story()
    story.sees(0, item(Resources=[PEER]))

    story.sees(1, item(Resources=[PEER, 17], DurationInSeconds=9))

    assert story.last.kind == "updated"
    assert story.last.scope == "peer"


def test_scope_is_unknown_when_resources_are_unreadable_at_first() -> None:
    story = Story()

    story.sees(0, item(Resources=[PEER, 17]))

    assert story.last.scope == "unknown"  # the unreadable resource may be this VM


# ---- scope


def test_machine_that_becomes_another_vm_sees_events_as_new() -> None:
    story = Story()
    story.sees(0)
    story.sees(1, item("mine", EventType="Reboot", **STARTED), item("theirs"))

    story.tracked = as_another_vm(story.tracked)
    story.sees(60, item("theirs", Resources=[PEER]), vm=PEER, **rebooted(30))

    assert story.kinds == ["started", "announced", "announced"]
    assert story.last.scope == "self"
    assert story.last.reason == "first_seen_scheduled"
    assert story.last.notice_seconds is None
    assert len(set(change_ids(story))) == 3
    assert list(story.tracked.events) == ["theirs"]
    assert tracked_event(story, "theirs").seen.wall == at(60)


def test_update_carries_previous_scope_when_event_leaves_this_vm() -> None:
    story = Story()
    story.sees(0, item(Resources=[ME, PEER]))

    story.sees(1, item(Resources=[PEER]))

    assert story.last.kind == "updated"
    assert story.last.scope == "peer"
    assert story.last.previous_scope == "self"
    assert story.last.no_longer_affected


def test_update_carries_previous_scope_when_event_returns_to_this_vm() -> None:
    story = Story()
    story.sees(0, item(Resources=[ME, PEER]))
    story.sees(1, item(Resources=[PEER]))

    story.sees(2, item(Resources=[PEER, ME]))

    assert story.last.scope == "self"
    assert story.last.previous_scope == "peer"
    assert story.last.no_longer_affected is False


def test_update_has_no_previous_scope_when_scope_is_unchanged() -> None:
    story = Story()
    story.sees(0, item(Resources=[ME, PEER]))

    story.sees(1, item(Resources=[ME]))

    assert story.last.kind == "updated"
    assert story.last.previous_scope is None
    assert story.last.no_longer_affected is False


@pytest.mark.parametrize(
    ("name_before", "name_after", "affected", "scope"),
    [
        (ME, None, PEER, "peer"),
        (None, ME, ME, "self"),
    ],
)
def test_end_keeps_scope_when_vm_name_is_known_only_once(
    name_before: Any,
    name_after: Any,
    affected: str,
    scope: str,
) -> None:
    story = Story()
    story.sees(0, item(Resources=[affected]), vm=name_before)

    story.sees(1, vm=name_after)

    assert story.last.kind == "canceled"
    assert story.last.scope == scope


# ---- imminent events


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
        ((item(Resources=[]),), 900, True),  # it may affect this VM
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
def test_event_of_this_vm_is_imminent_shortly_before_it_may_start(
    items: tuple[dict[str, Any], ...],
    seconds: float,
    *,
    imminent: bool,
) -> None:
    story = Story()

    story.sees(0, *items)

    imminent_from = story.tracked.imminent_from
    is_imminent = imminent_from is not None and at(seconds) >= imminent_from
    assert is_imminent is imminent


# ---- bounds


def test_departed_events_are_forgotten_above_the_bound() -> None:
    story = Story()

    for first in range(0, 3 * MAX_DEPARTED, 500):
        story.sees(first, *[item(f"id-{number}") for number in range(first, first + 500)])
    story.sees(9999)

    assert len(story.tracked.departed) == MAX_DEPARTED
    assert f"id-{3 * MAX_DEPARTED - 1}" in story.tracked.departed


def test_steps_of_a_departed_event_are_bounded() -> None:
    story = Story()
    for seconds in range(2 * MAX_STEPS):
        story.sees(seconds, item(Description=f"step {seconds}"))

    story.sees(9999)

    assert len(story.tracked.departed[ID.casefold()]) <= MAX_STEPS


def test_repeated_event_is_announced_under_another_id() -> None:
    story = Story()

    for _ in range(2):
        for seconds in range(2 * MAX_STEPS):
            story.sees(seconds, item(Description=f"step {seconds}"))
        story.sees(9999)

    announced_ids = {change.id for change in story.changes if change.kind == "announced"}
    assert len(announced_ids) == 2
    assert len(story.tracked.departed[ID.casefold()]) <= MAX_STEPS


# ---- random documents

INTERVAL = 5.0  # seconds
RANDOM_ITEMS = st.fixed_dictionaries(
    {
        "EventId": st.sampled_from(["a", "b", "C", "c"]),
        "EventStatus": st.sampled_from(["Scheduled", "Started", "Pondered"]),
        "EventType": st.sampled_from(["Freeze", "Reboot"]),
        "Resources": st.sampled_from([[ME], [PEER], [ME, PEER], []]),
        "NotBefore": st.sampled_from(["Sun, 01 Mar 2026 12:00:30 GMT", "", None]),
    }
)
RANDOM_MOMENTS = st.fixed_dictionaries(
    {
        "silence": st.sampled_from([INTERVAL, INTERVAL, INTERVAL, 60.0, None]),
        "rebooted": st.booleans(),
        "down": st.sampled_from([None, at(20)]),
        "gap": st.sampled_from([None, 0.0, 3.0]),
        "vm": st.sampled_from([ME, None]),
    }
)
RANDOM_STEPS = st.lists(
    st.tuples(
        st.lists(RANDOM_ITEMS, max_size=4),
        RANDOM_MOMENTS,
        st.booleans(),  # the document also lists an unreadable event
        st.sampled_from([False, False, True]),  # the machine has become another VM
    ),
    max_size=12,
)


@given(RANDOM_STEPS)
def test_random_documents_give_one_consistent_story(
    steps: list[tuple[list[dict[str, Any]], dict[str, Any], bool, bool]],
) -> None:
    tracked = Tracked()
    all_ids: set[str] = set()
    open_keys: set[str] = set()

    for number, (items, fields, is_damaged, is_another_vm) in enumerate(steps):
        moment: Observation = observation(number * INTERVAL, **fields)
        unreadable = [{"EventId": 5}] if is_damaged else []
        document = parse(body(*items, *unreadable, incarnation=number))
        if is_another_vm:
            tracked = as_another_vm(tracked)
            open_keys = set()

        step = diff(tracked, document, moment)

        assert diff(tracked, document, moment) == step  # it is a pure function
        for change in step.changes:
            assert change.id not in all_ids
            all_ids.add(change.id)
            assert_follows(change, open_keys)
            if change.kind in OUTCOMES:
                assert not is_damaged  # the unreadable event may be the one that is gone
                open_keys.discard(change.event.key)
            else:
                open_keys.add(change.event.key)
        tracked = step.tracked
        listed_keys = {event.key for event in document.events}
        assert open_keys == set(tracked.events)
        assert listed_keys <= open_keys
        assert not tracked.departed.keys() & tracked.events.keys()


def assert_follows(change: Change, open_keys: set[str]) -> None:
    """Assert that a change can follow when these events are open, and that it is plausible."""
    is_first = change.event.key not in open_keys
    is_end = change.kind in OUTCOMES

    assert is_first == (change.previous is None and not is_end)
    if is_first:
        assert change.kind in ("announced", "started")
    assert change.notice_seconds is None or change.notice_seconds >= 0
    assert change.scheduled_seconds is None or change.scheduled_seconds >= 0
    assert change.started_seconds is None or change.started_seconds >= 0
    if change.interruption is not None:
        assert is_end
        assert change.scope == "self"
