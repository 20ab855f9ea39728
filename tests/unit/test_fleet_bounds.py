"""A fleet remembers a bounded amount, whatever it is sent; and it marks corrections."""

import errno

import pytest
from msgspec.structs import replace

from notbefore.core.record import Vm
from notbefore.fleet import silence, snapshot
from notbefore.fleet.snapshot import compressed
from support.azure import at
from support.fleet_log import EACH, LIMIT, WAVES, A, B, Log
from support.fleet_records import vm


def tagged(untagged: Vm, text: str) -> Vm:
    return replace(untagged, tags={"team": text}, record_tags=("team",))


def test_known_vms_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "MAX_HEARD_BYTES", 20_000)
    log = Log()

    log.beat(*(tagged(vm(f"vm-{number}"), "x" * 250) for number in range(200)))

    state = log.fold.state
    assert len(state.heard) > 40
    assert len(state.heard) < 80
    assert log.fold.figures.poison["too_many"] == 200 - len(state.heard)
    assert len(log.fold.snapshot(log.now)) < 30_000


def test_tags_of_known_vms_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    vms = [vm(f"vm-{number}") for number in range(100)]
    log.beat(*vms)
    monkeypatch.setattr(silence, "MAX_HEARD_BYTES", 10_000)

    log.beat(*(tagged(untagged, "x" * 250) for untagged in vms))

    assert log.fold.figures.poison["too_many"] > 50
    assert len(log.fold.snapshot(log.now)) < 30_000


def test_forgotten_vms_free_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "MAX_HEARD_BYTES", 2_000)
    log = Log()
    log.beat(*(tagged(vm(f"old-{number}"), "x" * 250) for number in range(20)))
    log.pass_time(90_000)
    assert log.fold.state.heard == {}

    log.beat(tagged(A, "x" * 250))

    assert len(log.fold.state.heard) == 1


def test_known_vms_keep_their_bound_after_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "MAX_HEARD_BYTES", 20_000)
    log = Log()
    log.beat(*(tagged(vm(f"vm-{number}"), "x" * 250) for number in range(200)))
    before = len(log.fold.state.heard)

    other = log.taken_over()
    other.beat(*(tagged(vm(f"more-{number}"), "x" * 250) for number in range(200)))

    assert len(other.fold.state.heard) <= before + 1


def test_snapshot_that_is_too_large_to_read_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT", 1_000)

    with pytest.raises(OSError, match="could not be read again") as refused:
        compressed(bytes(1_001))

    assert refused.value.errno == errno.EFBIG
    assert compressed(bytes(1_000))


@pytest.mark.parametrize(
    ("end", "later_kinds"),
    [("ended", ["started", "finished"]), ("canceled", ["started"])],
)
def test_start_after_an_end_is_marked_as_a_correction(end: str, later_kinds: list[str]) -> None:
    log = Log(EACH)
    log.add(A, "announced", resources=[A.name])
    log.add(A, end, resources=[A.name])
    log.wait(10)

    for kind in later_kinds:
        log.add(A, kind, resources=[A.name], after=30)

    assert log.kinds == ["announced", end, *later_kinds]
    assert log.notifications[2].change.reason == "corrected"


def test_end_after_an_unknown_end_is_marked_as_a_correction() -> None:
    log = Log(EACH)
    log.add(A, "announced", resources=[A.name])
    log.add(B, "announced", resources=[A.name])
    log.add(A, "ended", resources=[A.name])

    log.add(B, "started", resources=[A.name], after=60)
    log.add(B, "finished", resources=[A.name], after=60)

    assert log.kinds[:2] == ["announced", "ended"]
    assert log.notifications[2].change.reason == "corrected"


def test_digest_shows_the_not_before_of_events_under_way() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "FIRST", resources=[A.name], not_before=at(60))
    log.add(B, "announced", "SECOND", resources=[B.name], not_before=at(LIMIT))
    log.wait(60)
    log.add(A, "started", "FIRST", resources=[A.name])
    log.add(A, "finished", "FIRST", resources=[A.name])
    log.wait(LIMIT)

    log.add(B, "started", "SECOND", resources=[B.name], not_before=at(LIMIT))
    log.wait(400)

    assert log.last.change.kind == "updated"
    assert log.last.change.not_before == at(LIMIT)
