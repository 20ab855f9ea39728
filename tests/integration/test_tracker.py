"""``Tracker`` with a real state file, and clocks that a test sets: what is claimed of
which time.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from notbefore.agent.freeze import TICK
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
from support.azure import ID, ME, PEER, STARTED, body, item
from support.box import rows_of
from support.locked_disk import LockedDisk
from support.tracking import SteppedClock, Tracking

MINE = item(EventType="Reboot")
OTHERS = item("other", Resources=[PEER])
BEGUN = {**MINE, **STARTED}
REFUSED = Poll(0.0, 0.01, error=ImdsError("refused", "no"))
UNCHANGED = Poll(0.0, 0.01)
THIS_VM = Vm(name=ME)


class Agents:
    """One agent after the other on one machine and one state file."""

    def __init__(self, directory: Path, clock: SteppedClock, vm: Vm | None = THIS_VM) -> None:
        self.clock = clock
        self._earlier = list[dict[str, Any]]()
        self._directory = directory
        self._incarnation = 0
        self.config = Config()
        self.now = self._start()
        self.identify(vm)

    def _start(self) -> Tracking:
        return Tracking(self._directory, self.clock, self.config)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [*self._earlier, *self.now.records]

    def identify(self, vm: Vm | None) -> None:
        self.now.tracker.identify(vm)

    def boot(self, boot_id: str = "first", vm: Vm | None = THIS_VM) -> None:
        self.clock.boot_id = boot_id
        self._earlier += self.now.records
        self.now = self._start()
        self.identify(vm)

    def die(self, *, in_order: bool = False) -> None:
        if in_order:
            self.now.state.write_stop()
        self.now.close()

    def restart(
        self,
        seconds: int,
        boot_id: str = "first",
        vm: Vm | None = THIS_VM,
        *,
        in_order: bool = False,
    ) -> None:
        """The agent ends; so many seconds later there is another one."""
        self.die(in_order=in_order)
        self.clock.go(seconds)
        self.boot(boot_id, vm)

    def routes(self, *sinks: str, **values: Any) -> None:
        kinds = {sink: SinkConfig(slack=Slack(url=Secret("https://chat"))) for sink in sinks}
        self.config = self.now.config = Config(sinks=kinds, routes=(Route(sinks=sinks, **values),))

    def sees(self, *items: Any, dated: bool = True, after: float = 1.0) -> None:
        self.clock.go(after)
        self._incarnation += 1
        self._last = body(*items, incarnation=self._incarnation)
        self.now.tracker.handle(
            Poll(0.0, 0.01, body=self._last, date=self.clock.date if dated else "")
        )

    def sees_each(self, *documents: list[Any]) -> None:
        for items in documents:
            self.sees(*items)

    def sees_again(self) -> None:
        """The last document once more, as a new connection brings it."""
        self.clock.go(1)
        self.now.tracker.handle(Poll(0.0, 0.01, body=self._last, date=self.clock.date))

    def waits(self, seconds: int, poll: Poll | None) -> None:
        """Second after second, as the agent does: the beat, and a poll that ends so.

        ``None``: none ends.
        """
        for _ in range(seconds):
            self.clock.go(1)
            self.now.state.note_running()
            if poll is not None:
                self.now.tracker.handle(replace(poll, date=self.clock.date))

    @property
    def incarnation(self) -> int:
        """The DocumentIncarnation of the last document."""
        return self._incarnation

    def answers_missed(self, count: int) -> None:
        """So many steps of DocumentIncarnation that this VM does not see."""
        self._incarnation += count

    def kinds(self, event_id: str = ID) -> list[str]:
        """The changes of an event."""
        records = [
            record for record in self.records if record["azure.scheduled_event.id"] == event_id
        ]
        return [record["azure.scheduled_event.change"] for record in records]

    def last(self, *names: str, event_id: str = ID) -> tuple[Any, ...]:
        records = [
            record for record in self.records if record["azure.scheduled_event.id"] == event_id
        ]
        return tuple(records[-1].get(f"azure.scheduled_event.{name}") for name in names)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    clock = SteppedClock()
    agents = Agents(tmp_path, clock)
    yield agents
    agents.die()


def test_last_answer_is_known_after_a_kill_with_an_unchanged_list(
    agents: Agents,
) -> None:
    agents.sees_each([], [OTHERS])
    agents.waits(100, UNCHANGED)
    agents.restart(3)
    agents.answers_missed(2)

    agents.sees()

    assert agents.last("change", "reason", event_id="other") == ("canceled", "gone_before_start")


@pytest.mark.parametrize(
    ("before", "after", "own"),
    [
        (
            Vm(name=ME, vm_id="A-1"),
            Vm(name="renamed", vm_id="a-1"),
            True,
        ),  # the id decides, in whatever case
        (Vm(name=ME, vm_id="A-1"), Vm(name=ME, vm_id="a-2"), False),
        (Vm(name=ME), Vm(name=ME.lower(), vm_id="a-1"), True),  # without an id the name
        (Vm(name=ME, vm_id="A-1"), Vm(name=PEER), False),
        (None, Vm(name=ME), True),  # nothing says that it was another one's
    ],
)
def test_vm_is_recognized_by_its_id_or_else_its_name(
    tmp_path: Path, before: Vm | None, after: Vm, *, own: bool
) -> None:
    clock = SteppedClock()
    agents = Agents(tmp_path / "other", clock, before)
    agents.sees()
    agents.waits(10, UNCHANGED)
    agents.sees(OTHERS)
    agents.restart(60, "second", vm=after)
    reported = len(agents.records)
    agents.sees()

    agents.die()

    assert [record["azure.scheduled_event.change"] for record in agents.records[reported:]] == (
        ["ended"] if own else []
    )


@pytest.mark.parametrize(
    ("vm_id", "kinds"), [("0-1", ["announced", "finished", "ended"]), ("0-7", ["announced"])]
)
def test_first_comparison_after_a_boot_waits_for_the_identity_of_the_vm(
    agents: Agents, caplog: pytest.LogCaptureFixture, vm_id: str, kinds: list[str]
) -> None:
    agents.identify(Vm(name=ME, vm_id="0-1"))
    agents.sees_each([], [BEGUN, OTHERS])
    agents.restart(60, "second", vm=None, in_order=True)
    reported = len(agents.records)
    agents.sees()
    agents.waits(5, UNCHANGED)
    agents.die()
    agents.boot("second", vm=None)  # a restart forgets nothing of it
    agents.sees(item("new", Resources=[PEER]))  # nor does another document

    assert len(agents.records) == reported
    assert agents.now.snapshot.poll.answered is None

    agents.identify(Vm(name=ME, vm_id=vm_id))
    agents.waits(1, UNCHANGED)

    assert [record["azure.scheduled_event.change"] for record in agents.records[reported:]] == kinds
    assert ("this disk was another VM's" in caplog.text) == (vm_id != "0-1")

    ids = [record["azure.scheduled_event.change_id"] for record in agents.records]
    assert len(set(ids)) == len(ids)


def test_first_comparison_waits_at_most_ten_seconds_for_the_name(agents: Agents) -> None:
    agents.sees_each([], [MINE, OTHERS])
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
        agents.sees(OTHERS)
        agents.waits(10, UNCHANGED)
        agents.sees(OTHERS, BEGUN)

    assert [record["azure.scheduled_event.change"] for record in agents.records] == [
        "announced",
        "started",
        "finished",
        "started",
    ]
    assert agents.last("reason") == ("came_back",)
    assert "another VM's" not in caplog.text


def test_interruption_by_a_reboot_ends_with_the_first_beat(
    agents: Agents,
) -> None:
    agents.sees_each([], [MINE], [BEGUN])
    agents.waits(5, UNCHANGED)
    agents.waits(5, REFUSED)
    agents.restart(40, "second")
    agents.waits(300, REFUSED)

    agents.sees()

    assert agents.last("reason", "outcome", "interruption_seconds") == (
        "machine_rebooted",
        "finished",
        40.0,
    )


@pytest.mark.parametrize(("in_order", "interruption"), [(True, 40.0), (False, None)])
def test_interruption_by_a_reboot_is_known_when_the_agent_was_stopped_in_order(
    agents: Agents, interruption: float | None, *, in_order: bool
) -> None:
    agents.sees_each([], [MINE])
    agents.waits(2, UNCHANGED)
    agents.restart(40, "second", in_order=in_order)

    agents.sees_each([BEGUN], [])

    assert agents.last("change", "interruption_seconds") == ("finished", interruption)


def test_interruption_is_unknown_after_two_boots_without_an_answer(
    agents: Agents,
) -> None:
    agents.sees_each([], [MINE], [BEGUN])
    agents.waits(5, UNCHANGED)
    for boot in ("second", "third"):
        agents.restart(40, boot)
        agents.waits(1, REFUSED)

    agents.sees()

    assert agents.last("reason", "outcome", "interruption_seconds") == (
        "machine_rebooted",
        "finished",
        None,
    )


@pytest.mark.parametrize(
    ("seconds", "in_order", "uptime", "outcome"),
    [
        (
            2,
            False,
            5.0,
            "finished",
        ),  # it went down at some time before the boot, which was after NotBefore
        (2, False, 60.0, "unknown"),  # the boot was before NotBefore
        (2, True, 5.0, "unknown"),  # it was stopped before NotBefore
        (4, True, 5.0, "finished"),
    ],
)
def test_reboot_finishes_an_event_that_was_due_when_the_machine_went_down(
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


def test_reminder_is_removed_when_the_event_proves_to_be_another_vms(
    agents: Agents,
) -> None:
    agents.restart(0, "second", vm=None)
    agents.routes("chat", remind_before=(Duration("5m"),))
    agents.sees(MINE)
    agents.waits(10, UNCHANGED)
    agents.identify(Vm(name=PEER))

    assert [record["azure.scheduled_event.change"] for record in agents.records] == ["announced"]

    agents.clock.go(15 * 60 - 120)
    (announced,) = given(agents.now.store, chat=9)

    assert announced.kind == "announced"
    assert given(agents.now.store, SendResult(announced.delivery_id, "accepted"), chat=9) == []

    agents.sees({**MINE, "Description": "other"})
    assert agents.last("change", "scope", "previous_scope") == ("updated", "peer", None)


def test_incident_is_closed_when_its_event_proves_to_be_another_vms(agents: Agents) -> None:
    agents.restart(0, "second", vm=None)
    agents.routes("pager")
    agents.sees(MINE)
    agents.waits(10, UNCHANGED)
    (announced,) = given(agents.now.store, pager=9)
    given(agents.now.store, SendResult(announced.delivery_id, "accepted", thread="incident"))
    agents.identify(Vm(name=PEER))

    agents.sees()

    (end,) = given(agents.now.store, pager=9)

    assert end.kind == "canceled"
    assert end.thread == "incident"


def given(store: Store, *results: SendResult, **room: int) -> Sequence[Delivery]:
    """What a courier is given, once all that was known before is on disk."""
    assert store.disk.wait_written(20)
    return store.exchange(results, room)


@pytest.mark.parametrize(
    "make_old",
    [
        lambda agents: agents.now.tracker.handle(REFUSED),
        lambda agents: agents.now.tracker.use("http://imds", "2019-08-01"),
        lambda agents: agents.clock.go(1, booted=0),
        lambda agents: agents.clock.go(0, booted=1),
    ],
    ids=["trouble", "elsewhere", "wall", "booted"],
)
def test_known_event_is_uncertain_until_imds_has_answered_again(
    agents: Agents, make_old: Callable[[Agents], None]
) -> None:
    agents.sees(MINE)
    agents.clock.go(15)

    assert agents.now.certain(ID.casefold())

    make_old(agents)  # or one more second by any clock
    assert not agents.now.certain(ID.casefold())

    agents.sees(MINE)
    assert agents.now.certain(ID.casefold())


# ---- a restart


def test_freeze_is_measured_after_a_restart_with_an_unchanged_list(agents: Agents) -> None:
    agents.clock.go(15 * 60 - 10)
    agents.sees_each([], [MINE])
    agents.restart(0)
    agents.sees_again()

    assert agents.now.freeze_meter.running

    # a freeze in one step: between two of them the thread that measures may wake
    agents.sees(BEGUN, after=31)
    agents.sees()

    assert agents.last("change", "interruption_seconds") == ("finished", pytest.approx(30.9))


def test_freeze_meter_runs_from_shortly_before_an_event_until_it_ends(
    agents: Agents,
) -> None:
    agents.sees_each([], [OTHERS, MINE])
    agents.waits(15 * 60 - 20, UNCHANGED)

    assert not agents.now.freeze_meter.running

    agents.waits(5, UNCHANGED)
    assert agents.now.freeze_meter.running

    agents.sees(OTHERS, BEGUN)
    assert agents.now.freeze_meter.running

    agents.sees(OTHERS)
    assert not agents.now.freeze_meter.running


@pytest.mark.parametrize(
    ("booted", "wall_lag", "lag"), [(30, 30.0, 30.0), (0, 30.0, 0.0), (30, 0.0, 30.0)]
)
def test_interruption_of_an_early_start_is_the_lateness_of_the_beat(
    agents: Agents, booted: float, wall_lag: float, lag: float
) -> None:
    agents.sees_each([], [MINE])
    # approved by another VM, it starts long before NotBefore
    agents.clock.go(wall_lag or 0.01, booted=booted)
    document = body(BEGUN, incarnation=9)
    agents.now.tracker.handle(
        Poll(lag, 0.01, body=document, date=agents.clock.date, wall_lag=wall_lag)
    )

    agents.sees()

    assert agents.last("change", "interruption_seconds") == ("finished", 30.0)


def test_first_answer_is_written_when_nothing_changed(agents: Agents) -> None:
    """Else the agent that stopped in order would seem to be the last one that ran."""
    agents.sees_each([], [MINE])
    agents.restart(60, in_order=True)
    agents.sees_again()
    answered = agents.clock.now()
    agents.die()  # killed
    agents.clock.go(40)
    agents.boot("second")

    assert agents.now.snapshot.state.seen is not None
    assert agents.now.snapshot.state.seen.wall == answered

    agents.sees_each([BEGUN], [])
    assert agents.last("change", "interruption_seconds") == ("finished", None)


# ---- what is counted and logged


def test_poll_is_counted_once_by_its_result(agents: Agents) -> None:
    agents.sees(MINE)
    agents.now.tracker.handle(Poll(0.25, 0.02))

    assert agents.now.snapshot.poll.figures.delay == 0.25

    agents.now.tracker.handle(Poll(0.5, 2.0, error=ImdsError("refused", "no")))
    figures = agents.now.snapshot.poll.figures
    counted = {result: count for result, count in figures.results.items() if count}

    assert counted == {"changed": 1, "unchanged": 1, "refused": 1}
    assert figures.delay == 0.5
    assert sum(figures.duration.counts) == 3
    assert figures.duration.sum == pytest.approx(2.03)


FLAWED = {**MINE, "NotBefore": "soon"}
UNREADABLE = {**MINE, "EventId": "broken", "EventType": 7}


def test_unreadable_events_are_counted_and_logged_once_a_document(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    agents.sees(FLAWED, UNREADABLE, {"EventType": "Freeze"})
    agents.waits(3, UNCHANGED)
    known = agents.now.snapshot

    assert sum(known.poll.figures.flaws.values()) == 3
    assert len(known.poll.flaws) == 3
    assert known.unreadable == 2
    assert all(map(agents.now.listed.flawed, (ID.casefold(), "broken")))

    lines = [
        record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()
    ]
    assert len(lines) == 3
    assert lines == [
        f"event {ID} cannot be read in full (not_before)",
        "event broken cannot be read (event_type): what was known of it is kept",
        "an event without a readable id cannot be read (event_id): what was known of it is kept",
    ]

    agents.sees(FLAWED)
    assert sum(agents.now.snapshot.poll.figures.flaws.values()) == 4
    assert agents.now.snapshot.unreadable == 0


def test_rejected_document_leaves_the_events_of_the_last_one(agents: Agents) -> None:
    agents.sees(FLAWED)
    agents.now.tracker.handle(Poll(0.0, 0.01, body=b"garbage"))

    assert agents.now.listed.flawed(ID.casefold())
    assert set(agents.now.listed.events) == {ID.casefold()}
    assert agents.now.snapshot.poll.failure == "rejected"

    agents.sees(MINE)
    assert agents.now.snapshot.poll.failure is None
    assert agents.now.snapshot.poll.figures.documents_rejected["not_json"] == 1


def test_each_kind_of_failure_and_the_recovery_are_logged_once(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    agents.sees()
    agents.waits(3, REFUSED)
    agents.waits(3, Poll(0.0, 0.01, error=ImdsError("timeout", "slow")))

    assert agents.now.snapshot.poll.failure == "timeout"

    agents.waits(3, UNCHANGED)
    assert [record.getMessage() for record in caplog.records if "IMDS" in record.getMessage()] == [
        f"IMDS: {ImdsError('refused', 'no')}; the agent asks again, and keeps the last known state",
        (
            f"IMDS: {ImdsError('timeout', 'slow')}; the agent asks again, and keeps the last known"
            " state"
        ),
        "IMDS answers again",
    ]


# ---- who this VM is


def test_name_from_imds_replaces_the_configured_name(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    agents.sees(MINE, OTHERS)
    agents.now.config = Config(vm=VmName(PEER))
    agents.now.state.identify(None, agents.now.snapshot.state.tracked)
    agents.identify(None)

    assert agents.now.snapshot.vm == Vm(name=PEER)
    assert [event.scope for event in agents.now.listed.events.values()] == ["peer", "self"]

    agents.identify(Vm(name=ME, location="westeurope"))
    assert agents.now.snapshot.vm == Vm(name=ME, location="westeurope")
    assert [event.scope for event in agents.now.listed.events.values()] == ["self", "peer"]

    names = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("this VM is")
    ]
    assert names == [f"this VM is {PEER}", f"this VM is {ME}"]


def test_event_of_another_vm_keeps_its_repetitions_when_this_vm_is_renamed(agents: Agents) -> None:
    agents.routes("chat", announce_by="all")
    agents.sees(OTHERS)
    (one,) = given(agents.now.store, chat=1)
    given(agents.now.store, SendResult(one.delivery_id, "accepted", repeat=60))

    agents.identify(Vm(name="WestNO_7"))

    assert [row.state for row in rows_of(agents.now.store)] == ["repeating"]


# ---- who is called, and what is promised then


def test_listeners_are_called_after_a_change(agents: Agents) -> None:
    agents.sees()
    assert agents.now.changes == 0
    assert agents.now.deliveries == 0

    agents.sees(MINE)
    assert agents.now.changes == 1
    assert agents.now.deliveries == 0

    agents.routes("chat")
    with LockedDisk(agents.now.store) as disk:
        agents.sees(MINE, item("second"))
        assert agents.now.changes == 2
        assert agents.now.deliveries == 1

        agents.waits(2, UNCHANGED)
        assert agents.now.changes == 2
        assert agents.now.deliveries == 1

        disk.heal()

    assert agents.now.deliveries == 2  # once more: what waited for the disk


def test_answer_is_published_together_with_its_state(agents: Agents) -> None:
    """Whoever sees an answer may count on it that what it said is known.

    Nobody waits for the disk.
    """
    with LockedDisk(agents.now.store):
        agents.sees(MINE)

        assert agents.now.snapshot.poll.answered is not None
        assert set(agents.now.snapshot.state.tracked.events) == {ID.casefold()}


def test_two_threads_write_each_record_once(agents: Agents) -> None:
    agents.sees(MINE)
    one = agents.now.listed.events[ID.casefold()]

    def approve(number: int) -> None:
        event = msgspec.structs.replace(one.event, event_id=f"e-{number}")
        attempt = ApprovalAttempt(msgspec.structs.replace(one, event=event), "rule")
        change = attempt.change(
            "approved", "accepted", "", at=agents.clock.read(), vm=ME, incarnation=7
        )
        agents.now.state.write_attempt(attempt, change)

    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(approve, number) for number in range(30)]
        for number in range(20):
            agents.sees(MINE, item(f"other-{number}", Resources=[PEER]))
        for write in writes:
            write.result(20)
    change_ids = [record["azure.scheduled_event.change_id"] for record in agents.records]

    assert len(change_ids) == len(set(change_ids)) == 1 + 30 + 20 + 19

    totals = agents.now.snapshot.state.totals
    counted = [
        record for record in agents.records if record["azure.scheduled_event.scope"] != "peer"
    ]

    assert sum(totals.changes.values()) + sum(totals.approvals.values()) == len(counted) == 1 + 30

    agents.restart(0)
    assert agents.now.snapshot.state.totals == totals
    assert len(agents.now.snapshot.state.approvals) == 30

    written = agents.now.store.history(None, 1_000).records
    assert sorted(
        json.loads(line)["azure.scheduled_event.change_id"] for line in written
    ) == sorted(change_ids)


def test_unchanged_answer_after_a_restart_reports_nothing(agents: Agents) -> None:
    agents.sees(BEGUN)
    agents.restart(0)

    agents.waits(1, UNCHANGED)

    assert agents.now.snapshot.poll.failure is None
    assert list(agents.now.snapshot.state.tracked.events) == [ID.casefold()]


# ---- what must not be claimed


@pytest.mark.parametrize(
    "spoilt", [{**MINE, "EventStatus": 7}, {**MINE, "EventId": 7}], ids=["status", "id"]
)
def test_event_ends_as_unknown_when_it_was_unreadable_in_an_unchanged_answer(
    agents: Agents, spoilt: dict[str, Any]
) -> None:
    agents.sees()
    agents.clock.go(15 * 60 - 12)
    agents.sees(MINE)  # eight seconds before its NotBefore
    agents.sees(spoilt)
    agents.waits(20, UNCHANGED)
    tracked = agents.now.snapshot.state.tracked
    agents.waits(4, UNCHANGED)

    assert agents.now.snapshot.state.tracked is tracked  # nor is it written again and again

    agents.sees()
    assert agents.last("change", "reason", "outcome") == ("ended", "not_readable", "unknown")


@pytest.mark.parametrize(("listed", "scope"), [(2_001, "unknown"), (2_000, "self")])
def test_scope_is_unknown_when_the_vm_is_beyond_the_resources_that_are_read(
    agents: Agents, listed: int, scope: str
) -> None:
    agents.sees_each(
        [], [{**MINE, "Resources": [*(f"vm_{number}" for number in range(listed - 1)), ME]}]
    )

    assert agents.last("change", "scope") == ("announced", scope)
    assert agents.records[-1].get("notbefore.truncated") == (
        ["resources"] if scope == "unknown" else None
    )


def test_not_before_of_a_started_event_changes_no_notice(agents: Agents) -> None:
    agents.sees_each(
        [],
        [{**MINE, "NotBefore": "Sun, 01 Mar 2026 12:00:32 GMT"}],
        [{**BEGUN, "NotBefore": "Sun, 01 Mar 2026 11:00:00 GMT"}],
    )

    assert agents.last("change", "notice_seconds") == ("started", 30.0)


def test_missed_polls_are_counted_by_the_interval(agents: Agents) -> None:
    agents.now.tracker.use("http://imds", "2020-07-01", 2.0)
    agents.sees_each([], [{**OTHERS, "NotBefore": None}])
    agents.clock.go(7)
    agents.answers_missed(2)

    agents.sees()

    assert agents.last("change", "reason", event_id="other") == ("canceled", "gone_before_start")


def test_moved_disk_is_noticed_after_a_boot_without_an_answer(
    agents: Agents,
) -> None:
    agents.identify(Vm(name=ME, vm_id="0-1"))
    agents.sees_each([], [MINE])
    agents.die()
    # named, and killed before the first answer
    agents.boot("second", vm=Vm(name=PEER, vm_id="0-2"))
    agents.restart(0, "third", vm=None)
    reported = len(agents.records)
    agents.sees(BEGUN)

    agents.waits(10, UNCHANGED)

    assert agents.last("change", "reason", "notice_seconds") == (
        "started",
        "first_seen_started",
        None,
    )
    assert len(agents.records) == reported + 1


@pytest.mark.parametrize("years", [-2, 2])
def test_date_that_is_years_off_gives_no_notice_and_is_logged_once(
    agents: Agents, caplog: pytest.LogCaptureFixture, years: int
) -> None:
    agents.clock.true += timedelta(days=365 * years)
    agents.sees_each([], [MINE], [BEGUN])
    agents.waits(5, UNCHANGED)

    agents.sees()

    assert {record.get("azure.scheduled_event.notice_seconds") for record in agents.records} == {
        None
    }
    assert agents.last("started_seconds") == (6.0,)  # the other two clocks agree
    assert caplog.text.count("is not believed") == 1


def test_date_is_believed_when_the_wall_clock_was_set_by_years(agents: Agents) -> None:
    agents.sees()
    assert agents.now.state.now() == agents.clock.wall

    agents.clock.wall -= timedelta(days=800)
    agents.sees(MINE)

    assert agents.last("change", "notice_seconds") == ("announced", 898.0)

    agents.sees(BEGUN)
    (begun,) = agents.now.state.snapshot.state.tracked.events.values()

    assert agents.now.state.now() == begun.started == agents.clock.true


OLD = {
    key: value
    for key, value in MINE.items()
    if key not in ("Description", "EventSource", "DurationInSeconds")
}


def test_another_api_version_does_not_update_the_event(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.now.tracker.use("http://imds", "2017-11-01")
    agents.sees(OLD)
    agents.now.tracker.use("http://imds", "2020-07-01")
    agents.sees(MINE)

    assert agents.kinds() == ["announced"]
    assert agents.now.listed.events[ID.casefold()].event.event_source == "Platform"

    agents.now.tracker.use("http://imds", "2017-11-01")
    agents.sees({**OLD, "Resources": [ME, PEER]})

    assert agents.kinds() == ["announced", "updated"]

    agents.sees()
    assert agents.kinds() == ["announced", "updated", "canceled"]


def test_event_that_another_endpoint_does_not_list_is_not_canceled(agents: Agents) -> None:
    agents.sees_each([], [MINE, OTHERS])
    agents.now.tracker.use("http://elsewhere", "2020-07-01")
    agents.sees()

    assert not agents.now.certain(ID.casefold())  # so it is not approved either

    agents.now.tracker.use("http://imds", "2020-07-01")
    agents.sees_each([MINE], [MINE])

    assert agents.kinds() == ["announced"]
    assert agents.last("change", "outcome", event_id="other") == ("ended", "unknown")


# ---- what nothing measured is not reported as 0


FAILED = Poll(0.0, 0.01, error=ImdsError("server_error", "HTTP 500"))


def finish(agents: Agents) -> Any:
    """End the event; return the interruption that is reported."""
    agents.sees()
    (interruption,) = agents.last("interruption_seconds")
    return interruption


@pytest.mark.parametrize("reason", ["server_error", "timeout"])
@pytest.mark.parametrize("listed_before", [True, False])
def test_lateness_of_a_failed_poll_is_an_interruption(
    agents: Agents, reason: Any, *, listed_before: bool
) -> None:
    agents.sees_each([], [MINE] if listed_before else [])
    agents.clock.go(7)
    agents.now.tracker.handle(Poll(6.0, 0.01, error=ImdsError(reason, "no"), wall_lag=6.0))

    agents.sees(BEGUN)

    assert finish(agents) == 6.0


def test_rejected_document_keeps_the_lateness_of_its_poll(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.clock.go(7)
    agents.now.tracker.handle(Poll(6.0, 0.01, body=b"<html>", wall_lag=6.0))

    agents.sees(BEGUN)

    assert finish(agents) == 6.0


def asked_before(agents: Agents, seconds: float, items: list[Any], *, booted: float) -> Poll:
    """A poll whose request was under way for ``seconds``; ``booted``: on the clock since boot."""
    agents.clock.go(1)
    asked = agents.clock.read()
    date = agents.clock.date
    agents.clock.go(seconds, booted=booted)
    agents.answers_missed(1)
    document = body(*items, incarnation=agents.incarnation)
    return Poll(0.0, booted, body=document, date=date, asked=asked)


@pytest.mark.parametrize("booted", [6.0, 0.01])
def test_freeze_within_a_request_is_unknown(agents: Agents, booted: float) -> None:
    agents.sees_each([], [MINE])

    agents.now.tracker.handle(asked_before(agents, 6.0, [BEGUN], booted=booted))

    assert finish(agents) is None


def test_freeze_within_the_request_before_the_start_is_unknown(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    slow = asked_before(agents, 6.0, [MINE], booted=6.0)
    agents.now.tracker.handle(slow)
    agents.clock.go(1)
    started = body(BEGUN, incarnation=99)

    agents.now.tracker.handle(Poll(0.0, 0.01, started, date=agents.clock.date, busy=6.0))

    assert finish(agents) is None


def test_freeze_within_a_failed_request_is_unknown(agents: Agents) -> None:
    agents.sees_each([], [MINE])
    agents.waits(1, FAILED)
    agents.clock.go(6)
    agents.waits(1, replace(FAILED, busy=6.0))

    agents.sees(BEGUN)

    assert finish(agents) is None


def test_metered_freeze_within_the_request_before_the_start_counts(agents: Agents) -> None:
    agents.clock.go(15 * 60 - 10)
    agents.sees_each([], [MINE])
    agents.now.tracker.handle(asked_before(agents, 6.0, [MINE], booted=6.0))

    agents.sees(BEGUN)

    assert 5.8 < finish(agents) < 7.0  # the second before it stands still for the meter too


@pytest.mark.parametrize(("dated", "expected"), [(True, pytest.approx(0.9)), (False, None)])
def test_wall_clock_set_forth_and_back_is_no_interruption(
    agents: Agents, expected: Any, *, dated: bool
) -> None:
    agents.clock.go(15 * 60 - 10)
    agents.sees_each([], [MINE])
    agents.sees(BEGUN, dated=dated)
    agents.clock.wall += timedelta(seconds=100)
    time.sleep(5 * TICK)  # the meter wakes in this time, and sees the step
    agents.clock.wall -= timedelta(seconds=100)

    agents.sees(BEGUN, dated=dated)

    assert finish(agents) == expected


def test_event_that_vanishes_in_a_pause_is_not_canceled(agents: Agents) -> None:
    agents.sees(dated=False)
    agents.sees(OTHERS, dated=False)
    paused = asked_before(agents, 3600.0, [OTHERS], booted=3600.0)
    agents.now.tracker.handle(replace(paused, date=""))

    agents.sees(dated=False)

    assert agents.last("change", "outcome", event_id="other") == ("ended", "unknown")


def test_started_event_that_was_another_vms_has_no_interruption(agents: Agents) -> None:
    agents.identify(Vm(name=PEER))
    agents.sees_each([], [MINE], [BEGUN])
    agents.clock.go(9)
    agents.waits(1, replace(UNCHANGED, lag=9.0, wall_lag=9.0))
    agents.identify(Vm(name=ME))

    agents.waits(1, UNCHANGED)

    assert finish(agents) is None


# ---- a restart with another api-version


def restart_with(agents: Agents, version: str) -> None:
    agents.restart(1)
    agents.now.tracker.use("http://imds", version)


@pytest.mark.parametrize(
    ("first", "second", "before", "after"),
    [("2020-07-01", "2017-11-01", MINE, OLD), ("2017-11-01", "2020-07-01", OLD, MINE)],
    ids=["older", "newer"],
)
def test_restart_with_another_api_version_updates_nothing(
    agents: Agents, first: str, second: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    agents.now.tracker.use("http://imds", first)
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
    agents.sees_each([], [OTHERS])
    restart_with(agents, "2017-08-01")
    agents.sees()

    assert agents.kinds("other") == ["announced"]

    agents.sees()
    assert agents.last("change", "outcome", event_id="other") == ("ended", "unknown")


EMPTY = Poll(0.0, 0.01, body=b"")


def answer_emptily(agents: Agents, times: int) -> None:
    """IMDS answers with empty bodies, one a second."""
    for poll in [EMPTY, *[UNCHANGED] * (times - 1)]:
        agents.clock.go(1)
        agents.now.tracker.handle(poll)


def test_empty_body_is_a_failed_poll(agents: Agents) -> None:
    agents.sees(MINE)

    answer_emptily(agents, EMPTY_BODIES - 1)

    assert agents.now.snapshot.poll.failure == "rejected"
    assert agents.last("change") == ("announced",)


def test_third_empty_body_ends_a_scheduled_event_as_unknown(agents: Agents) -> None:
    agents.sees(MINE)

    answer_emptily(agents, EMPTY_BODIES)

    assert agents.last("change", "reason", "outcome") == ("ended", "empty_answer", "unknown")


def test_third_empty_body_finishes_a_started_event(agents: Agents) -> None:
    agents.sees(BEGUN)

    answer_emptily(agents, EMPTY_BODIES)

    assert agents.last("change") == ("finished",)


def test_agent_is_ready_when_imds_only_sends_empty_bodies(agents: Agents) -> None:
    answer_emptily(agents, EMPTY_BODIES + 1)

    assert agents.now.snapshot.poll.failure is None
    assert agents.now.snapshot.poll.answered is not None


def test_failed_poll_interrupts_the_row_of_empty_bodies(agents: Agents) -> None:
    agents.sees(MINE)
    answer_emptily(agents, EMPTY_BODIES - 1)
    agents.now.tracker.handle(REFUSED)

    answer_emptily(agents, EMPTY_BODIES - 1)

    assert agents.last("change") == ("announced",)
