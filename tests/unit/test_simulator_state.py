"""The simulator's state: incarnation, approval, what was set by hand, orders that cannot be."""

import threading
import time
from typing import Any

import msgspec
import pytest

from notbefore.errors import SimulatorError
from notbefore.simulator import state as state_module
from notbefore.simulator.state import SimulatorState, instance

VERSION = "2020-07-01"
FAST = 1_000.0  # a notice of 15 minutes in 0.9 s


@pytest.fixture
def state() -> SimulatorState:
    return SimulatorState(["WestNO_0", "WestNO_1"], 1.0)


def document(state: SimulatorState) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(state.body(VERSION))
    return decoded


def until_over(state: SimulatorState) -> None:
    deadline = time.monotonic() + 10
    while not state.idle():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_begins_with_nothing_scheduled(state: SimulatorState) -> None:
    assert document(state) == {"DocumentIncarnation": 1, "Events": []}


def test_the_incarnation_rises_when_an_event_comes(state: SimulatorState) -> None:
    state.start("user-reboot")
    assert document(state)["DocumentIncarnation"] == 2


def test_the_incarnation_stays_while_nothing_changes(state: SimulatorState) -> None:
    state.start("user-reboot")
    assert document(state) == document(state)


def test_the_incarnation_rises_when_an_event_goes(state: SimulatorState) -> None:
    state.start("hardware-failure", speed=10 * FAST)
    before = document(state)["DocumentIncarnation"]
    until_over(state)
    assert document(state) == {"DocumentIncarnation": before + 1, "Events": []}


def test_an_event_is_for_the_first_vm_unless_others_are_named(state: SimulatorState) -> None:
    state.start("user-reboot")
    state.start("user-redeploy", resources=["WestNO_1", "elsewhere"])
    assert [e["Resources"] for e in document(state)["Events"]] == [["WestNO_0"], ["WestNO_1", "elsewhere"]]


def test_an_event_id_can_be_given(state: SimulatorState) -> None:
    assert state.start("user-reboot", event_id="abc") == "abc"
    assert document(state)["Events"][0]["EventId"] == "abc"


def test_event_ids_are_unlike_and_in_upper_case_as_azures(state: SimulatorState) -> None:
    first, second = state.start("user-reboot"), state.start("user-reboot")
    assert first != second
    assert first == first.upper()


def test_an_unknown_scenario_is_refused_with_those_there_are(state: SimulatorState) -> None:
    with pytest.raises(SimulatorError, match="user-reboot"):
        state.start("earthquake")


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e-12, 1e12, float("nan"), float("inf")])
def test_an_impossible_speed_is_refused_and_nothing_is_scheduled(state: SimulatorState, speed: float) -> None:
    with pytest.raises(SimulatorError, match="speed"):
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


def test_a_second_approval_is_taken_and_changes_nothing(state: SimulatorState) -> None:
    event_id = state.start("user-reboot")
    assert state.approve([event_id])
    before = document(state)
    assert state.approve([event_id])
    assert document(state) == before


def test_an_event_that_is_over_may_still_be_approved_as_when_another_vm_was_faster(state: SimulatorState) -> None:
    event_id = state.start("hardware-failure", speed=10 * FAST)
    until_over(state)
    assert state.approve([event_id])
    assert document(state)["Events"] == []


def test_an_approval_with_one_unknown_id_approves_none(state: SimulatorState) -> None:
    event_id = state.start("user-reboot")
    assert not state.approve([event_id, "never-was"])
    assert state.start_requests == []


def test_events_of_a_document_set_by_hand_may_be_approved(state: SimulatorState) -> None:
    state.set_document({"DocumentIncarnation": 1, "Events": [{"EventId": "ABC"}]})
    assert state.approve(["abc"])
    assert state.start_requests == ["abc"]


def test_a_document_set_by_hand_that_cannot_be_read_has_no_events_to_approve(state: SimulatorState) -> None:
    state.set_document(b"[" * 100_000)
    assert not state.approve(["abc"])


