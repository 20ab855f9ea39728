"""A start request whose world changes in the very moment in which it is written down."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notbefore.agent.approval_log import ApprovalLog
from notbefore.agent.approver import SHORT_WAIT, Approver
from notbefore.agent.start_request import CHECK_INTERVAL, ApprovalSettings, StartRequest
from notbefore.agent.state import AgentState
from notbefore.agent.unforeseen import UnforeseenErrors
from notbefore.core.approval import (
    ApprovalAttempt,
    CommandRun,
    Policy,
    ReadinessCheck,
    Rule,
    RuleMatch,
    content_of,
    judge,
)
from notbefore.core.change import OPERATOR, Change
from notbefore.core.duration import Duration
from notbefore.core.record import Vm
from notbefore.core.routing import RANK_DELAY
from notbefore.errors import ImdsError
from notbefore.imds.client import TIMEOUT, ImdsClient
from notbefore.imds.poller import Poll
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import eventually
from support.azure import FUTURE, ID, ME, PEER, body, item
from support.tracking import Tracking

FREEZES = RuleMatch(event_type=("Freeze",))
ON = Policy(enabled=True, dry_run=False, rules=(Rule(FREEZES),))


def listed(**fields: Any) -> bytes:
    return body(item(**{"NotBefore": FUTURE, **fields}))


class World:
    """A tracker that knows of one event, an IMDS that counts, and what happens when something is written down."""

    def __init__(self, imds: Simulator, directory: Path) -> None:
        self.imds = imds
        self.clock = ShiftedClock()
        self.agent = Tracking(directory, self.clock)
        self.agent.tracker.identify(Vm(name=ME))
        self.approvals = WatchedLog(self.agent.state)
        self.policy, self.allowed, self.api_version, self.conflict = ON, True, "2020-07-01", ""
        self.stop = threading.Event()
        self.errors = UnforeseenErrors()
        self.sees(listed())

    def sees(self, document: bytes) -> None:
        self.imds.set_document(document)
        self.agent.tracker.handle(Poll(0.0, 0.0, document))

    def settings(self) -> ApprovalSettings:
        return ApprovalSettings(self.policy, self.imds.endpoint, self.api_version, self.allowed, self.conflict)

    def request(self, rule: str = "rules[0]", patience: float | None = None, **values: Any) -> StartRequest:
        """To approve the one event."""
        (tracked,) = self.approvals.listed().events.values()
        attempt = ApprovalAttempt(tracked, rule, **{"step": judge(self.policy, tracked, ME).step, **values})
        return StartRequest(self.approvals, self.settings, self.stop, attempt, patience)

    def send(self) -> str:
        """Send for the one event; the reason in the record of it, if there is one."""
        self.request().send()
        return self.reason

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The records of approvals."""
        return [one for one in self.agent.said if "approv" in one["azure.scheduled_event.change"]]

    @property
    def reason(self) -> str:
        return str(self.ends[-1]["azure.scheduled_event.reason"]) if self.ends else ""

    def approver(self) -> Approver:
        return Approver(self.approvals, self.settings, self.errors)


class ShiftedClock(Clock):
    """The real clocks, ``ahead`` by some seconds."""

    ahead = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead)

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def boot_time(self) -> float:
        return super().boot_time() + self.ahead


class WatchedLog(ApprovalLog):
    """Something happens right after the next thing is written down."""

    def __init__(self, state: AgentState) -> None:
        super().__init__(state)
        self.after_write: Callable[[], None] = lambda: None

    def write(self, attempt: ApprovalAttempt, change: Change | None = None) -> bool:
        written = super().write(attempt, change)
        act, self.after_write = self.after_write, lambda: None
        act()
        return written


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Simulator((ME, PEER)) as imds:
        found = World(imds, tmp_path)
        yield found
        found.agent.close()


def test_nothing_happens_meanwhile(world: World) -> None:
    assert world.send() == "accepted"
    assert world.imds.start_requests == [ID]
    (attempt,) = world.approvals.listed().attempts.values()
    assert attempt.approved == content_of(attempt.tracked)
    assert attempt.approved_by.startswith("rule rules[0] at 2")


