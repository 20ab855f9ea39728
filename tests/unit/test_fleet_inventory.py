"""The inventory: its file, and the VMs in it that are not heard from."""

import pytest

from notbefore.core.change import MISSING
from notbefore.fleet.hub_records import Place
from notbefore.fleet.inventory import read_inventory
from support.fleet_log import Log
from support.fleet_records import vm

A, B = vm("web_0"), vm("web_1")


def test_a_file_of_names_may_have_comments_and_empty_lines() -> None:
    found = read_inventory(b"\xef\xbb\xbf# the web\r\ns/rg/Web_0\r\n\r\ns/rg/web_1  # the second\n")
    assert found == {
        "s/rg/web_0": ("Web_0", Place("s", "rg")),
        "s/rg/web_1": ("web_1", Place("s", "rg")),
    }
    # as `az graph query` writes it
    found = read_inventory(b"s-1/RG/db-A\twesteurope\t\ns-1/rg/web_12\teastus\tweb\n")
    assert found == {
        "s-1/rg/db-a": ("db-A", Place("s-1", "RG", "westeurope", "")),
        "s-1/rg/web_12": ("web_12", Place("s-1", "rg", "eastus", "web")),
    }


@pytest.mark.parametrize(
    ("data", "why"),
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
def test_a_broken_file_says_what_is_wrong(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_inventory(data)


def expect(log: Log, *names: str) -> None:
    place = Place("sub", "rg", "westeurope", "web")
    log.fold.missing.expect({name: (name, place) for name in names}, log.now, 900.0)


def missing(log: Log) -> list[str]:
    return [one.name for one in log.fold.state.expected.values() if one.silent]


def test_a_vm_that_is_never_heard_from_is_missing_after_three_intervals_and_notified_once() -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1")
    assert log.pass_time(840, A) == []
    assert log.pass_time(180, A) == ["started"]
    event = log.last.change.event
    assert (missing(log), event.resources, event.event_type, event.description) == (
        ["web_1"],
        ("web_1",),
        "Silent",
        MISSING,
    )
    log.pass_time(2 * 86_400, A)  # nobody forgets it: it is in the inventory still
    assert (log.kinds, missing(log)) == (["started"], ["web_1"])


@pytest.mark.parametrize("left", [(), ("web_2",)])
def test_what_is_heard_from_or_leaves_the_inventory_is_no_longer_missing(
    left: tuple[str, ...],
) -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1", *left)
    log.pass_time(1200, A)
    expect(log, *left)
    log.pass_time(600, A)
    assert log.kinds == (["started", "updated"] if left else ["started", "finished"])
    assert missing(log) == list(left)


def test_who_is_missing_and_who_is_silent_are_two_notifications() -> None:
    log = Log()
    log.pass_time(600, A, B)
    expect(log, "web_9")
    log.pass_time(1500, A)
    assert log.kinds == ["started", "started"]
    assert {one.change.event.resources for one in log.made} == {("web_1",), ("web_9",)}
    assert len({one.change.id for one in log.made}) == 2


def test_another_instance_goes_on_with_who_is_missing_and_notifies_nobody_again() -> None:
    log = Log()
    log.pass_time(60, A)
    expect(log, "web_1")
    log.pass_time(1200, A)
    other = log.taken_over()
    expect(other, "web_1")
    other.pass_time(1200, A)
    assert (other.kinds, missing(other), len(other.fold.silence.heard)) == ([], ["web_1"], 1)
    expect(other)
    other.pass_time(600, A)
    assert other.kinds == ["finished"]
