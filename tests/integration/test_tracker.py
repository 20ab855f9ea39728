"""``Tracker`` with a real state file, and clocks that a test sets: what is claimed of which time."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from notbefore.agent import tracker as module
from notbefore.agent.tracker import Tracker
from notbefore.core.approval import ApprovalAttempt
from notbefore.core.delivery import DeliveryResult, Routing, Terms
from notbefore.core.duration import Duration
from notbefore.core.record import Vm
from notbefore.core.routing import AnnounceBy, Route
from notbefore.errors import ImdsError
from notbefore.imds.poller import Poll
from notbefore.metrics.process import Figures
from notbefore.store import state as store_module
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.state import FILE_NAME, Store
from support.azure import ID, ME, PEER, T0, body, item

STARTED = {"EventStatus": "Started", "NotBefore": ""}
MINE, OTHERS = item(EventType="Reboot"), item("other", Resources=[PEER])
BEGUN = {**MINE, **STARTED}
REFUSED = Poll(0.0, 0.01, error=ImdsError("refused", "no"))
UNCHANGED = Poll(0.0, 0.01)
THIS_VM = Vm(name=ME)


class Clock:
    """The wall clock and the monotonic one; the rest is as in ``time``."""

    def __init__(self) -> None:
        self.wall, self.steady = T0, 1000.0

    def now(self) -> datetime:
        return self.wall

    def time(self) -> float:
        return self.wall.timestamp()

    def monotonic(self) -> float:
        return self.steady

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def go(self, seconds: float, *, steady: float | None = None) -> None:
        """On both, or ``steady`` seconds on the monotonic one."""
        self.wall += timedelta(seconds=seconds)
        self.steady += seconds if steady is None else steady


class Agents:
    """One agent after the other on one machine and one state file."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.clock, self.said = clock, list[dict[str, Any]]()
        self._directory, self._incarnation = directory, 0
        self.boot()

    def boot(self, boot_id: str = "first", vm: Vm | None = THIS_VM) -> None:
        self._store = Store(self._directory)
        self.watch = Tracker(self._store, Figures(), lambda line: self.said.append(json.loads(line)), lambda: boot_id)
        self.watch.use_api_version("2020-07-01")
        self.watch.set_vm(vm, None)

    def die(self, *, in_order: bool = False) -> None:
        if in_order:
            self.watch.stop()
        self.watch.pulse.stop()
        self._store.close()

    def sees(self, *items: Any) -> None:
        self.clock.go(1)
        self._incarnation += 1
        self.watch.handle(Poll(0.0, 0.01, body=body(*items, incarnation=self._incarnation)))

    def waits(self, seconds: int, poll: Poll | None) -> None:
        """Second after second, as the agent does: the beat, and a poll that ends so; ``None``: none ends."""
        for _ in range(seconds):
            self.clock.go(1)
            self.watch.keep()
            if poll is not None:
                self.watch.handle(poll)

    def last(self, *names: str, event_id: str = ID) -> tuple[Any, ...]:
        found = [one for one in self.said if one["azure.scheduled_event.id"] == event_id]
        return tuple(found[-1].get(f"azure.scheduled_event.{name}") for name in names)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    clock = Clock()
    monkeypatch.setattr(module, "now_utc", clock.now)
    for one in (module, store_module):
        monkeypatch.setattr(one, "time", clock)
    found = Agents(tmp_path, clock)
    yield found
    found.die()


UNKNOWN = ("ended", "not_watched", "unknown", None)


def test_a_beat_without_an_answer_is_no_watching(agents: Agents) -> None:
    agents.sees()
    agents.sees(OTHERS, MINE)
    agents.sees(OTHERS, BEGUN)
    agents.waits(20, REFUSED)
    agents.die()
    agents.boot()
    agents.sees()
    assert agents.last("change", "reason", "outcome", "started_seconds") == UNKNOWN
    assert agents.last("change", "reason", "outcome", "started_seconds", event_id="other") == UNKNOWN


def test_what_was_answered_while_an_event_was_started_is_known_after_a_crash(agents: Agents) -> None:
    agents.sees()
    agents.sees(MINE)
    agents.sees(BEGUN)
    agents.waits(60, UNCHANGED)
    agents.die()
    agents.boot()
    agents.sees()
    assert agents.last("change", "outcome", "started_seconds") == ("finished", "finished", 61.0)


@pytest.mark.parametrize("clocks", [(60, 0.5), (0.5, 60)], ids=["steady clock stands", "wall clock was set back"])
@pytest.mark.parametrize("beat_first", [True, False])
def test_the_clock_that_moved_more_says_how_long_nobody_looked(
    agents: Agents, clocks: tuple[float, float], *, beat_first: bool
) -> None:
    agents.sees()
    agents.sees(OTHERS, MINE)
    agents.sees(OTHERS, BEGUN)
    agents.waits(2, UNCHANGED)
    agents.clock.go(clocks[0], steady=clocks[1])
    if beat_first:
        agents.watch.keep()
    agents.sees(BEGUN)
    assert agents.last("change", "reason", "outcome", "started_seconds", event_id="other") == UNKNOWN


def test_over_a_reboot_the_interruption_ends_with_the_first_beat_and_not_with_the_first_answer(agents: Agents) -> None:
    agents.sees()
    agents.sees(MINE)
    agents.sees(BEGUN)
    agents.waits(5, UNCHANGED)
    agents.die()
    agents.clock.go(40)
    agents.boot("second")
    agents.waits(300, REFUSED)
    agents.sees()
    assert agents.last("reason", "outcome", "interruption_seconds") == ("machine_rebooted", "finished", 40.0)


