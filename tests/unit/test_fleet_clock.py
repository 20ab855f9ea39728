"""The time by the hub, whatever the clock of the instance says."""

import time

from notbefore.fleet.hub_clock import HubClock


def test_before_any_record_the_clock_of_the_machine_is_all_there_is() -> None:
    assert abs(HubClock().now() - time.time()) < 60


def test_time_goes_on_from_the_newest_record_and_a_late_one_does_not_set_it_back() -> None:
    now = [10.0]
    clock = HubClock(lambda: now[0])
    clock.hear(1000.0)
    now[0] = 11.0
    clock.hear(900.0)
    now[0] = 15.0
    assert clock.now() == 1005.0
    clock.hear(1020.0)
    assert clock.now() == 1020.0
    now[0] = 700.0
    clock.hear(1100.0)  # a clock of the hub that was set back is believed in the end
    assert clock.now() == 1100.0
