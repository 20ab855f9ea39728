"""``Tracker`` with a real state file, and clocks that a test sets: what is claimed of which time."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notbefore.agent.state import ChangeSettings
from notbefore.core.approval import ApprovalAttempt
from notbefore.core.delivery import DeliveryResult, Routing, Terms
from notbefore.core.duration import Duration
from notbefore.core.record import Vm
from notbefore.core.routing import AnnounceBy, Route
from notbefore.errors import ImdsError
from notbefore.imds.poller import Poll
from notbefore.store import state as store_module
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.state import FILE_NAME
from support.azure import ID, ME, PEER, body, item
from support.tracking import SteppedClock, Tracking

STARTED = {"EventStatus": "Started", "NotBefore": ""}
MINE, OTHERS = item(EventType="Reboot"), item("other", Resources=[PEER])
BEGUN = {**MINE, **STARTED}
REFUSED = Poll(0.0, 0.01, error=ImdsError("refused", "no"))
UNCHANGED = Poll(0.0, 0.01)
THIS_VM = Vm(name=ME)


class Agents:
    """One agent after the other on one machine and one state file."""

    def __init__(self, directory: Path, clock: SteppedClock) -> None:
        self.clock, self._earlier = clock, list[dict[str, Any]]()
        self._directory, self._incarnation = directory, 0
        self.settings = ChangeSettings()
        self.now = self._start()
        self.identify(THIS_VM)

    def _start(self) -> Tracking:
        return Tracking(self._directory, self.clock, self.settings)

    @property
    def said(self) -> list[dict[str, Any]]:
        return [*self._earlier, *self.now.said]

    def identify(self, vm: Vm | None) -> None:
        self.now.tracker.identify(vm)

    def boot(self, boot_id: str = "first", vm: Vm | None = THIS_VM) -> None:
        self.clock.boot_id = boot_id
        self._earlier += self.now.said
        self.now = self._start()
        self.identify(vm)

    def die(self, *, in_order: bool = False) -> None:
        if in_order:
            self.now.state.write_stop()
        self.now.close()

    def routes(self, *sinks: str, **values: Any) -> None:
        routing = Routing((Route(sinks=sinks, **values),), {sink: Terms() for sink in sinks})
        self.settings = self.now.settings = ChangeSettings(routing)

    def sees(self, *items: Any) -> None:
        self.clock.go(1)
        self._incarnation += 1
        self.now.tracker.handle(Poll(0.0, 0.01, body=body(*items, incarnation=self._incarnation)))

    def waits(self, seconds: int, poll: Poll | None) -> None:
        """Second after second, as the agent does: the beat, and a poll that ends so; ``None``: none ends."""
        for _ in range(seconds):
            self.clock.go(1)
            self.now.state.write_beat()
            if poll is not None:
                self.now.tracker.handle(poll)

    def last(self, *names: str, event_id: str = ID) -> tuple[Any, ...]:
        found = [one for one in self.said if one["azure.scheduled_event.id"] == event_id]
        return tuple(found[-1].get(f"azure.scheduled_event.{name}") for name in names)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    clock = SteppedClock()
    monkeypatch.setattr(store_module, "time", SimpleNamespace(time=clock.time))
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
        agents.now.state.write_beat()
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
    assert agents.now.known.vm == THIS_VM
    agents.die()
    agents.boot("second", vm=None)
    agents.sees(MINE)
    assert agents.now.known.vm is None
    assert agents.last("change", "scope") == ("announced", "unknown")
    agents.die()
    agents.boot("second", vm=None)
    assert agents.now.known.vm is None
    agents.sees(MINE)
    agents.identify(Vm(name=PEER))
    assert agents.now.listed.events[ID.casefold()].scope == "peer"


def test_of_what_might_have_been_ours_nobody_is_reminded_once_it_is_known_to_be_another_vms(
    agents: Agents, tmp_path: Path
) -> None:
    agents.die()
    agents.boot("second", vm=None)
    agents.routes("chat", remind_before=Duration("5m"))
    agents.sees(MINE)
    agents.identify(Vm(name=PEER))
    assert [one["azure.scheduled_event.change"] for one in agents.said] == ["announced"]
    agents.clock.go(15 * 60 - 120)
    later = agents.clock.now().timestamp()
    with closing(Outbox(tmp_path / FILE_NAME)) as outbox:
        assert [one.kind for one in outbox.exchange(CourierTurn([], {"chat": 9}, later))] == ["announced"]
    agents.sees({**MINE, "Description": "other"})
    assert agents.last("change", "scope", "previous_scope") == ("updated", "peer", None)


def test_only_answers_that_are_no_documents_are_counted_as_such(agents: Agents) -> None:
    agents.sees()
    agents.now.tracker.handle(Poll(0.0, 0.01, body=b"garbage"))
    agents.now.tracker.handle(UNCHANGED)
    agents.waits(5, REFUSED)
    figures = agents.now.known.poll.figures
    assert {reason: count for reason, count in figures.documents_rejected.items() if count} == {"not_json": 2}
    assert (figures.results["rejected"], figures.results["refused"]) == (2, 5)


def trouble(agents: Agents) -> None:
    agents.now.tracker.handle(REFUSED)


def elsewhere(agents: Agents) -> None:
    agents.now.tracker.use_api_version("2019-08-01")


def silence(agents: Agents) -> None:
    agents.clock.go(16)


@pytest.mark.parametrize("make_old", [trouble, elsewhere, silence])
def test_what_is_known_is_old_until_imds_has_answered_again(agents: Agents, make_old: Callable[[Agents], None]) -> None:
    agents.sees(MINE)
    assert agents.now.listed.fresh
    make_old(agents)
    assert not agents.now.listed.fresh
    agents.sees(MINE)
    assert agents.now.listed.fresh


def test_an_approval_is_a_change_that_others_hear_of(agents: Agents) -> None:
    agents.sees(MINE)
    assert agents.now.changes == 1
    attempt = ApprovalAttempt(agents.now.listed.events[ID.casefold()], "rule")
    agents.now.approvals.write(attempt)
    assert agents.now.changes == 1
    agents.now.approvals.write(attempt, attempt.change("approved", "accepted", "", agents.now.listed.context))
    assert agents.now.changes == 2


@pytest.mark.parametrize("announce_by", ["affected", "leader"])
def test_of_an_event_that_left_this_vm_nobody_is_reminded_and_nothing_is_repeated(
    agents: Agents, tmp_path: Path, announce_by: AnnounceBy
) -> None:
    agents.routes("chat", "pager", announce_by=announce_by, remind_before=Duration("5m"))
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