@pytest.mark.parametrize(("in_order", "felt"), [(True, 40.0), (False, None)])
def test_of_an_event_that_had_not_begun_the_last_beat_is_known_where_the_agent_was_stopped_in_order(
    agents: Agents, felt: float | None, *, in_order: bool
) -> None:
    agents.sees()
    agents.sees(MINE)
    agents.waits(2, UNCHANGED)
    agents.die(in_order=in_order)
    agents.clock.go(40)
    agents.boot("second")
    agents.sees(BEGUN)
    agents.sees()
    assert agents.last("change", "interruption_seconds") == ("finished", felt)


def test_a_restart_of_the_agent_is_no_interruption(agents: Agents) -> None:
    agents.sees()
    agents.sees(MINE)
    agents.sees(BEGUN)
    agents.waits(2, UNCHANGED)
    agents.die(in_order=True)
    agents.clock.go(5)
    agents.boot()
    agents.sees()
    assert agents.last("change", "interruption_seconds") == ("finished", None)


def test_after_a_boot_imds_has_to_say_anew_who_the_vm_is(agents: Agents) -> None:
    agents.sees()
    agents.die()
    agents.boot(vm=None)
    assert agents.watch.vm == THIS_VM
    agents.die()
    agents.boot("second", vm=None)
    agents.sees(MINE)
    assert agents.watch.vm is None
    assert agents.last("change", "scope") == ("announced", "unknown")
    agents.die()
    agents.boot("second", vm=None)
    assert agents.watch.vm is None
    agents.sees(MINE)
    agents.watch.set_vm(Vm(name=PEER), None)
    assert agents.watch.listed().lives[ID.casefold()].scope == "peer"


def test_of_what_might_have_been_ours_nobody_is_reminded_once_it_is_known_to_be_another_vms(
    agents: Agents, tmp_path: Path
) -> None:
    agents.die()
    agents.boot("second", vm=None)
    route = Route(sinks=("chat",), remind_before=Duration("5m"))
    agents.watch.routing = Routing((route,), {"chat": Terms()})
    agents.sees(MINE)
    agents.watch.set_vm(Vm(name=PEER), None)
    assert [one["azure.scheduled_event.change"] for one in agents.said] == ["announced"]
    agents.clock.go(15 * 60 - 120)
    later = agents.clock.now().timestamp()
    with closing(Outbox(tmp_path / FILE_NAME)) as outbox:
        assert [one.kind for one in outbox.exchange(CourierTurn([], {"chat": 9}, later))] == ["announced"]
    agents.sees({**MINE, "Description": "other"})
    assert agents.last("change", "scope", "previous_scope") == ("updated", "peer", None)


def test_only_answers_that_are_no_documents_are_counted_as_such(agents: Agents) -> None:
    agents.sees()
    agents.watch.handle(Poll(0.0, 0.01, body=b"garbage"))
    agents.watch.handle(UNCHANGED)
    agents.waits(5, REFUSED)
    figures = agents.watch.figures
    assert {reason: count for reason, count in figures.documents_rejected.items() if count} == {"not_json": 2}
    assert (figures.polls["rejected"], figures.polls["refused"]) == (2, 5)


def trouble(agents: Agents) -> None:
    agents.watch.handle(REFUSED)


def elsewhere(agents: Agents) -> None:
    agents.watch.use_api_version("2019-08-01")


def silence(agents: Agents) -> None:
    agents.clock.go(16)


@pytest.mark.parametrize("make_old", [trouble, elsewhere, silence])
def test_what_is_known_is_old_until_imds_has_answered_again(agents: Agents, make_old: Callable[[Agents], None]) -> None:
    agents.sees(MINE)
    assert agents.watch.listed().fresh
    make_old(agents)
    assert not agents.watch.listed().fresh
    agents.sees(MINE)
    assert agents.watch.listed().fresh


def test_an_approval_is_a_change_that_others_hear_of(agents: Agents) -> None:
    heard = list[str]()
    agents.watch.moved.append(lambda: heard.append("moved"))
    agents.sees(MINE)
    assert heard == ["moved"]
    attempt = ApprovalAttempt(agents.watch.listed().lives[ID.casefold()], "rule")
    agents.watch.note(attempt)
    assert heard == ["moved"]
    agents.watch.note(attempt, attempt.change("approved", "accepted", "", agents.watch.listed().where))
    assert heard == ["moved", "moved"]


@pytest.mark.parametrize("announce_by", ["affected", "leader"])
def test_of_an_event_that_left_this_vm_nobody_is_reminded_and_nothing_is_repeated(
    agents: Agents, tmp_path: Path, announce_by: AnnounceBy
) -> None:
    route = Route(sinks=("chat", "pager"), announce_by=announce_by, remind_before=Duration("5m"))
    agents.watch.routing = Routing((route,), {"chat": Terms(), "pager": Terms()})
    agents.sees({**MINE, "Resources": [ME, PEER]})
    now = agents.clock.now().timestamp()
    with closing(Outbox(tmp_path / FILE_NAME)) as outbox:
        told = outbox.exchange(CourierTurn([], {"chat": 1, "pager": 1}, now))
        assert [one.kind for one in told] == ["announced", "announced"]
        results = [DeliveryResult(one.delivery_id, "delivered", now, repeat=60) for one in told]
        outbox.exchange(CourierTurn(results, {}, now))
        assert (
            sorted((one.kind, one.state) for one in outbox.rows())
            == [("announced", "repeating")] * 2 + [("reminder", "pending")] * 2
        )
        agents.sees({**MINE, "Resources": [PEER]})
        agents.clock.go(15 * 60 - 120)
        later = agents.clock.now().timestamp()
        due = outbox.exchange(CourierTurn([], {"chat": 9, "pager": 9}, later))
    assert [one.kind for one in due] == (["updated", "updated"] if announce_by == "affected" else [])