def test_only_the_newest_start_requests_are_kept(state: SimulatorState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MAX_START_REQUESTS", 2)
    ids = [state.start("user-reboot") for _ in range(3)]
    for event_id in ids:
        state.approve([event_id])
    assert state.start_requests == ids[1:]


def test_scenarios_that_are_over_are_forgotten_when_there_are_too_many(
    state: SimulatorState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "MAX_PLAYS", 2)
    gone = state.start("hardware-failure", speed=10 * FAST)
    until_over(state)
    kept = [state.start("user-reboot") for _ in range(2)]
    assert not state.approve([gone])
    assert [event["EventId"] for event in document(state)["Events"]] == kept


def test_bytes_set_by_hand_are_answered_as_they_are(state: SimulatorState) -> None:
    state.set_document(b"\xff\x00 no JSON")
    assert state.body(VERSION) == b"\xff\x00 no JSON"


def test_a_scenario_takes_the_place_of_a_document_set_by_hand(state: SimulatorState) -> None:
    state.set_document(b"x")
    event_id = state.start("user-reboot")
    assert document(state)["Events"][0]["EventId"] == event_id


def test_clear_takes_everything_back(state: SimulatorState) -> None:
    state.start("user-reboot")
    state.set_document(b"x")
    state.fault("error", times=3)
    state.clear()
    assert document(state)["Events"] == []
    assert state.take_fault() is None


def test_clear_lets_a_held_client_go(state: SimulatorState) -> None:
    answers: list[bool] = []
    held = threading.Thread(target=lambda: answers.append(state.hold(60)))
    held.start()
    deadline = time.monotonic() + 10
    while held.is_alive():
        assert time.monotonic() < deadline
        state.clear()
        held.join(0.01)
    assert answers == [False]


def test_a_client_that_nobody_lets_go_is_held_to_the_end(state: SimulatorState) -> None:
    assert state.hold(0.01)


def test_a_fault_is_used_up_after_its_count_and_the_next_has_its_turn(state: SimulatorState) -> None:
    state.fault("error", times=2)
    state.fault("gone")
    kinds = [fault and fault.kind for fault in (state.take_fault() for _ in range(4))]
    assert kinds == ["error", "error", "gone", None]


def test_a_fault_with_a_duration_ends_by_itself(state: SimulatorState) -> None:
    state.fault("error", seconds=0.2)
    assert state.take_fault() is not None
    deadline = time.monotonic() + 5
    while state.take_fault() is not None:
        assert time.monotonic() < deadline


def test_a_fault_with_a_count_and_a_duration_ends_with_the_count_if_that_is_first(state: SimulatorState) -> None:
    state.fault("error", times=1, seconds=60)
    assert [state.take_fault() is None for _ in range(2)] == [False, True]


def test_a_reset_lets_the_incarnation_begin_anew_under_the_same_content(state: SimulatorState) -> None:
    for _ in range(3):
        state.start("user-reboot")
        document(state)
    before = document(state)
    state.fault("reset")
    state.take_fault()
    after = document(state)
    assert (before["DocumentIncarnation"], after["DocumentIncarnation"]) == (4, 1)
    assert after["Events"] == before["Events"]


@pytest.mark.parametrize(
    ("kind", "value", "times", "seconds"),
    [
        ("earthquake", None, None, None),
        ("slow", -1.0, None, None),
        ("slow", float("nan"), None, None),
        ("slow", 1e9, None, None),
        ("status", 7.0, None, None),
        ("status", 600.0, None, None),
        ("error", None, 0, None),
        ("error", None, None, 0.0),
        ("error", None, None, float("inf")),
    ],
)
def test_a_fault_that_cannot_be_is_refused_and_not_ordered(
    state: SimulatorState, kind: str, value: float | None, times: int | None, seconds: float | None
) -> None:
    with pytest.raises(SimulatorError, match=kind):
        state.fault(kind, value, times, seconds=seconds)
    assert state.take_fault() is None


def test_what_it_did_can_be_read(state: SimulatorState) -> None:
    event_id = state.start("user-reboot")
    state.approve([event_id])
    state.take_fault()
    read = msgspec.json.decode(msgspec.json.encode(state.state()))
    assert (read["vms"], read["requests"], read["start_requests"]) == (["WestNO_0", "WestNO_1"], 1, [event_id])
    assert read["events"][0]["scenario"] == "user-reboot"


def test_a_vm_has_an_identity_of_its_own_that_does_not_change() -> None:
    first, second = instance("WestNO_0")["compute"], instance("WestNO_1")["compute"]
    assert first == instance("WestNO_0")["compute"]
    assert (first["name"], second["name"]) == ("WestNO_0", "WestNO_1")
    assert first["vmId"] != second["vmId"]
    assert first["vmScaleSetName"] == second["vmScaleSetName"] == "WestNO"
