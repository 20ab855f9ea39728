"""The scenarios: their order, their timing, what cancels them, and that an agent can read them."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.document import parse
from notbefore.simulator.state import SCENARIOS, Play, SimulatorState
from support.azure import ID, body

BEGUN = 1_800_000_000.0

names = st.sampled_from(sorted(SCENARIOS))
with_notice = sorted(name for name, scenario in SCENARIOS.items() if scenario.notice)


def play(name: str, *, speed: float = 1.0, approved: float | None = None, **words: bool) -> Play:
    vms = ("WestNO_0", "WestNO_1")
    return Play(
        SCENARIOS[name], ID, vms, BEGUN, speed, **words, approved=approved and BEGUN + approved
    )


def status(played: Play, seconds: float) -> str | None:
    return played.status(BEGUN + seconds)


@pytest.mark.parametrize("name", with_notice)
def test_an_event_is_scheduled_for_its_notice_then_started_then_gone_or_canceled_half_way(
    name: str,
) -> None:
    notice, played, canceled = SCENARIOS[name].notice, play(name), play(name, cancel=True)
    end = notice + SCENARIOS[name].started
    moments = (0.0, notice - 0.1, notice, end - 0.1, end)
    assert [status(played, seconds) for seconds in moments] == [
        "Scheduled",
        "Scheduled",
        "Started",
        "Started",
        None,
    ]
    moments = (0.0, notice / 2 - 0.1, notice / 2, notice, end)
    assert [status(canceled, seconds) for seconds in moments] == [
        "Scheduled",
        "Scheduled",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(("cancel", "approved"), [(False, 100.0), (True, 60.0)])
def test_an_approved_event_starts_soon_also_if_it_was_to_be_canceled_and_is_started_for_its_time(
    approved: float, *, cancel: bool
) -> None:
    played, begins = play("user-reboot", cancel=cancel, approved=approved), approved + 2
    end = begins + SCENARIOS["user-reboot"].started
    seen = [status(played, seconds) for seconds in (begins - 1, begins, end - 0.1, end)]
    assert seen == ["Scheduled", "Started", "Started", None]


@given(
    names,
    st.sampled_from([1.0, 7.0, 60.0, 600.0]),
    st.booleans(),
    st.none() | st.floats(0.1, 3600),
)
def test_no_life_goes_backwards_whatever_is_ordered(
    name: str, speed: float, cancel: bool, approved: float | None
) -> None:
    played = play(name, speed=speed, cancel=cancel, approved=approved)
    order = {"Scheduled": 0, "Started": 1, None: 2}
    seen = [order[status(played, second / speed)] for second in range(0, 7200, 13)]
    # an approval is known from the moment it is given: before it, nothing has been decided
    since = [
        state
        for index, state in enumerate(seen)
        if approved is None or index * 13 / speed >= approved
    ]
    assert since == sorted(since)
    assert status(played, 7200 + (approved or 0)) is None


@given(names, st.floats(0, 3000))
def test_the_agent_reads_every_document_without_a_flaw(name: str, seconds: float) -> None:
    item = play(name).item(BEGUN + seconds)
    document = parse(body(*filter(None, [item])))
    assert not document.flaws
    assert [event.resources for event in document.events] == [("WestNO_0", "WestNO_1")] * (
        item is not None
    )


def test_ended_event_raises_the_incarnation_and_accepts_approval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimulatorState(["WestNO_0"], 1.0)
    event_id = state.start("hardware-failure")
    before = msgspec.json.decode(state.body())["DocumentIncarnation"]
    over = {"DocumentIncarnation": before + 1, "Events": []}
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert msgspec.json.decode(state.body()) == over
    assert state.approve([event_id])
    assert msgspec.json.decode(state.body()) == over
