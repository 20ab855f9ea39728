"""``Tracker`` with a real state file, and clocks that a test sets."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.agent.tracker import Poll
from notbefore.config.model import Config, VmName
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Slack
from notbefore.core.approval import ApprovalAttempt
from notbefore.core.delivery import Delivery
from notbefore.core.document import EMPTY_BODIES
from notbefore.core.duration import Duration
from notbefore.core.outbox import SendResult
from notbefore.core.record import Vm
from notbefore.core.routing import Route
from notbefore.errors import ImdsError
from notbefore.store.store import Store
from support.agent import PATIENCE, eventually
from support.azure import ID, ME, PEER, STARTED, body, item
from support.box import rows_of
from support.locked_disk import LockedDisk
from support.tracking import SteppedClock, Tracking

MINE = item(EventType="Reboot")
PEERS = item("other", Resources=[PEER])
MINE_STARTED = {**MINE, **STARTED}
REFUSED = Poll(0.0, 0.01, error=ImdsError("refused", "no"))
UNCHANGED = Poll(0.0, 0.01)
THIS_VM = Vm(name=ME)


class Agents:
    """One agent after the other on one machine and one state file."""

    def __init__(self, directory: Path, clock: SteppedClock, vm: Vm | None = THIS_VM) -> None:
        self.clock = clock
        self._earlier_records: list[dict[str, Any]] = []
        self._directory = directory
        self._incarnation = 0
        self.config = Config()
        self.current = self._start()
        self.identify(vm)

    def _start(self) -> Tracking:
        return Tracking(self._directory, self.clock, self.config)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of all agents."""
        return [*self._earlier_records, *self.current.records]

    @property
    def changes(self) -> list[str]:
        """The kinds of the changes in the records of all agents."""
        return [record["azure.scheduled_event.change"] for record in self.records]

    def identify(self, vm: Vm | None) -> None:
        self.current.tracker.identify(vm)

    def boot(self, boot_id: str = "first", vm: Vm | None = THIS_VM) -> None:
        self.clock.boot_id = boot_id
        self._earlier_records += self.current.records
        self.current = self._start()
        self.identify(vm)

    def die(self, *, in_order: bool = False) -> None:
        if in_order:
            self.current.state.write_stop()
        self.current.close()

    def restart(
        self,
        seconds: int,
        boot_id: str = "first",
        vm: Vm | None = THIS_VM,
        *,
        in_order: bool = False,
    ) -> None:
        """End the agent, and start another one after so many seconds."""
        self.die(in_order=in_order)
        self.clock.go(seconds)
        self.boot(boot_id, vm)

    def routes(self, *sinks: str, **values: Any) -> None:
        kinds = {sink: SinkConfig(slack=Slack(url=Secret("https://chat"))) for sink in sinks}
        self.config = Config(sinks=kinds, routes=(Route(sinks=sinks, **values),))
        self.current.config = self.config

    def sees(self, *items: Any, dated: bool = True, after: float = 1.0) -> None:
        """Handle a new document that lists these events, with or without a ``Date``."""
        self.clock.go(after)
        self._incarnation += 1
        self._last = body(*items, incarnation=self._incarnation)
        date = ""
        if dated:
            date = self.clock.date
        self.current.tracker.handle(Poll(0.0, 0.01, body=self._last, date=date))

    def sees_each(self, *documents: list[Any]) -> None:
        """Handle one new document after the other, one a second."""
        for items in documents:
            self.sees(*items)

    def sees_again(self) -> None:
        """Handle the last document again, as a new connection brings it."""
        self.clock.go(1)
        self.current.tracker.handle(Poll(0.0, 0.01, body=self._last, date=self.clock.date))

    def waits(self, seconds: int, poll: Poll | None) -> None:
        """Note each second that the agent runs, and handle a poll; ``None``: no poll ends."""
        for _ in range(seconds):
            self.clock.go(1)
            self.current.state.note_running()
            if poll is not None:
                self.current.tracker.handle(replace(poll, date=self.clock.date))

    @property
    def incarnation(self) -> int:
        """The DocumentIncarnation of the last document."""
        return self._incarnation

    def answers_missed(self, count: int) -> None:
        """Count up DocumentIncarnation for so many documents that no agent sees."""
        self._incarnation += count

    def records_of(self, event_id: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["azure.scheduled_event.id"] == event_id]

    def kinds(self, event_id: str = ID) -> list[str]:
        """The kinds of the changes of an event."""
        return [record["azure.scheduled_event.change"] for record in self.records_of(event_id)]

    def last(self, *names: str, event_id: str = ID) -> tuple[Any, ...]:
        """These fields of the last record of an event."""
        record = self.records_of(event_id)[-1]
        return tuple(record.get(f"azure.scheduled_event.{name}") for name in names)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path, SteppedClock())
    yield agents
    agents.die()


