"""The scenarios of the simulator: their order, timing, cancellation, and documents."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.document import parse
from notbefore.simulator.state import SCENARIOS, Play, SimulatorState
from support.azure import ID, body

BEGUN = 1_800_000_000.0  # when each play begins

NAMES = st.sampled_from(sorted(SCENARIOS))
SCENARIOS_WITH_NOTICE = sorted(
    name
    for name, scenario in SCENARIOS.items()
    if scenario.notice and scenario.started and not scenario.canceled_after
)


VMS = ("WestNO_0", "WestNO_1")


def play(
    name: str, *, speed: float = 1.0, cancel: bool = False, approved: float | None = None
) -> Play:
    """Return a play of a scenario. ``approved``: seconds from its beginning to its approval."""
    approved_at = None if approved is None else BEGUN + approved
    return Play(SCENARIOS[name], ID, VMS, BEGUN, speed, cancel=cancel, approved=approved_at)


def status(played: Play, seconds: float) -> str | None:
    return played.status(BEGUN + seconds)


@pytest.mark.parametrize("name", SCENARIOS_WITH_NOTICE)
def test_event_is_scheduled_for_its_notice_then_started_then_gone(name: str) -> None:
    notice = SCENARIOS[name].notice
    end = notice + SCENARIOS[name].started

    played = play(name)

    assert status(played, 0.0) == "Scheduled"
    assert status(played, notice - 0.1) == "Scheduled"
    assert status(played, notice) == "Started"
    assert status(played, end - 0.1) == "Started"
    assert status(played, end) is None


@pytest.mark.parametrize("name", SCENARIOS_WITH_NOTICE)
def test_canceled_event_is_gone_after_half_its_notice(name: str) -> None:
    notice = SCENARIOS[name].notice
    end = notice + SCENARIOS[name].started

    played = play(name, cancel=True)

    assert status(played, 0.0) == "Scheduled"
    assert status(played, notice / 2 - 0.1) == "Scheduled"
    assert status(played, notice / 2) is None
    assert status(played, notice) is None
    assert status(played, end) is None


@pytest.mark.parametrize(("speed", "canceled_after"), [(1.0, 480.0), (60.0, 8.0)])
def test_canceled_maintenance_is_gone_after_the_time_in_its_scenario(
    speed: float, canceled_after: float
) -> None:
    played = play("canceled-maintenance", speed=speed)

    assert status(played, canceled_after - 0.1) == "Scheduled"
    assert status(played, canceled_after) is None


def test_approved_maintenance_is_not_canceled() -> None:
    played = play("canceled-maintenance", approved=60.0)

    assert status(played, 62.0) == "Started"
    assert status(played, 500.0) == "Started"


@pytest.mark.parametrize(("cancel", "approved"), [(False, 100.0), (True, 60.0)])
def test_approved_event_starts_after_two_seconds_even_if_to_be_canceled(
    approved: float, *, cancel: bool
) -> None:
    start = approved + 2
    end = start + SCENARIOS["user-reboot"].started

    played = play("user-reboot", cancel=cancel, approved=approved)

    assert status(played, start - 1) == "Scheduled"
    assert status(played, start) == "Started"
    assert status(played, end - 0.1) == "Started"
    assert status(played, end) is None


STEPS = {"Scheduled": 0, "Started": 1, None: 2}


@given(
    NAMES,
    st.sampled_from([1.0, 7.0, 60.0, 600.0]),
    st.booleans(),
    st.none() | st.floats(0.1, 3600),
)
def test_status_never_goes_back(
    name: str,
    speed: float,
    cancel: bool,
    approved: float | None,
) -> None:
    played = play(name, speed=speed, cancel=cancel, approved=approved)

    steps = []
    for second in range(0, 7200, 13):
        seconds = second / speed
        # an approval counts from the moment at which it is given
        if approved is None or seconds >= approved:
            steps.append(STEPS[status(played, seconds)])
    assert steps == sorted(steps)
    assert status(played, 7200 + (approved or 0)) is None


@given(NAMES, st.floats(0, 3000))
def test_document_of_a_scenario_is_read_without_a_flaw(name: str, seconds: float) -> None:
    listed = play(name).item(BEGUN + seconds)
    items = [] if listed is None else [listed]

    document = parse(body(*items))

    assert not document.flaws
    assert len(document.events) == len(items)
    for event in document.events:
        assert event.resources == VMS


@pytest.fixture
def ended_event(monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatorState, str, int]:
    """A simulator whose event has ended, the event's id, and the incarnation before the end."""
    state = SimulatorState(["WestNO_0"], 1.0)
    event_id = state.start("hardware-failure")
    incarnation = msgspec.json.decode(state.body())["DocumentIncarnation"]
    an_hour_later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: an_hour_later)
    return state, event_id, incarnation


def test_ended_event_raises_the_incarnation(ended_event: tuple[SimulatorState, str, int]) -> None:
    state, _, incarnation = ended_event

    assert msgspec.json.decode(state.body()) == {
        "DocumentIncarnation": incarnation + 1,
        "Events": [],
    }


def test_ended_event_accepts_approval_without_effect(
    ended_event: tuple[SimulatorState, str, int],
) -> None:
    state, event_id, _ = ended_event
    before = state.body()

    assert state.approve([event_id])

    assert msgspec.json.decode(state.body()) == msgspec.json.decode(before)
