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


def test_an_event_that_is_over_may_still_be_approved_as_when_another_vm_was_faster(state: SimulatorState) -> None:
    event_id = state.start("hardware-failure", speed=10 * FAST)
    until_over(state)
    assert state.approve([event_id])
    assert document(state)["Events"] == []


def test_a_vm_has_an_identity_of_its_own_that_does_not_change() -> None:
    first, second = instance("WestNO_0")["compute"], instance("WestNO_1")["compute"]
    assert first == instance("WestNO_0")["compute"]
    assert (first["name"], second["name"]) == ("WestNO_0", "WestNO_1")
    assert first["vmId"] != second["vmId"]
    assert first["vmScaleSetName"] == second["vmScaleSetName"] == "WestNO"