def test_the_agent_is_stopped(world: World) -> None:
    world.approvals.after_write = world.stop.set
    assert world.send() == ""
    assert world.imds.start_requests == []
    (attempt,) = world.approvals.listed().attempts.values()
    # the next agent goes on from there
    assert (attempt.state, attempt.approved, attempt.requests) == ("checking", "", 0)


def test_approval_is_switched_off(world: World) -> None:
    world.approvals.after_write = lambda: setattr(world, "policy", msgspec.structs.replace(ON, enabled=False))
    assert world.send() == "switched_off"
    assert world.imds.start_requests == []


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (listed(EventType="Terminate", Resources=[ME, PEER]), "changed"),
        (listed(EventStatus="Started", NotBefore=""), "no_longer_scheduled"),
        (body(), "no_longer_scheduled"),
        (listed(Resources=[ME, None]), "changed"),
    ],
)
def test_the_event_becomes_another(world: World, document: bytes, reason: str) -> None:
    world.approvals.after_write = lambda: world.sees(document)
    assert world.send() == reason
    assert world.imds.start_requests == []


@pytest.mark.parametrize(
    "document",
    [
        listed(EventType="Terminate", Resources=[ME, PEER]),
        listed(DurationInSeconds=6),
        listed(EventStatus="Started", NotBefore=""),
        listed(Description=5),
        listed(ResourceType=7),  # the same in all that counts, and flawed
        listed(EventId="other"),  # the same content, and another event
        body(),
        b"<html>",
    ],
)
def test_imds_is_asked_once_more_right_before_the_request(
    world: World, document: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The tracker has not seen yet what IMDS says now: its poll hangs, say."""
    world.imds.set_document(document)
    asked = world.imds.requests

    def end_soon() -> None:
        eventually(lambda: world.imds.requests >= asked + 2)  # asked again, and sent nothing
        world.stop.set()

    ending = threading.Thread(target=end_soon)
    ending.start()
    assert world.send() == ""
    ending.join()
    assert world.imds.start_requests == []
    assert (f"approval of {ID}: nothing was sent, because IMDS did not confirm the event: " in caplog.text) == (
        document == b"<html>"
    )


def test_what_imds_confirms_is_sent_once_it_answers(world: World) -> None:
    world.stop = stop = Waits()
    world.imds.fault("error", times=1)
    assert world.send() == "accepted"
    assert stop.waits == [CHECK_INTERVAL]
    assert world.imds.start_requests == [ID]
    assert world.ends[-1]["azure.scheduled_event.approval.requests"] == 1


def test_a_flaw_of_another_event_keeps_nothing_from_being_sent(world: World) -> None:
    nameless = item(NotBefore=FUTURE) | {"EventId": ""}
    world.imds.set_document(body(item(NotBefore=FUTURE), item("other", NotBefore="soon"), nameless))
    assert world.send() == "accepted"


def test_the_list_flaps(world: World) -> None:
    def flap() -> None:
        world.sees(body())
        world.sees(listed())

    world.approvals.after_write = flap
    assert world.send() == "accepted"
    assert world.imds.start_requests == [ID]


def test_after_each_change_the_second_waits_for_the_leader_anew(world: World) -> None:
    world.policy = Policy(enabled=True, dry_run=False, rules=(Rule("all", for_all_resources="leader"),))
    approver = world.approver()
    for number in range(3):
        world.sees(listed(Resources=[PEER, ME], DurationInSeconds=number))
        assert approver.decide() == pytest.approx(RANK_DELAY, abs=0.5)
        world.clock.ahead += RANK_DELAY - 1
        assert approver.decide() == pytest.approx(1, abs=0.5)
        world.clock.ahead += 60
    assert approver.decide() == SHORT_WAIT  # the leader has not approved it: this VM does


def test_imds_is_not_waited_for_beyond_not_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []
    post = ImdsClient.post

    def noted(client: ImdsClient, path: str, body: bytes, timeout: float) -> None:
        timeouts.append(timeout)
        post(client, path, body, timeout=timeout)

    monkeypatch.setattr(ImdsClient, "post", noted)
    soon = datetime.now(UTC) + timedelta(seconds=TIMEOUT - 2)
    world.sees(listed(NotBefore=format_datetime(soon, usegmt=True)))
    assert world.send() == "accepted"
    assert 1 <= timeouts[0] <= TIMEOUT - 2


class Waits(threading.Event):
    """``stop`` of a request that never waits; what it would have waited is kept, and may change the world."""

    def __init__(self, at_wait: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._at_wait = at_wait

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self._at_wait()
        return self.is_set()


@pytest.mark.parametrize(("asked", "waited"), [(None, 2.0), (0.0, 1.0), (7.0, 7.0), (600.0, 60.0)])
def test_what_imds_asks_for_is_waited(world: World, asked: float | None, waited: float) -> None:
    world.stop = stop = Waits()
    world.request(requests=2)._pause(ImdsError("throttled", retry_after=asked))
    assert stop.waits == [waited]


def test_pauses_grow_to_a_minute_and_the_first_failures_are_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.stop = stop = Waits()
    logged = []
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 59, 60, 61):
        caplog.clear()
        world.request(requests=count)._pause(ImdsError("timeout", "slow"))
        if caplog.records:
            assert f"approval of {ID}: timeout: slow; again in {stop.waits[-1]:g} s" in caplog.text
            logged.append(count)
    assert stop.waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert logged == [1, 2, 3, 4, 60]
    world.stop.set()
    world.request(requests=1)._pause(ImdsError("timeout", "slow"))
    assert not caplog.records  # whoever stops the agent needs no line for each request


def test_nobody_pauses_beyond_the_patience_of_the_operator(world: World) -> None:
    world.stop = stop = Waits()
    request = world.request(requests=6, patience=10.0)
    request._pause(ImdsError("timeout"))
    world.clock.ahead += 30
    request._pause(ImdsError("timeout"))
    assert stop.waits == [pytest.approx(10, abs=1), 0.0]


def test_it_is_sent_again_until_imds_takes_it(world: World) -> None:
    world.stop = stop = Waits()
    world.imds.fault("start-status", 500, times=3)
    assert world.send() == "accepted"
    assert stop.waits == [1, 2, 4]
    assert world.imds.start_requests == [ID]
    assert world.ends[-1]["azure.scheduled_event.approval.requests"] == 4


def test_while_it_is_sent_people_are_shown_that(world: World) -> None:
    shown: list[str] = []

    def look() -> None:
        listed = world.approvals.listed()
        (tracked,) = listed.events.values()
        preview = world.approver().preview(tracked, listed)
        shown.append(preview.state if preview is not None else "")

    world.stop = Waits(look)
    world.imds.fault("start-status", 500, times=1)
    assert world.send() == "accepted"
    look()
    assert shown == ["sending", "approved (accepted)"]


def test_what_imds_refuses_for_good_is_not_sent_again(world: World) -> None:
    world.stop = stop = Waits()
    world.imds.fault("start-status", 400, times=1)
    assert world.send() == "refused"
    assert stop.waits == []
    assert world.ends[-1]["azure.scheduled_event.change"] == "approval_failed"
    assert world.imds.start_requests == []


def test_where_imds_was_asked_and_never_answered_it_failed_and_says_with_what(world: World) -> None:
    world.stop = Waits(lambda: world.sees(body()))
    world.imds.fault("start-status", 500, times=1)
    assert world.send() == "no_answer"
    (end,) = world.ends
    assert end["azure.scheduled_event.change"] == "approval_failed"
    assert end["azure.scheduled_event.approval.detail"].startswith("it is gone; ")
    assert end["azure.scheduled_event.approval.requests"] == 1
    (attempt,) = world.approvals.listed().attempts.values()
    assert attempt.outcome == f"approval_failed (no_answer): {end['azure.scheduled_event.approval.detail']}"


def test_without_an_answer_of_imds_it_is_waited_for_one(world: World) -> None:
    def answer() -> None:
        if len(stop.waits) == 3:
            world.sees(listed())

    world.clock.ahead += 16  # what is known is old
    world.stop = stop = Waits(answer)
    assert world.send() == "accepted"
    assert stop.waits == [CHECK_INTERVAL] * 3


def test_an_event_that_could_not_be_read_is_not_approved_until_it_can_be(world: World) -> None:
    world.sees(body({"EventType": "Freeze"}))  # it may be this one: it has no id
    world.stop = stop = Waits(lambda: world.sees(listed()))
    assert world.send() == "accepted"
    assert stop.waits == [CHECK_INTERVAL]


def test_an_operator_is_not_kept_waiting_for_an_imds_that_is_silent(world: World) -> None:
    world.clock.ahead += 16
    world.stop = Waits(lambda: setattr(world.clock, "ahead", world.clock.ahead + 4))
    request = world.request(OPERATOR, patience=10.0, step="")
    request.send()
    assert world.reason == "no_answer"
    assert world.ends[-1]["azure.scheduled_event.approval.detail"] == "IMDS does not answer: nothing was sent"
    assert world.imds.start_requests == []


def test_an_operator_hears_what_imds_said_last(world: World) -> None:
    world.imds.fault("start-status", 500, times=100)
    world.stop = Waits(lambda: setattr(world.clock, "ahead", world.clock.ahead + 4))
    world.request(OPERATOR, patience=10.0, step="").send()
    assert world.reason == "no_answer"
    assert "500" in world.ends[-1]["azure.scheduled_event.approval.detail"]


def test_a_stopped_request_says_nothing(world: World) -> None:
    world.stop.set()
    assert world.send() == ""
    assert not world.approvals.listed().attempts


def test_a_request_under_way_is_cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notbefore.agent.start_request.TIMEOUT", 300.0)
    world.imds.fault("start-freeze", 60.0, times=1)
    request = world.request()
    request.abort()  # nothing is under way: without effect
    thread = threading.Thread(target=request.send)
    thread.start()
    eventually(lambda: request._client is not None and request._client._connection is not None)
    world.stop.set()
    request.abort()
    thread.join(20)
    assert not thread.is_alive()
    assert world.reason == ""


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"policy": msgspec.structs.replace(ON, dry_run=True)}, "switched_off", "approval.dry_run is true"),
        ({"policy": msgspec.structs.replace(ON, enabled=False)}, "switched_off", "approval.enabled is not true"),
        ({"allowed": False}, "switched_off", "`notbefore run` was started without --allow-approval"),
        ({"conflict": "two names"}, "switched_off", "two names"),
        (
            {"policy": msgspec.structs.replace(ON, rules=(Rule(FREEZES, action="leave"),))},
            "changed",
            "the rules say leave now: the rule says so",
        ),
        (
            {"policy": msgspec.structs.replace(ON, rules=(Rule(FREEZES, name="other"),))},
            "changed",
            "the rules say approve now: the rule says so",
        ),
    ],
)
def test_the_settings_are_looked_at_again_before_anything_is_sent(
    world: World, change: dict[str, Any], reason: str, words: str
) -> None:
    request = world.request()
    for name, value in change.items():
        setattr(world, name, value)
    request.send()
    assert world.reason == reason
    assert world.ends[-1]["azure.scheduled_event.approval.detail"] == words
    assert world.ends[-1]["azure.scheduled_event.change"] == "approval_skipped"
    assert world.imds.start_requests == []


@pytest.mark.parametrize(
    ("document", "reason", "words"),
    [
        (body(), "no_longer_scheduled", "it is gone"),
        (listed(EventStatus="Started", NotBefore=""), "no_longer_scheduled", "it is Started"),
        (listed(DurationInSeconds=9), "changed", "the event has changed"),
        (listed(EventSource=17), "changed", "the rules say leave now: a part of it could not be read"),
    ],
)
def test_the_event_is_looked_at_again_before_anything_is_sent(
    world: World, document: bytes, reason: str, words: str
) -> None:
    request = world.request()
    world.sees(document)
    request.send()
    assert (world.reason, world.ends[-1]["azure.scheduled_event.approval.detail"]) == (reason, words)


def test_what_an_operator_approves_needs_no_rule_and_must_be_readable(world: World) -> None:
    world.policy = msgspec.structs.replace(ON, rules=())
    world.request(OPERATOR, step="").send()
    assert world.reason == "accepted"
    world.sees(listed(EventId="second", ResourceType=7))
    world.request(OPERATOR, step="").send()
    assert (world.reason, world.imds.start_requests) == ("changed", [ID])
    assert world.ends[-1]["azure.scheduled_event.approval.detail"] == "a part of it could not be read"


def test_nothing_is_sent_at_not_before(world: World) -> None:
    soon = world.clock.now().replace(microsecond=0) + timedelta(seconds=10)
    world.sees(listed(NotBefore=format_datetime(soon, usegmt=True)))
    request = world.request()
    world.clock.now = lambda: soon  # type: ignore[method-assign]  # just then
    request.send()
    assert (world.reason, world.ends[-1]["azure.scheduled_event.approval.detail"]) == (
        "too_late",
        "NotBefore came first",
    )


def test_it_is_not_another_vms_turn(world: World) -> None:
    world.policy = Policy(enabled=True, dry_run=False, rules=(Rule(FREEZES, for_all_resources="leader"),))
    world.sees(listed(Resources=[PEER, ME]))
    world.request().send()
    assert (world.reason, world.ends[-1]["azure.scheduled_event.approval.detail"]) == (
        "changed",
        "it is another VM's turn now",
    )


def test_the_leader_of_another_vm_decides_once_this_one_has_another_name(world: World) -> None:
    rule = Rule(RuleMatch(event_type=("Freeze",), scope=("self", "peer")), for_all_resources="leader")
    world.policy = Policy(enabled=True, dry_run=False, rules=(rule,))
    world.sees(listed(Resources=[ME, PEER]))
    request = world.request()
    world.agent.tracker.identify(Vm(name="WestNO_9"))
    request.send()
    assert (world.reason, world.ends[-1]["azure.scheduled_event.approval.detail"]) == (
        "changed",
        "the rules say leave now: another VM decides for all of them",
    )


def test_where_writing_took_too_long_it_is_looked_at_again_and_not_counted(world: World) -> None:
    def slow() -> None:
        world.clock.ahead += 16

    def answer() -> None:
        (attempt,) = world.approvals.listed().attempts.values()
        assert (attempt.state, attempt.requests) == ("checking", 0)
        world.sees(listed())

    world.approvals.after_write = slow
    world.stop = stop = Waits(answer)
    assert world.send() == "accepted"
    assert stop.waits == [CHECK_INTERVAL]
    assert world.ends[-1]["azure.scheduled_event.approval.requests"] == 1


@pytest.mark.parametrize(("rule", "reason"), [("rules[0]", ""), (OPERATOR, "state_not_written")])
def test_what_cannot_be_written_down_is_not_sent(world: World, rule: str, reason: str) -> None:
    world.agent.store.degraded = "the disk is full"
    request = world.request(rule)
    request.send()
    assert (world.reason, world.imds.start_requests) == (reason, [])
    assert request.attempt.requests == 0
    (attempt,) = world.approvals.listed().attempts.values()
    assert (attempt.state, attempt.requests) == ("done" if reason else "checking", 0)


@pytest.mark.parametrize(("api_version", "incarnation"), [("2017-03-01", 77), ("2020-07-01", None)])
def test_the_preview_version_is_sent_the_incarnation_as_well(
    world: World, api_version: str, incarnation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(ImdsClient, "post", lambda _, path, body, **__: posted.append((path, json.loads(body))))
    world.sees(body(item(NotBefore=FUTURE), incarnation=77))
    world.api_version = api_version
    assert world.send() == "accepted"
    ((path, sent),) = posted
    assert path == f"/metadata/scheduledevents?api-version={api_version}"
    assert sent["StartRequests"] == [{"EventId": ID}]
    assert sent.get("DocumentIncarnation") == incarnation


@pytest.mark.parametrize(("patience", "timeout"), [(None, TIMEOUT), (4.0, 4.0), (0.5, 1.0)])
def test_imds_is_waited_for_as_long_as_it_helps_somebody(
    world: World, patience: float | None, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []
    monkeypatch.setattr(ImdsClient, "post", lambda *_, timeout: timeouts.append(timeout))
    world.request(OPERATOR, patience=patience, step="").send()
    assert timeouts == [pytest.approx(timeout, abs=0.5)]


@pytest.mark.parametrize("event_id", [ID, "never had one"])
def test_without_a_not_before_nothing_is_sent(world: World, event_id: str) -> None:
    world.sees(listed(EventId=event_id, NotBefore=""))
    world.request(OPERATOR, step="").send()
    assert world.reason == "changed"
    assert world.ends[-1]["azure.scheduled_event.approval.detail"] == "it has no NotBefore"


# ---- the command


def shell_check(script: str, timeout: str = "20s") -> ReadinessCheck:
    return ReadinessCheck(("/bin/sh", "-c", script), Duration(timeout))


def with_check(world: World, check: ReadinessCheck) -> StartRequest:
    world.policy = msgspec.structs.replace(ON, rules=(Rule(FREEZES, approve_when=check),))
    return world.request()


def test_a_machine_that_is_ready_is_approved_and_the_command_runs_once(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    check = shell_check(f"echo ran >> {tmp_path}/runs; echo drained")
    request = with_check(world, check)
    assert request.check_ready(check)
    assert request.check_ready(check)
    assert caplog.text.count(f"approval of {ID}: running /bin/sh") == 1
    assert not request.done.is_set()
    request.send(check)
    assert world.reason == "accepted"
    assert world.ends[-1]["azure.scheduled_event.approval.detail"] == "exit code 0: drained"
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "ran\n"
    (attempt,) = world.approvals.listed().attempts.values()
    assert attempt.run_of(check) == CommandRun("ready", "exit code 0: drained")


def test_a_machine_that_is_not_ready_is_not_approved_and_the_record_says_why(world: World, tmp_path: Path) -> None:
    check = shell_check(f"echo ran >> {tmp_path}/runs; echo busy; exit 3")
    assert not with_check(world, check).check_ready(check)
    assert (world.reason, world.ends[-1]["azure.scheduled_event.approval.detail"]) == (
        "not_ready",
        "exit code 3: busy",
    )
    (attempt,) = world.approvals.listed().attempts.values()
    assert attempt.run_of(check) == CommandRun("failed", "exit code 3: busy")
    again = world.request("other rule", commands=attempt.commands)
    assert not again.check_ready(check)  # it runs once an event, and is recorded once
    assert len(world.ends) == 1
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "ran\n"
    (attempt,) = world.approvals.listed().attempts.values()
    assert (attempt.state, attempt.rule) == ("done", "other rule")
    assert attempt.outcome == "approval_skipped (not_ready): exit code 3: busy"


def test_a_command_that_cannot_be_run_or_is_not_done_in_time_is_not_ready(world: World) -> None:
    for check in (ReadinessCheck(("/no/such/command",)), shell_check("sleep 30", "200ms")):
        assert not with_check(world, check).check_ready(check)
        assert world.reason == "not_ready"
    assert len(world.ends) == 2


def test_a_command_that_is_cut_off_is_left_to_the_next_agent(world: World) -> None:
    check = shell_check("sleep 30")
    request = with_check(world, check)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(request.check_ready, check)
        eventually(lambda: world.approvals.listed().attempts)
        world.stop.set()
        assert ready.result(20) is False
    assert world.ends == []
    (attempt,) = world.approvals.listed().attempts.values()
    assert attempt.run_of(check) == CommandRun("running")


def test_a_command_runs_only_for_what_may_be_approved_and_can_be_written_down(world: World, tmp_path: Path) -> None:
    check = shell_check(f"echo ran >> {tmp_path}/runs")
    request = with_check(world, check)
    world.agent.store.degraded = "the disk is full"
    assert not request.check_ready(check)
    assert world.ends == []
    world.agent.store.retry()
    world.sees(body())
    assert not request.check_ready(check)
    assert world.reason == "no_longer_scheduled"
    assert world.ends[-1]["azure.scheduled_event.approval.detail"] == "it is gone"
    assert not (tmp_path / "runs").exists()


def test_a_machine_that_is_ready_is_not_approved_where_that_cannot_be_written_down(world: World) -> None:
    def fill() -> None:
        world.agent.store.degraded = "the disk is full"

    check = shell_check("true")
    request = with_check(world, check)
    world.approvals.after_write = fill
    assert not request.check_ready(check)
    assert world.ends == []
    (attempt,) = world.approvals.listed().attempts.values()
    assert attempt.run_of(check) == CommandRun("ready", "exit code 0")


def test_the_command_is_given_the_event_and_nothing_that_is_not_decided(world: World, tmp_path: Path) -> None:
    check = shell_check(f"env > {tmp_path}/env; cat > {tmp_path}/stdin")
    assert with_check(world, check).check_ready(check)
    variables = (tmp_path / "env").read_text(encoding="utf-8")
    assert "NOTBEFORE_RULE=rules[0]\n" in variables
    assert f"NOTBEFORE_VM={ME}\n" in variables
    assert f"NOTBEFORE_EVENT_ID={ID}\n" in variables
    given = json.loads((tmp_path / "stdin").read_text(encoding="utf-8"))
    assert given["host.name"] == ME
    assert (
        not {
            "azure.scheduled_event.approval.detail",
            "body",
            "event.name",
            "azure.scheduled_event.change_id",
            "azure.scheduled_event.change",
            "azure.scheduled_event.reason",
        }
        & given.keys()
    )


def test_how_it_ended_is_logged_with_the_rule(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert world.send() == "accepted"
    assert f"Freeze {ID}, rules[0]: approved (accepted)" in [one.getMessage() for one in caplog.records]


@pytest.mark.parametrize(
    ("policy", "allowed", "mode"),
    [
        (ON, True, "on"),
        (msgspec.structs.replace(ON, dry_run=True), True, "dry_run"),
        (ON, False, "off"),
        (msgspec.structs.replace(ON, enabled=False), True, "off"),
    ],
)
def test_both_switches_are_needed(policy: Policy, mode: str, *, allowed: bool) -> None:
    assert ApprovalSettings(policy, "http://127.0.0.1:9", "2020-07-01", allowed).mode == mode


def test_what_was_approved_before_the_list_flapped_is_not_approved_again(world: World) -> None:
    assert world.send() == "accepted"
    world.sees(body())
    world.sees(listed())
    approver = world.approver()
    approver.decide()
    assert not approver._requests
    for number in range(30):
        world.sees(listed(EventId=f"e-{number}"))
        (tracked,) = world.approvals.listed().events.values()
        world.approvals.write(ApprovalAttempt(tracked, "rules[0]").ended("approved"))
    assert len(world.approvals.listed().attempts) == 21
    assert world.imds.start_requests == [ID]


def test_somebody_else_was_faster(world: World) -> None:
    approver = world.approver()
    old = world.approvals.listed()
    assert world.send() == "accepted"
    (tracked,) = old.events.values()
    approver._consider(tracked, old)  # decided on what was known before
    assert not approver._requests
    assert world.imds.start_requests == [ID]
    assert len({one["azure.scheduled_event.change_id"] for one in world.agent.said}) == len(world.agent.said)


@pytest.mark.parametrize("flaw", [{"NotBefore": ""}, {"NotBefore": "soon"}, {"DurationInSeconds": "five"}])
def test_by_hand_nothing_is_approved_that_is_flawed_or_has_no_not_before(world: World, flaw: dict[str, Any]) -> None:
    world.sees(listed(**flaw))
    request = world.request(OPERATOR, step="")
    request.send()
    assert request.attempt.state == "done"
    assert world.imds.start_requests == []


def test_an_error_that_nobody_foresaw_is_counted_and_the_next_decision_is_made(world: World) -> None:
    def settings() -> ApprovalSettings:
        if threading.current_thread().name == "approve" and not world.errors.counts["other"]:
            raise RuntimeError("a bug")
        return world.settings()

    approver = Approver(world.approvals, settings, world.errors)
    approver.start()
    try:
        eventually(lambda: world.errors.counts["other"] == 1)
        approver.wake()
        eventually(lambda: world.reason == "accepted")
    finally:
        approver.stop()
