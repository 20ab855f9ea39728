"""The inventory: its file, and the VMs in it that are not heard from."""

import pytest

from notbefore.fleet.hub_records import Place
from notbefore.fleet.inventory import read_inventory
from notbefore.wording.phrases import MISSING
from support.fleet_log import Log
from support.fleet_records import vm

A = vm("web_0")
B = vm("web_1")


# ---- the file


def test_inventory_of_names_may_have_comments_and_empty_lines() -> None:
    data = b"\xef\xbb\xbf# the web\r\ns/rg/Web_0\r\n\r\ns/rg/web_1  # the second\n"

    assert read_inventory(data) == {
        "s/rg/web_0": ("Web_0", Place("s", "rg")),
        "s/rg/web_1": ("web_1", Place("s", "rg")),
    }


def test_inventory_is_read_as_az_graph_query_writes_it() -> None:
    data = b"s-1/RG/db-A\twesteurope\t\ns-1/rg/web_12\teastus\tweb\n"

    assert read_inventory(data) == {
        "s-1/rg/db-a": ("db-A", Place("s-1", "RG", "westeurope", "")),
        "s-1/rg/web_12": ("web_12", Place("s-1", "rg", "eastus", "web")),
    }


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"# nothing\n", "0 VMs"),
        (b'{"data": []}', "line 1"),
        (b"s/rg/web_0\ns/rg/web\x00\n", "line 2"),
        (b"s/rg/a\tb\tc\td\n", "line 1"),
        (b"rg/web_0\n", "line 1: expected SUBSCRIPTION/RESOURCE_GROUP/NAME, got 'rg/web_0'"),
        (b"/subscriptions/s-1/resourceGroups/rg/web_0\n", "line 1"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_broken_inventory_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_inventory(data)


# ---- missing VMs


def expect(log: Log, *names: str) -> None:
    """Put these VMs, and no others, into the inventory."""
    place = Place("sub", "rg", "westeurope", "web")
    log.fold.missing.expect({name: (name, place) for name in names}, log.now, 900.0)


def missing(log: Log) -> list[str]:
    return [expected.name for expected in log.fold.state.expected.values() if expected.silent]


def test_vm_is_missing_when_it_is_not_heard_for_three_intervals() -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1")
    log.pass_time(840, A)
    assert log.kinds == []

    log.pass_time(180, A)

    event = log.last.change.event
    assert log.kinds == ["started"]
    assert missing(log) == ["web_1"]
    assert event.resources == ("web_1",)
    assert event.event_type == "Silent"
    assert event.description == MISSING


def test_missing_vm_is_notified_once_and_stays_missing() -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1")

    log.pass_time(2 * 86_400, A)

    assert log.kinds == ["started"]
    assert missing(log) == ["web_1"]  # it is still in the inventory


def test_vm_that_leaves_the_inventory_is_no_longer_missing() -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1")
    log.pass_time(1200, A)

    expect(log)
    log.pass_time(600, A)

    assert log.kinds == ["started", "finished"]
    assert missing(log) == []


def test_vm_that_leaves_the_inventory_leaves_others_missing() -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1", "web_2")
    log.pass_time(1200, A)

    expect(log, "web_2")
    log.pass_time(600, A)

    assert log.kinds == ["started", "updated"]
    assert missing(log) == ["web_2"]


def test_missing_and_silent_vms_are_two_notifications() -> None:
    log = Log()
    log.pass_time(600, A, B)
    expect(log, "web_9")

    log.pass_time(1500, A)

    resources = {notification.change.event.resources for notification in log.notifications}
    assert log.kinds == ["started", "started"]
    assert resources == {("web_1",), ("web_9",)}
    assert len({notification.change.id for notification in log.notifications}) == 2


def log_with_missing_vm() -> Log:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1")
    log.pass_time(1200, A)
    return log


def test_takeover_does_not_notify_missing_vms_again() -> None:
    successor = log_with_missing_vm().taken_over()

    expect(successor, "web_1")
    successor.pass_time(1200, A)

    assert successor.kinds == []
    assert missing(successor) == ["web_1"]
    assert len(successor.fold.silence.heard) == 1


def test_missing_vm_leaves_the_inventory_after_a_takeover() -> None:
    successor = log_with_missing_vm().taken_over()
    expect(successor, "web_1")
    successor.pass_time(1200, A)

    expect(successor)
    successor.pass_time(600, A)

    assert successor.kinds == ["finished"]