def lease(store: Store, *results: SendResult, **limits: int) -> Sequence[Delivery]:
    """Wait until everything is on disk; return the deliveries that a courier gets then."""
    assert store.disk.wait_written(PATIENCE)
    return store.exchange(results, limits)


def test_event_is_canceled_when_it_ends_soon_after_a_kill(agents: Agents) -> None:
    agents.sees_each([], [PEERS])
    agents.waits(100, UNCHANGED)
    agents.restart(3)
    agents.answers_missed(2)

    agents.sees()

    assert agents.last("change", "reason", event_id="other") == ("canceled", "gone_before_start")


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        pytest.param(
            Vm(name=ME, vm_id="A-1"), Vm(name="renamed", vm_id="a-1"), ["ended"], id="same id"
        ),
        pytest.param(Vm(name=ME, vm_id="A-1"), Vm(name=ME, vm_id="a-2"), [], id="another id"),
        pytest.param(
            Vm(name=ME), Vm(name=ME.lower(), vm_id="a-1"), ["ended"], id="same name, no id before"
        ),
        pytest.param(
            Vm(name=ME, vm_id="A-1"), Vm(name=PEER), [], id="another name, no id afterwards"
        ),
        pytest.param(None, Vm(name=ME), ["ended"], id="no identity before"),
    ],
)
def test_vm_is_recognized_by_its_id_or_else_its_name(
    tmp_path: Path, before: Vm | None, after: Vm, changes: list[str]
) -> None:
    agents = Agents(tmp_path / "state", SteppedClock(), before)
    agents.sees()
    agents.waits(10, UNCHANGED)
    agents.sees(PEERS)
    agents.restart(60, "second", vm=after)
    reported = len(agents.records)

    agents.sees()
    agents.die()

    assert agents.changes[reported:] == changes


def boot_before_the_identity_is_known(agents: Agents) -> None:
    """Track two events as the VM 0-1, boot, and see a document that lists only another event."""
    agents.identify(Vm(name=ME, vm_id="0-1"))
    agents.sees_each([], [MINE_STARTED, PEERS])
    agents.restart(60, "second", vm=None, in_order=True)
    agents.sees()
    agents.waits(5, UNCHANGED)
    agents.die()
    agents.boot("second", vm=None)
    agents.sees(item("new", Resources=[PEER]))


def test_first_comparison_after_a_boot_waits_for_the_identity(agents: Agents) -> None:
    boot_before_the_identity_is_known(agents)

    assert agents.changes == ["started", "announced"]
    assert agents.current.snapshot.poll.answered is None


