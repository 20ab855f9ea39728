"""The simulator's state: incarnation, approval, what was set by hand, orders that cannot be."""

import time
from typing import Any

import msgspec
import pytest

from notbefore.simulator.state import SimulatorState, instance

FAST = 1_000.0  # a notice of 15 minutes in 0.9 s


@pytest.fixture
def state() -> SimulatorState:
    return SimulatorState(["WestNO_0", "WestNO_1"], 1.0)


def document(state: SimulatorState) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(state.body())
    return decoded


def until_over(state: SimulatorState) -> None:
    deadline = time.monotonic() + 10
    while not state.idle():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_incarnation_rises_when_an_event_goes(state: SimulatorState) -> None:
    state.start("hardware-failure", speed=10 * FAST)
    before = document(state)["DocumentIncarnation"]
    until_over(state)
    assert document(state) == {"DocumentIncarnation": before + 1, "Events": []}


@pytest.mark.parametrize("speed", [0.0, 1e12, float("nan")])
def test_an_impossible_speed_is_refused_and_nothing_is_scheduled(state: SimulatorState, speed: float) -> None:
    with pytest.raises(ValueError, match="speed"):
        state.start("user-reboot", speed=speed)
    assert document(state)["Events"] == []


def test_an_event_is_approved_whatever_the_case_of_its_id(state: SimulatorState) -> None:
    event_id = state.start("user-reboot", speed=100.0)
    assert state.approve([event_id.lower()])
    assert state.start_requests == [event_id]
    deadline = time.monotonic() + 5
    while document(state)["Events"][0]["EventStatus"] != "Started":
        assert time.monotonic() < deadline  # NotBefore is 9 s away, an approved one starts after 0.02 s
        time.sleep(0.005)


def test_an_event_that_is_over_may_still_be_approved_as_when_another_vm_was_faster(state: SimulatorState) -> None:
    event_id = state.start("hardware-failure", speed=10 * FAST)
    until_over(state)
    assert state.approve([event_id])
    assert document(state)["Events"] == []


def test_an_approval_with_one_unknown_id_approves_none(state: SimulatorState) -> None:
    event_id = state.start("user-reboot")
    assert not state.approve([event_id, "never-was"])
    assert state.start_requests == []


def test_clear_takes_everything_back(state: SimulatorState) -> None:
    state.start("user-reboot")
    state.set_document(b"x")
    state.fault("status", times=3)
    state.clear()
    assert document(state)["Events"] == []
    assert state.take_fault() is None


def test_a_fault_is_used_up_after_its_count_and_the_next_has_its_turn(state: SimulatorState) -> None:
    state.fault("status", times=2)
    state.fault("half")
    kinds = [fault and fault.kind for fault in (state.take_fault() for _ in range(4))]
    assert kinds == ["status", "status", "half", None]


@pytest.mark.parametrize(("kind", "value"), [("earthquake", None), ("freeze", -1.0), ("status", 7.0)])
def test_a_fault_that_cannot_be_is_refused_and_not_ordered(
    state: SimulatorState, kind: str, value: float | None
) -> None:
    with pytest.raises(ValueError, match=kind):
        state.fault(kind, value)
    assert state.take_fault() is None


def test_a_vm_has_an_identity_of_its_own_that_does_not_change() -> None:
    first, second = instance("WestNO_0")["compute"], instance("WestNO_1")["compute"]
    assert first == instance("WestNO_0")["compute"]
    assert (first["name"], second["name"]) == ("WestNO_0", "WestNO_1")
    assert first["vmId"] != second["vmId"]
    assert first["vmScaleSetName"] == second["vmScaleSetName"] == "WestNO"
