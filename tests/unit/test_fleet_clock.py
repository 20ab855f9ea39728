"""The time by the hub, whatever the clock of the instance says."""

from notbefore.fleet.hub_clock import HubClock

WALL = 5e9  # a clock that is far ahead


def test_before_any_record_the_clock_of_the_machine_is_all_there_is() -> None:
    assert HubClock().now(10.0, WALL) == WALL


def test_time_goes_on_from_the_newest_record() -> None:
    clock = HubClock()
    clock.hear(1000.0, 10.0)
    assert clock.now(15.0, WALL) == 1005.0


def test_a_record_that_was_late_does_not_set_the_time_back() -> None:
    clock = HubClock()
    clock.hear(1000.0, 10.0)
    clock.hear(900.0, 11.0)
    assert clock.now(15.0, WALL) == 1005.0
    clock.hear(1020.0, 16.0)
    assert clock.now(16.0, WALL) == 1020.0


def test_a_clock_of_the_hub_that_was_set_back_is_believed_in_the_end() -> None:
    clock = HubClock()
    clock.hear(1000.0, 10.0)
    clock.hear(1100.0, 700.0)
    assert clock.now(700.0, WALL) == 1100.0