def test_events_end_when_the_vm_is_the_same_after_a_boot(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    boot_before_the_identity_is_known(agents)
    reported = len(agents.records)

    agents.identify(Vm(name=ME, vm_id="0-1"))
    agents.waits(1, UNCHANGED)

    assert agents.changes[reported:] == ["announced", "finished", "ended"]
    assert "this disk was another VM's" not in caplog.text

    ids = [record["azure.scheduled_event.change_id"] for record in agents.records]
    assert len(set(ids)) == len(ids)


def test_events_of_another_vm_are_forgotten_after_a_boot(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    boot_before_the_identity_is_known(agents)
    reported = len(agents.records)

    agents.identify(Vm(name=ME, vm_id="0-7"))
    agents.waits(1, UNCHANGED)

    assert agents.changes[reported:] == ["announced"]
    assert "this disk was another VM's" in caplog.text


def test_first_comparison_waits_at_most_ten_seconds_for_the_name(agents: Agents) -> None:
    agents.sees_each([], [MINE, PEERS])
    agents.restart(60, "second", vm=None)
    reported = len(agents.records)
    agents.sees({**MINE, "Description": "another"})
    agents.waits(9, UNCHANGED)

    assert len(agents.records) == reported

    agents.waits(1, UNCHANGED)

    assert agents.last("change", "scope") == ("updated", "unknown")
    assert agents.last("change", "reason", event_id="other") == ("ended", "machine_rebooted")


def test_state_is_kept_when_imds_never_names_the_vm(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    for boot in ("second", "third"):
        agents.restart(60, boot, vm=None)
        agents.sees(PEERS)
        agents.waits(10, UNCHANGED)
        agents.sees(PEERS, MINE_STARTED)

    assert agents.changes == ["announced", "started", "finished", "started"]
    assert agents.last("reason") == ("came_back",)
    assert "another VM's" not in caplog.text


def test_interruption_by_a_reboot_ends_when_the_agent_runs_again(agents: Agents) -> None:
    agents.sees_each([], [MINE], [MINE_STARTED])
    agents.waits(5, UNCHANGED)
    agents.waits(5, REFUSED)
    agents.restart(40, "second")
    agents.waits(300, REFUSED)

    agents.sees()

    assert agents.last("reason", "outcome") == ("machine_rebooted", "finished")
    assert agents.last("interruption_seconds") == (40.0,)


@pytest.mark.parametrize(
    ("in_order", "interruption"),
    [pytest.param(True, 40.0, id="stopped"), pytest.param(False, None, id="killed")],
)
def test_interruption_by_a_reboot_is_known_after_an_orderly_stop(
    agents: Agents, interruption: float | None, *, in_order: bool
) -> None:
    agents.sees_each([], [MINE])
    agents.waits(2, UNCHANGED)
    agents.restart(40, "second", in_order=in_order)

    agents.sees_each([MINE_STARTED], [])

    assert agents.last("change", "interruption_seconds") == ("finished", interruption)


def test_interruption_is_unknown_after_two_boots_without_an_answer(agents: Agents) -> None:
    agents.sees_each([], [MINE], [MINE_STARTED])
    agents.waits(5, UNCHANGED)
    for boot in ("second", "third"):
        agents.restart(40, boot)
        agents.waits(1, REFUSED)

    agents.sees()

    assert agents.last("reason", "outcome") == ("machine_rebooted", "finished")
    assert agents.last("interruption_seconds") == (None,)


@pytest.mark.parametrize(
    ("seconds", "in_order", "uptime", "outcome"),
    [
        # the machine went down at some time before the boot
        pytest.param(2, False, 5.0, "finished", id="booted after NotBefore"),
        pytest.param(2, False, 60.0, "unknown", id="booted before NotBefore"),
        pytest.param(2, True, 5.0, "unknown", id="stopped before NotBefore"),
        pytest.param(4, True, 5.0, "finished", id="stopped after NotBefore"),
    ],
)
def test_reboot_finishes_an_event_that_was_due_before_it(
    agents: Agents, seconds: int, uptime: float, outcome: str, *, in_order: bool
) -> None:
    agents.sees()
    agents.clock.go(895)
    agents.sees(MINE)  # three seconds before its NotBefore
    agents.waits(seconds, UNCHANGED)
    agents.die(in_order=in_order)
    agents.clock.go(40)
    agents.clock.booted = uptime
    agents.boot("second")

    agents.sees()

    assert agents.last("change", "reason", "outcome") == ("ended", "machine_rebooted", outcome)


def test_reminder_is_removed_when_the_event_is_another_vms(agents: Agents) -> None:
    agents.restart(0, "second", vm=None)
    agents.routes("chat", remind_before=(Duration("5m"),))
    agents.sees(MINE)
    agents.waits(10, UNCHANGED)

    agents.identify(Vm(name=PEER))
    agents.clock.go(15 * 60 - 120)  # the reminder would be due
    (announced,) = lease(agents.current.store, chat=9)
    remaining = lease(agents.current.store, SendResult(announced.delivery_id, "accepted"), chat=9)

    assert announced.kind == "announced"
    assert remaining == []


def test_scope_that_the_identity_changes_is_no_change_of_the_event(agents: Agents) -> None:
    agents.restart(0, "second", vm=None)
    agents.sees(MINE)
    agents.waits(10, UNCHANGED)

    agents.identify(Vm(name=PEER))

    assert agents.changes == ["announced"]

    agents.sees({**MINE, "Description": "other"})

    assert agents.last("change", "scope", "previous_scope") == ("updated", "peer", None)


def test_incident_is_closed_when_its_event_is_another_vms(agents: Agents) -> None:
    agents.restart(0, "second", vm=None)
    agents.routes("pager")
    agents.sees(MINE)
    agents.waits(10, UNCHANGED)
    (announced,) = lease(agents.current.store, pager=9)
    lease(agents.current.store, SendResult(announced.delivery_id, "accepted", thread="incident"))
    agents.identify(Vm(name=PEER))

    agents.sees()

    (end,) = lease(agents.current.store, pager=9)
    assert end.kind == "canceled"
    assert end.thread == "incident"


@pytest.mark.parametrize(
    "make_old",
    [
        lambda agents: agents.current.tracker.handle(REFUSED),
        lambda agents: agents.current.tracker.use("http://imds", "2019-08-01"),
        lambda agents: agents.clock.go(1, booted=0),
        lambda agents: agents.clock.go(0, booted=1),
    ],
    ids=["failed poll", "another version", "second of the wall clock", "second since the boot"],
)
def test_known_event_is_uncertain_until_imds_answers_again(
    agents: Agents, make_old: Callable[[Agents], None]
) -> None:
    agents.sees(MINE)
    agents.clock.go(15)

    assert agents.current.certain(ID.casefold())

    make_old(agents)

    assert not agents.current.certain(ID.casefold())

    agents.sees(MINE)

    assert agents.current.certain(ID.casefold())


# ---- a restart


def test_freeze_is_measured_after_a_restart_with_an_unchanged_list(agents: Agents) -> None:
    agents.clock.go(15 * 60 - 10)
    agents.sees_each([], [MINE])
    agents.restart(0)
    agents.sees_again()

    assert agents.current.freeze_meter.running

    # the clocks move in one step, because the thread that measures may wake between two
    agents.sees(MINE_STARTED, after=31)
    agents.sees()

    assert agents.last("change", "interruption_seconds") == ("finished", pytest.approx(30.9))


def test_freeze_meter_runs_from_shortly_before_an_event_until_it_ends(agents: Agents) -> None:
    agents.sees_each([], [PEERS, MINE])
    agents.waits(15 * 60 - 20, UNCHANGED)

    assert not agents.current.freeze_meter.running

    agents.waits(5, UNCHANGED)

    assert agents.current.freeze_meter.running

    agents.sees(PEERS, MINE_STARTED)

    assert agents.current.freeze_meter.running

    agents.sees(PEERS)

    assert not agents.current.freeze_meter.running


@pytest.mark.parametrize(
    ("booted", "wall_lag", "lag"),
    [
        pytest.param(30, 30.0, 30.0, id="both clocks run"),
        pytest.param(0, 30.0, 0.0, id="clock since boot stops"),
        pytest.param(30, 0.0, 30.0, id="wall clock stops"),
    ],
)
def test_interruption_of_an_early_start_is_the_delay_of_the_poll(
    agents: Agents, booted: float, wall_lag: float, lag: float
) -> None:
    agents.sees_each([], [MINE])

    # long before NotBefore, because another VM has approved it
    agents.clock.go(wall_lag or 0.01, booted=booted)
    document = body(MINE_STARTED, incarnation=9)
    agents.current.tracker.handle(
        Poll(lag, 0.01, body=document, date=agents.clock.date, wall_lag=wall_lag)
    )

    agents.sees()

    assert agents.last("change", "interruption_seconds") == ("finished", 30.0)


def test_unchanged_first_answer_is_written(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.restart(60, in_order=True)

    agents.sees_again()
    answered = agents.clock.now()
    agents.restart(40, "second")

    assert agents.current.snapshot.state.seen is not None
    assert agents.current.snapshot.state.seen.wall == answered


def test_interruption_is_unknown_when_a_later_agent_was_killed(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.restart(60, in_order=True)
    agents.sees_again()
    agents.restart(40, "second")

    agents.sees_each([MINE_STARTED], [])

    assert agents.last("change", "interruption_seconds") == ("finished", None)


# ---- figures and log lines


def test_poll_is_counted_once_by_its_result(agents: Agents) -> None:
    agents.sees(MINE)
    agents.current.tracker.handle(Poll(0.25, 0.02))
    agents.current.tracker.handle(Poll(0.5, 2.0, error=ImdsError("refused", "no")))

    figures = agents.current.snapshot.poll.figures
    counts = {result: count for result, count in figures.results.items() if count}
    assert counts == {"changed": 1, "unchanged": 1, "refused": 1}
    assert figures.delay == 0.5  # of the last poll
    assert sum(figures.duration.counts) == 3
    assert figures.duration.sum == pytest.approx(2.03)


FLAWED = {**MINE, "NotBefore": "soon"}
UNREADABLE = {**MINE, "EventId": "broken", "EventType": 7}


def test_unreadable_events_are_counted_once_a_document(agents: Agents) -> None:
    agents.sees(FLAWED, UNREADABLE, {"EventType": "Freeze"})
    agents.waits(3, UNCHANGED)

    snapshot = agents.current.snapshot
    assert sum(snapshot.poll.figures.flaws.values()) == 3
    assert len(snapshot.poll.flaws) == 3
    assert snapshot.unreadable == 2
    assert agents.current.listed.flawed(ID.casefold())
    assert agents.current.listed.flawed("broken")

    agents.sees(FLAWED)

    assert sum(agents.current.snapshot.poll.figures.flaws.values()) == 4
    assert agents.current.snapshot.unreadable == 0


def test_unreadable_events_are_logged_once_a_document(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    agents.sees(FLAWED, UNREADABLE, {"EventType": "Freeze"})
    agents.waits(3, UNCHANGED)

    assert [message for message in caplog.messages if "cannot be read" in message] == [
        f"event {ID} cannot be read in full (not_before)",
        "event broken cannot be read (event_type): what was known of it is kept",
        "an event without a readable id cannot be read (event_id): what was known of it is kept",
    ]


def test_rejected_document_leaves_the_events_of_the_last_one(agents: Agents) -> None:
    agents.sees(FLAWED)

    agents.current.tracker.handle(Poll(0.0, 0.01, body=b"garbage"))

    assert agents.current.listed.flawed(ID.casefold())
    assert set(agents.current.listed.events) == {ID.casefold()}


def test_rejected_document_is_a_counted_failure_until_a_good_one(agents: Agents) -> None:
    agents.sees(MINE)

    agents.current.tracker.handle(Poll(0.0, 0.01, body=b"garbage"))

    assert agents.current.snapshot.poll.failure == "rejected"
    assert agents.current.snapshot.poll.figures.documents_rejected["not_json"] == 1

    agents.sees(MINE)

    assert agents.current.snapshot.poll.failure is None


def test_each_kind_of_failure_and_the_recovery_are_logged_once(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    refused = ImdsError("refused", "no")
    timeout = ImdsError("timeout", "slow")
    agents.sees()

    agents.waits(3, Poll(0.0, 0.01, error=refused))
    agents.waits(3, Poll(0.0, 0.01, error=timeout))
    agents.waits(3, UNCHANGED)

    assert [message for message in caplog.messages if "IMDS" in message] == [
        f"IMDS: {refused}; the agent asks again, and keeps the last known state",
        f"IMDS: {timeout}; the agent asks again, and keeps the last known state",
        "IMDS answers again",
    ]


# ---- the identity of this VM


def test_name_from_imds_replaces_the_configured_name(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    agents.sees(MINE, PEERS)
    agents.current.config = Config(vm=VmName(PEER))
    agents.current.state.identify(None, agents.current.snapshot.state.tracked)

    agents.identify(None)

    assert agents.current.snapshot.vm == Vm(name=PEER)
    assert [event.scope for event in agents.current.listed.events.values()] == ["peer", "self"]

    agents.identify(Vm(name=ME, location="westeurope"))

    assert agents.current.snapshot.vm == Vm(name=ME, location="westeurope")
    assert [event.scope for event in agents.current.listed.events.values()] == ["self", "peer"]

    names = [message for message in caplog.messages if message.startswith("this VM is")]
    assert names == [f"this VM is {PEER}", f"this VM is {ME}"]


def test_peer_event_keeps_its_repetitions_when_this_vm_is_renamed(agents: Agents) -> None:
    agents.routes("chat", announce_by="all")
    agents.sees(PEERS)
    (announced,) = lease(agents.current.store, chat=1)
    lease(agents.current.store, SendResult(announced.delivery_id, "accepted", repeat=60))

    agents.identify(Vm(name="WestNO_7"))

    assert [row.state for row in rows_of(agents.current.store)] == ["repeating"]


# ---- listeners


def test_listeners_are_called_once_for_each_change(agents: Agents) -> None:
    agents.sees()

    assert agents.current.changes == 0

    agents.sees(MINE)
    agents.sees(MINE, item("second"))
    agents.waits(2, UNCHANGED)

    assert agents.current.changes == 2
    assert agents.current.deliveries == 0  # no route has a sink


def test_deliveries_are_reported_at_once_and_when_they_are_on_disk(agents: Agents) -> None:
    agents.sees()
    agents.routes("chat")
    with LockedDisk(agents.current.store) as disk:
        agents.sees(MINE)
        agents.waits(2, UNCHANGED)

        assert agents.current.deliveries == 1

        disk.heal()

    assert agents.current.deliveries == 2


def test_answer_and_its_state_are_published_without_the_disk(agents: Agents) -> None:
    with LockedDisk(agents.current.store):
        agents.sees(MINE)

        assert agents.current.snapshot.poll.answered is not None
        assert set(agents.current.snapshot.state.tracked.events) == {ID.casefold()}


def test_two_threads_write_each_record_once(agents: Agents) -> None:
    agents.sees(MINE)
    tracked = agents.current.listed.events[ID.casefold()]

    def approve(number: int) -> None:
        event = replace(tracked.event, event_id=f"e-{number}")
        attempt = ApprovalAttempt(replace(tracked, event=event), "rule")
        change = attempt.change(
            "approved", "accepted", "", at=agents.clock.read(), vm=ME, incarnation=7
        )
        agents.current.state.write_attempt(attempt, change)

    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(approve, number) for number in range(30)]
        for number in range(20):
            agents.sees(MINE, item(f"other-{number}", Resources=[PEER]))
        for write in writes:
            write.result(PATIENCE)

    change_ids = [record["azure.scheduled_event.change_id"] for record in agents.records]
    assert len(change_ids) == 1 + 30 + 20 + 19
    assert len(set(change_ids)) == len(change_ids)

    totals = agents.current.snapshot.state.totals
    scopes = [record["azure.scheduled_event.scope"] for record in agents.records]
    assert sum(totals.changes.values()) + sum(totals.approvals.values()) == 1 + 30
    assert len(scopes) - scopes.count("peer") == 1 + 30

    agents.restart(0)

    history = agents.current.store.history(None, 1_000).records
    history_ids = [json.loads(line)["azure.scheduled_event.change_id"] for line in history]
    assert sorted(history_ids) == sorted(change_ids)
    assert agents.current.snapshot.state.totals == totals
    assert len(agents.current.snapshot.state.approvals) == 30


def test_unchanged_answer_after_a_restart_reports_nothing(agents: Agents) -> None:
    agents.sees(MINE_STARTED)
    agents.restart(0)

    agents.waits(1, UNCHANGED)

    assert agents.current.snapshot.poll.failure is None
    assert list(agents.current.snapshot.state.tracked.events) == [ID.casefold()]


# ---- nothing is reported that was not observed


@pytest.fixture(params=["EventStatus", "EventId"])
def unreadable_agents(agents: Agents, request: pytest.FixtureRequest) -> Agents:
    """An agent for which this VM's event is unreadable until after its NotBefore."""
    agents.sees()
    agents.clock.go(15 * 60 - 12)
    agents.sees(MINE)  # eight seconds before its NotBefore
    agents.sees({**MINE, request.param: 7})
    agents.waits(20, UNCHANGED)
    return agents


def test_event_that_was_unreadable_ends_as_unknown(unreadable_agents: Agents) -> None:
    unreadable_agents.sees()

    assert unreadable_agents.last("change", "reason") == ("ended", "not_readable")
    assert unreadable_agents.last("outcome") == ("unknown",)


def test_unreadable_event_is_not_written_at_each_answer(unreadable_agents: Agents) -> None:
    tracked = unreadable_agents.current.snapshot.state.tracked

    unreadable_agents.waits(4, UNCHANGED)

    assert unreadable_agents.current.snapshot.state.tracked is tracked


@pytest.mark.parametrize(
    ("count", "scope", "truncated"), [(2_000, "self", None), (2_001, "unknown", ["resources"])]
)
def test_scope_is_unknown_when_the_list_of_resources_is_too_long(
    agents: Agents, count: int, scope: str, truncated: list[str] | None
) -> None:
    names = [f"vm_{number}" for number in range(count - 1)]

    agents.sees_each([], [{**MINE, "Resources": [*names, ME]}])

    assert agents.last("change", "scope") == ("announced", scope)
    assert agents.records[-1].get("notbefore.truncated") == truncated


def test_not_before_of_a_started_event_changes_no_notice(agents: Agents) -> None:
    agents.sees_each(
        [],
        [{**MINE, "NotBefore": "Sun, 01 Mar 2026 12:00:32 GMT"}],
        [{**MINE_STARTED, "NotBefore": "Sun, 01 Mar 2026 11:00:00 GMT"}],
    )

    assert agents.last("change", "notice_seconds") == ("started", 30.0)


def test_missed_polls_are_counted_by_the_interval(agents: Agents) -> None:
    agents.current.tracker.use("http://imds", "2020-07-01", 2.0)
    agents.sees_each([], [{**PEERS, "NotBefore": None}])
    agents.clock.go(7)
    agents.answers_missed(2)

    agents.sees()

    assert agents.last("change", "reason", event_id="other") == ("canceled", "gone_before_start")


def test_moved_disk_is_noticed_after_a_boot_without_an_answer(agents: Agents) -> None:
    agents.identify(Vm(name=ME, vm_id="0-1"))
    agents.sees_each([], [MINE])
    agents.die()
    agents.boot("second", vm=Vm(name=PEER, vm_id="0-2"))  # it is killed before the first answer
    agents.restart(0, "third", vm=None)
    reported = len(agents.records)
    agents.sees(MINE_STARTED)

    agents.waits(10, UNCHANGED)

    assert agents.last("change", "reason") == ("started", "first_seen_started")
    assert agents.last("notice_seconds") == (None,)
    assert len(agents.records) == reported + 1


@pytest.mark.parametrize("years", [-2, 2])
def test_date_that_is_years_off_gives_no_notice_and_is_logged_once(
    agents: Agents, caplog: pytest.LogCaptureFixture, years: int
) -> None:
    agents.clock.true += timedelta(days=365 * years)
    agents.sees_each([], [MINE], [MINE_STARTED])
    agents.waits(5, UNCHANGED)

    agents.sees()

    notices = {record.get("azure.scheduled_event.notice_seconds") for record in agents.records}
    assert notices == {None}
    assert agents.last("started_seconds") == (6.0,)  # the other two clocks agree
    assert caplog.text.count("is not believed") == 1


def test_date_is_believed_when_the_wall_clock_was_set_by_years(agents: Agents) -> None:
    agents.sees()

    agents.clock.wall -= timedelta(days=800)
    agents.sees(MINE)

    assert agents.last("change", "notice_seconds") == ("announced", 898.0)

    agents.sees(MINE_STARTED)

    (tracked,) = agents.current.snapshot.state.tracked.events.values()
    assert tracked.started == agents.clock.true
    assert agents.current.state.now() == agents.clock.true


OLD = {
    key: value
    for key, value in MINE.items()
    if key not in ("Description", "EventSource", "DurationInSeconds")
}


def test_another_api_version_does_not_update_the_event(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.current.tracker.use("http://imds", "2017-11-01")
    agents.sees(OLD)
    agents.current.tracker.use("http://imds", "2020-07-01")
    agents.sees(MINE)

    assert agents.kinds() == ["announced"]
    assert agents.current.listed.events[ID.casefold()].event.event_source == "Platform"

    agents.current.tracker.use("http://imds", "2017-11-01")
    agents.sees({**OLD, "Resources": [ME, PEER]})

    assert agents.kinds() == ["announced", "updated"]

    agents.sees()

    assert agents.kinds() == ["announced", "updated", "canceled"]


def test_event_that_another_endpoint_does_not_list_is_not_canceled(agents: Agents) -> None:
    agents.sees_each([], [MINE, PEERS])
    agents.current.tracker.use("http://elsewhere", "2020-07-01")

    agents.sees()

    assert not agents.current.certain(ID.casefold())  # so it is not approved

    agents.current.tracker.use("http://imds", "2020-07-01")
    agents.sees_each([MINE], [MINE])

    assert agents.kinds() == ["announced"]
    assert agents.last("change", "outcome", event_id="other") == ("ended", "unknown")


# ---- an interruption that was not measured is unknown


FAILED = Poll(0.0, 0.01, error=ImdsError("server_error", "HTTP 500"))


def finish(agents: Agents) -> Any:
    """End the event; return the interruption that is reported."""
    agents.sees()
    (interruption,) = agents.last("interruption_seconds")
    return interruption


@pytest.mark.parametrize("reason", ["server_error", "timeout"])
@pytest.mark.parametrize("items", [[MINE], []], ids=["listed before", "not listed before"])
def test_lateness_of_a_failed_poll_is_an_interruption(
    agents: Agents, reason: Any, items: list[Any]
) -> None:
    agents.sees_each([], items)
    agents.clock.go(7)
    agents.current.tracker.handle(Poll(6.0, 0.01, error=ImdsError(reason, "no"), wall_lag=6.0))

    agents.sees(MINE_STARTED)

    assert finish(agents) == 6.0


def test_rejected_document_keeps_the_lateness_of_its_poll(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.clock.go(7)
    agents.current.tracker.handle(Poll(6.0, 0.01, body=b"<html>", wall_lag=6.0))

    agents.sees(MINE_STARTED)

    assert finish(agents) == 6.0


def asked_before(agents: Agents, seconds: float, items: list[Any], *, booted: float) -> Poll:
    """Return a poll whose request took ``seconds``, or ``booted`` seconds since the boot."""
    agents.clock.go(1)
    asked = agents.clock.read()
    date = agents.clock.date
    agents.clock.go(seconds, booted=booted)
    agents.answers_missed(1)
    document = body(*items, incarnation=agents.incarnation)
    return Poll(0.0, booted, body=document, date=date, asked=asked)


@pytest.mark.parametrize("booted", [6.0, 0.01], ids=["both clocks run", "clock since boot stops"])
def test_freeze_within_a_request_is_unknown(agents: Agents, booted: float) -> None:
    agents.sees_each([], [MINE])

    agents.current.tracker.handle(asked_before(agents, 6.0, [MINE_STARTED], booted=booted))

    assert finish(agents) is None


def test_freeze_within_the_request_before_the_start_is_unknown(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    slow = asked_before(agents, 6.0, [MINE], booted=6.0)
    agents.current.tracker.handle(slow)
    agents.clock.go(1)
    started = body(MINE_STARTED, incarnation=99)

    agents.current.tracker.handle(Poll(0.0, 0.01, started, date=agents.clock.date, busy=6.0))

    assert finish(agents) is None


def test_freeze_within_a_failed_request_is_unknown(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.waits(1, FAILED)
    agents.clock.go(6)
    agents.waits(1, replace(FAILED, busy=6.0))

    agents.sees(MINE_STARTED)

    assert finish(agents) is None


def test_metered_freeze_within_the_request_before_the_start_counts(agents: Agents) -> None:
    agents.clock.go(15 * 60 - 10)
    agents.sees_each([], [MINE])
    agents.current.tracker.handle(asked_before(agents, 6.0, [MINE], booted=6.0))

    agents.sees(MINE_STARTED)

    # for the meter, the second before the request is a part of the freeze
    assert 5.8 < finish(agents) < 7.0


@pytest.mark.parametrize(
    ("dated", "expected"),
    [pytest.param(True, pytest.approx(0.9), id="dated"), pytest.param(False, None, id="undated")],
)
def test_wall_clock_set_forward_and_back_is_no_interruption(
    agents: Agents, expected: Any, *, dated: bool
) -> None:
    agents.clock.go(15 * 60 - 10)
    agents.sees_each([], [MINE])
    agents.sees(MINE_STARTED, dated=dated)
    agents.clock.wall += timedelta(seconds=100)
    eventually(lambda: agents.current.freeze_meter._wall == agents.clock.time())
    agents.clock.wall -= timedelta(seconds=100)

    agents.sees(MINE_STARTED, dated=dated)

    assert finish(agents) == expected


def test_event_that_vanishes_in_a_pause_is_not_canceled(agents: Agents) -> None:
    agents.sees(dated=False)
    agents.sees(PEERS, dated=False)
    paused = asked_before(agents, 3600.0, [PEERS], booted=3600.0)
    agents.current.tracker.handle(replace(paused, date=""))

    agents.sees(dated=False)

    assert agents.last("change", "outcome", event_id="other") == ("ended", "unknown")


def test_started_event_that_was_another_vms_has_no_interruption(agents: Agents) -> None:
    agents.identify(Vm(name=PEER))
    agents.sees_each([], [MINE], [MINE_STARTED])
    agents.clock.go(9)
    agents.waits(1, replace(UNCHANGED, lag=9.0, wall_lag=9.0))
    agents.identify(Vm(name=ME))

    agents.waits(1, UNCHANGED)

    assert finish(agents) is None


# ---- a restart with another api-version


def restart_with(agents: Agents, version: str) -> None:
    """Restart the agent, which then asks in this api-version."""
    agents.restart(1)
    agents.current.tracker.use("http://imds", version)


@pytest.mark.parametrize(
    ("first", "second", "before", "after"),
    [("2020-07-01", "2017-11-01", MINE, OLD), ("2017-11-01", "2020-07-01", OLD, MINE)],
    ids=["older", "newer"],
)
def test_restart_with_another_api_version_updates_nothing(
    agents: Agents, first: str, second: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    agents.current.tracker.use("http://imds", first)
    agents.sees_each([], [before])
    restart_with(agents, second)

    agents.sees_each([after], [after])

    assert agents.kinds() == ["announced"]

    agents.sees({**after, "Resources": [ME, PEER]})

    assert agents.kinds() == ["announced", "updated"]


def test_restart_reports_a_new_description_in_the_same_version(agents: Agents) -> None:
    agents.sees_each([], [{**MINE, "Description": ""}])
    restart_with(agents, "2020-07-01")

    agents.sees(MINE)

    assert agents.kinds() == ["announced", "updated"]


def test_event_that_an_older_version_leaves_out_is_not_canceled(agents: Agents) -> None:
    agents.sees_each([], [PEERS])
    restart_with(agents, "2017-08-01")

    agents.sees()

    assert agents.kinds("other") == ["announced"]

    agents.sees()

    assert agents.last("change", "outcome", event_id="other") == ("ended", "unknown")


EMPTY = Poll(0.0, 0.01, body=b"")


def answer_emptily(agents: Agents, times: int) -> None:
    """Handle so many empty bodies, one a second; only the first is a change."""
    polls = [EMPTY, *[UNCHANGED] * (times - 1)]
    for poll in polls:
        agents.clock.go(1)
        agents.current.tracker.handle(poll)


def test_empty_body_is_a_failed_poll(agents: Agents) -> None:
    agents.sees(MINE)

    answer_emptily(agents, EMPTY_BODIES - 1)

    assert agents.current.snapshot.poll.failure == "rejected"
    assert agents.last("change") == ("announced",)


def test_third_empty_body_ends_a_scheduled_event_as_unknown(agents: Agents) -> None:
    agents.sees(MINE)

    answer_emptily(agents, EMPTY_BODIES)

    assert agents.last("change", "reason") == ("ended", "empty_answer")
    assert agents.last("outcome") == ("unknown",)


def test_third_empty_body_finishes_a_started_event(agents: Agents) -> None:
    agents.sees(MINE_STARTED)

    answer_emptily(agents, EMPTY_BODIES)

    assert agents.last("change") == ("finished",)


def test_agent_is_ready_after_enough_empty_bodies(agents: Agents) -> None:
    answer_emptily(agents, EMPTY_BODIES + 1)

    assert agents.current.snapshot.poll.failure is None
    assert agents.current.snapshot.poll.answered is not None


def test_failed_poll_interrupts_the_row_of_empty_bodies(agents: Agents) -> None:
    agents.sees(MINE)
    answer_emptily(agents, EMPTY_BODIES - 1)
    agents.current.tracker.handle(REFUSED)

    answer_emptily(agents, EMPTY_BODIES - 1)

    assert agents.last("change") == ("announced",)
