"""The order in which passwords are checked, without threads and without passwords."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.web.fair_queue import (
    FIRST_DELAY,
    FORGOTTEN_AFTER,
    KNOWN_ADDRESSES,
    LONGEST_DELAY,
    PATIENCE,
    PER_ADDRESS,
    TOTAL,
    FairQueue,
    WaitingLogin,
    network_of,
)


def login(address: str, since: float = 0.0, name: object = None, *, failed: bool = False) -> WaitingLogin:
    return WaitingLogin(address, since, name, failed)


def put(queue: FairQueue, *logins: WaitingLogin) -> list[WaitingLogin | None]:
    return [queue.put(one) for one in logins]


def taken(queue: FairQueue, now: float) -> list[object]:
    """What is taken one after the other, at the same moment."""
    found = []
    while (one := queue.take(now)) is not None:
        found.append(one.request)
    return found


def test_addresses_take_turns() -> None:
    queue = FairQueue()
    put(queue, *(login("a", second, f"a{second}") for second in range(3)), login("b", 3, "b"), login("c", 4, "c"))
    assert [queue.take(now).request for now in (5.0, 6.0, 7.0, 8.0)] == ["a0", "b", "c", "a1"]  # type: ignore[union-attr]  # there are five


def test_who_has_not_failed_comes_before_who_has() -> None:
    queue = FairQueue()
    queue.record("a", 0.0, right=False)
    put(queue, login("a", 1.0, "guess"), login("b", 2.0, "new"))
    assert taken(queue, 3.0) == ["new", "guess"]


def test_of_one_address_a_connection_that_has_just_failed_comes_last() -> None:
    queue = FairQueue()
    put(queue, login("a", 2.0, "again", failed=True), login("a", 0.0, "first"), login("a", 1.0, "second"))
    assert taken(queue, 3.0) == ["first", "second", "again"]


def test_the_delay_doubles_with_each_failure_up_to_a_limit() -> None:
    queue, now, delays = FairQueue(), 0.0, []
    for _ in range(2000):
        queue.record("a", now, right=False)
        queue.put(login("a", now))
        delays.append(queue.wait(now))
        now += delays[-1]
        assert queue.take(now - 0.001) is None
        assert queue.take(now) is not None
    assert delays[:4] == pytest.approx([FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY])
    assert delays[4:] == pytest.approx([LONGEST_DELAY] * 1996)


def test_a_right_password_and_a_long_time_end_the_delay() -> None:
    for right in (True, False):
        queue = FairQueue()
        for _ in range(9):
            queue.record("a", 0.0, right=False)
        if right:
            queue.record("a", 0.0, right=True)
        now = 0.0 if right else FORGOTTEN_AFTER + 1
        queue.put(login("a", now, "next"))
        assert taken(queue, now) == ["next"]


def test_the_delay_of_one_address_does_not_delay_another() -> None:
    queue = FairQueue()
    queue.record("a", 0.0, right=False)
    put(queue, login("a", 0.0, "guess"), login("b", 0.0, "other"))
    assert taken(queue, 0.0) == ["other"]
    assert queue.wait(0.0) == pytest.approx(FIRST_DELAY)


def test_one_address_has_few_places_and_loses_those_that_have_failed_first_then_the_newest() -> None:
    queue = FairQueue()
    again = login("a", 0.0, "again", failed=True)
    put(queue, again, *(login("a", second, second) for second in range(1, PER_ADDRESS)), login("b", 0.0, "b"))
    assert queue.put(login("a", 100.0, "new")) is again
    newest = login("a", 101.0, "newest")
    assert queue.put(newest) is newest
    assert sorted(map(str, taken(queue, 102.0))) == sorted(["b", "new", *map(str, range(1, PER_ADDRESS))])


def test_when_all_places_are_taken_the_address_with_most_of_them_loses_one() -> None:
    queue = FairQueue()
    put(queue, login("b", 0.0), login("b", 1.0))
    assert put(queue, *(login(str(number), 2.0) for number in range(TOTAL - 2))) == [None] * (TOTAL - 2)
    refused = queue.put(login("new", 3.0))
    assert refused is not None
    assert (refused.address, refused.since) == ("b", 1.0)


def test_who_has_waited_too_long_is_refused() -> None:
    queue = FairQueue()
    queue.record("a", 0.0, right=False)
    put(queue, login("a", 0.0, "old"), login("a", 1.0, "new"))
    assert queue.expired(PATIENCE - 0.01) == []
    assert [one.request for one in queue.expired(PATIENCE)] == ["old"]
    assert [one.request for one in queue.expired(PATIENCE + 1)] == ["new"]
    assert queue.wait(0.0) == math.inf


def test_few_addresses_are_remembered() -> None:
    queue = FairQueue()
    for number in range(KNOWN_ADDRESSES + 1):
        queue.record(str(number), 0.0, right=False)
    put(queue, login("0", 0.0, "forgotten"), login("1", 0.0, "known"))
    assert taken(queue, 0.0) == ["forgotten"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "take", "expire"]), st.sampled_from("abc"), st.floats(0, 5), st.booleans()),
    max_size=200,
)


@given(STEPS)
def test_each_login_leaves_once_and_nothing_waits_for_ever(steps: list[tuple[str, str, float, bool]]) -> None:
    queue, now, put_in, left = FairQueue(), 0.0, [], []
    for number, (step, address, seconds, right) in enumerate(steps):
        now += seconds
        if step == "put":
            put_in.append(number)
            left += [one.request for one in [queue.put(login(address, now, number, failed=right))] if one]
        elif step == "expire":
            left += [one.request for one in queue.expired(now)]
        elif (one := queue.take(now)) is not None:
            queue.record(one.address, now, right=right)
            left.append(one.request)
    while (wait := queue.wait(now)) != math.inf:
        assert wait <= PATIENCE
        now += wait
        found = [one.request for one in queue.expired(now)] + taken(queue, now)
        assert found, "it waited, and there was nothing to do"
        left += found
    assert sorted(left) == put_in


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.4", "10.0.0.4"),
        ("::ffff:10.0.0.4", "10.0.0.4"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_a_client_is_an_ipv4_address_or_a_network_of_ipv6(address: str, client: str) -> None:
    assert network_of(address) == client
