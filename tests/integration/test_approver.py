"""The approver against a simulated IMDS, while events and settings change in the middle of an
approval.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from notbefore.agent.approver import LONG_WAIT, PAUSE, SHORT_WAIT, Approver, ListedEvents
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.state import AgentState
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Poll
from notbefore.config.model import Config, Imds
from notbefore.core.approval import ApprovalAttempt, Policy, Rule, RuleMatch, content_of
from notbefore.core.change import Change
from notbefore.core.duration import Duration
from notbefore.core.record import Vm
from notbefore.errors import ImdsError
from notbefore.imds.answer import ImdsAnswer
from notbefore.imds.client import ImdsClient
from notbefore.process.control_socket import ControlReply, ControlRequest
from notbefore.simulator.server import Simulator
from support.agent import NOWHERE, PATIENCE, eventually
from support.azure import FUTURE, ID, ME, PEER, body, item
from support.locked_disk import LockedDisk
from support.tracking import SteppedClock, Tracking

FREEZES = RuleMatch(event_type=("Freeze",))
ON = Policy(enabled=True, dry_run=False, rules=(Rule(FREEZES),))


def listed(incarnation: int = 1, **fields: Any) -> bytes:
    """Return a document that lists the event, which does not start during the test."""
    return body(item(**{"NotBefore": FUTURE, **fields}), incarnation=incarnation)


class World:
    """An approver, its agent that tracks one event, and an IMDS that records start requests."""

    def __init__(self, imds: Simulator, directory: Path) -> None:
        self.imds = imds
        # called once, right after the next attempt is written
        self.after_write: Callable[[], object] | None = None
        self.clock = SteppedClock()
        self.agent = Tracking(directory, self.clock, Config(approval=ON))
        self.runtime = self.agent.runtime
        self.runtime.replace(endpoint=imds.endpoint, allow_approval=True)
        self.agent.tracker.identify(Vm(name=ME))
        self.errors = ThreadGuard()
        self.approver = self.successor()
        self.sees(listed())

    def successor(self) -> Approver:
        return Approver(self.agent.state, self.runtime, self.errors)

    def sees(self, document: bytes) -> None:
        """Let IMDS list this document, and the agent read it."""
        self.imds.set_document(document)
        self.agent.tracker.handle(Poll(0.0, 0.0, document))

    def use(self, policy: Policy) -> None:
        """Reload the configuration with other settings of approvals."""
        self.agent.config = msgspec.structs.replace(self.agent.config, approval=policy)

    def decide(self) -> str:
        """Decide once; return the reason in the last record of an approval, if there is one."""
        self.approver.decide()
        return self.reason

    def passes(self, seconds: float) -> None:
        self.clock.go(seconds)

    def wait(self, seconds: float, document: bytes | None = None) -> None:
        """Let the time pass, and the agent read an answer then."""
        self.passes(seconds)
        self.sees(document or listed())

    def waits(self, document: bytes | None = None) -> list[float]:
        """Decide until there is a record of the approval; return the waits between decisions."""
        waits: list[float] = []
        for _ in range(20):
            wait = self.approver.decide()
            if self.reason:
                break
            waits.append(wait)
            self.wait(wait, document)
        return waits

    def by_hand(self, reason: str = "", *, without_resources: bool = False) -> ControlReply:
        """Approve the event as it is listed, as an operator; return the reply."""
        content = self.approver.answer(ControlRequest(ID), "eve").content
        request = ControlRequest(ID, content, reason, without_resources=without_resources)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.approver.answer, request, "eve")
            while not reply.done():
                self.approver.decide()
        return reply.result()

    @property
    def listed(self) -> ListedEvents:
        return self.agent.listed

    @property
    def attempt(self) -> ApprovalAttempt:
        """The stored attempt to approve the event."""
        (attempt,) = self.listed.attempts.values()
        return attempt

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The records of approvals, with short names of their fields."""
        prefix = re.compile(r"azure\.scheduled_event\.(approval\.)?")
        records = [
            {prefix.sub("", name): value for name, value in record.items()}
            for record in self.agent.records
        ]
        return [record for record in records if "approv" in record["change"]]

    @property
    def reason(self) -> str:
        """The reason in the last record of an approval; empty without a record."""
        if not self.ends:
            return ""
        return str(self.ends[-1]["reason"])

    @property
    def end(self) -> tuple[str, str, str]:
        """The change, reason and detail of the last record of an approval."""
        last = self.ends[-1]
        return last["change"], last["reason"], last.get("detail", "")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with Simulator((ME, PEER)) as imds:
        world = World(imds, tmp_path)
        write_attempt = AgentState.write_attempt

        def watched(
            state: AgentState, attempt: ApprovalAttempt, change: Change | None = None
        ) -> bool:
            is_written = write_attempt(state, attempt, change)
            act = world.after_write
            world.after_write = None
            if act is not None:
                act()
            return is_written

        monkeypatch.setattr(AgentState, "write_attempt", watched)
        monkeypatch.setattr("notbefore.agent.approver.CONFIRM_TIMEOUT", PATIENCE)
        yield world
        world.agent.close()


def test_event_named_by_a_rule_is_approved_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.decide() == "accepted"
    assert world.imds.start_requests == [ID]
    assert world.attempt.approved == content_of(world.attempt.tracked)
    assert f"Freeze {ID}, rules[0]: approved (accepted)" in caplog.messages

    assert world.approver.decide() == LONG_WAIT
    assert world.imds.start_requests == [ID]

    change_ids = [record["azure.scheduled_event.change_id"] for record in world.agent.records]
    assert len(set(change_ids)) == len(change_ids)


# ---- changes between the writing of an attempt and its request


TERMINATE = listed(EventType="Terminate", Resources=[ME, PEER])


def check_skipped(world: World, reason: str, detail: str) -> None:
    """Decide, and check that the approval is recorded as skipped, and not sent."""
    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.end == ("approval_skipped", reason, detail)
    assert world.ends[-1]["requests"] == 0


@pytest.mark.parametrize(
    ("policy", "reason", "detail"),
    [
        pytest.param(
            msgspec.structs.replace(ON, dry_run=True),
            "switched_off",
            "approval.dry_run is true",
            id="dry run",
        ),
        pytest.param(
            msgspec.structs.replace(ON, enabled=False),
            "switched_off",
            "approval.enabled is not true",
            id="disabled",
        ),
        pytest.param(
            msgspec.structs.replace(ON, rules=(Rule(FREEZES, action="leave"),)),
            "changed",
            "the rules say leave now: its action is leave",
            id="another action",
        ),
        pytest.param(
            msgspec.structs.replace(ON, rules=(Rule(FREEZES, name="other"),)),
            "changed",
            "the rules say approve now: the rule says so",
            id="another rule",
        ),
    ],
)
def test_approval_is_skipped_when_its_policy_changes(
    world: World, policy: Policy, reason: str, detail: str
) -> None:
    world.after_write = lambda: world.use(policy)

    check_skipped(world, reason, detail)


def test_approval_is_skipped_when_approvals_are_no_longer_allowed(world: World) -> None:
    world.after_write = lambda: world.runtime.replace(allow_approval=False)

    check_skipped(world, "switched_off", "`notbefore run` was started without --allow-approval")


@pytest.mark.parametrize(
    ("document", "reason", "detail"),
    [
        pytest.param(body(), "no_longer_scheduled", "it is gone", id="gone"),
        pytest.param(
            listed(EventStatus="Started", NotBefore=""),
            "no_longer_scheduled",
            "it is Started",
            id="started",
        ),
        pytest.param(
            listed(DurationInSeconds=9), "changed", "the event has changed", id="another duration"
        ),
        pytest.param(TERMINATE, "changed", "the event has changed", id="another type"),
        pytest.param(
            listed(EventSource=17),
            "changed",
            "the rules say leave now: a part of it could not be read",
            id="unreadable",
        ),
    ],
)
def test_approval_is_skipped_when_its_event_changes(
    world: World, document: bytes, reason: str, detail: str
) -> None:
    world.after_write = lambda: world.sees(document)

    check_skipped(world, reason, detail)


def test_approval_is_not_sent_to_an_imds_that_is_no_longer_watched(world: World) -> None:
    world.after_write = lambda: world.runtime.replace(endpoint=NOWHERE)

    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.ends == []

    world.runtime.replace(endpoint=world.imds.endpoint)
    world.approver.decide()

    assert len(world.imds.start_requests) == 1
    assert world.end[:2] == ("approved", "accepted")


def test_approver_sends_nothing_until_new_imds_answers(world: World) -> None:
    world.agent.tracker.use(NOWHERE, "2020-07-01")  # in the order of a reload

    world.approver.decide()

    assert world.imds.start_requests == []

    world.runtime.replace(endpoint=NOWHERE)
    world.approver.decide()

    assert world.imds.start_requests == []

    world.runtime.replace(endpoint=world.imds.endpoint)
    world.sees(listed())

    assert world.decide() == "accepted"


LEADER = Policy(
    enabled=True,
    dry_run=False,
    rules=(
        Rule(RuleMatch(event_type=("Freeze",), scope=("self", "peer")), for_all_resources="leader"),
    ),
)


def test_renamed_vm_does_not_approve_the_event_of_its_old_name(world: World) -> None:
    world.use(LEADER)
    world.sees(listed(Resources=[ME, "third"]))
    world.after_write = lambda: world.agent.tracker.identify(Vm(name=PEER))

    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.end[1:] == (
        "changed",
        "the rules say leave now: one of its VMs decides for all of them",
    )


def test_leader_that_is_renamed_to_a_successor_waits_for_its_turn(world: World) -> None:
    world.use(LEADER)
    world.sees(listed(Resources=[ME, PEER]))
    world.after_write = lambda: world.agent.tracker.identify(Vm(name=PEER))

    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.reason == "changed"

    world.wait(31, listed(Resources=[ME, PEER]))

    assert world.decide() == "accepted"


def test_successor_approves_event_that_is_scheduled_in_its_turn(world: World) -> None:
    world.use(LEADER)
    world.sees(listed(Resources=[PEER, ME]))

    waits = world.waits(document=listed(Resources=[PEER, ME]))

    assert sum(waits) == pytest.approx(30, abs=SHORT_WAIT)
    assert world.reason == "accepted"
    assert world.imds.start_requests == [ID]


def test_successor_sends_nothing_when_event_started_before_its_turn(world: World) -> None:
    world.use(LEADER)
    world.sees(listed(Resources=[PEER, ME]))

    world.wait(31, listed(Resources=[PEER, ME], EventStatus="Started"))
    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.ends == []


@pytest.mark.parametrize(
    ("policy", "action", "changes", "next_action"),
    [
        pytest.param(ON, "approve", ["approved"], "done", id="approve"),
        pytest.param(msgspec.structs.replace(ON, enabled=False), "off", [], "off", id="off"),
        pytest.param(
            msgspec.structs.replace(ON, dry_run=True),
            "dry_run",
            ["approval_skipped"],
            "done",
            id="dry run",
        ),
        pytest.param(msgspec.structs.replace(ON, rules=()), "leave", [], "leave", id="no rule"),
        pytest.param(
            msgspec.structs.replace(ON, rules=(Rule(FREEZES, approve_after=Duration("9999d")),)),
            "approve",
            [],
            "approve",
            id="approve later",
        ),
        pytest.param(
            msgspec.structs.replace(ON, rules=(Rule(FREEZES, approve_after=Duration("99999d")),)),
            "skip",
            ["approval_skipped"],
            "done",
            id="approve after NotBefore",
        ),
    ],
)
def test_approver_follows_the_plan(
    world: World, policy: Policy, action: str, changes: list[str], next_action: str
) -> None:
    world.use(policy)
    (tracked,) = world.listed.events.values()
    before = world.listed.plan(world.runtime.current, tracked)

    world.approver.decide()

    after = world.listed.plan(world.runtime.current, tracked)
    assert before.action == action
    assert [end["change"] for end in world.ends] == changes
    assert len(world.imds.start_requests) == changes.count("approved")
    assert after.action == next_action


def test_successor_records_nothing_in_a_dry_run(world: World) -> None:
    world.use(msgspec.structs.replace(LEADER, dry_run=True))
    world.sees(listed(Resources=[PEER, ME]))

    world.wait(31, listed(Resources=[PEER, ME]))
    wait = world.approver.decide()

    assert wait == LONG_WAIT
    assert world.ends == []


def test_event_that_may_be_the_unreadable_one_is_not_approved(world: World) -> None:
    without_id = Poll(0.0, 0.0, body({"EventType": "Freeze"}))
    world.after_write = lambda: world.agent.tracker.handle(without_id)

    world.approver.decide()

    assert world.reason == ""
    assert world.imds.start_requests == []

    world.sees(listed())

    assert world.decide() == "accepted"


def test_approver_sends_nothing_at_not_before(world: World) -> None:
    soon = world.clock.now().replace(microsecond=0) + timedelta(seconds=30)
    world.sees(listed(NotBefore=format_datetime(soon, usegmt=True)))
    world.after_write = lambda: world.passes(31)

    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.end[1:] == ("too_late", "NotBefore came first")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(TERMINATE, id="another type"),
        pytest.param(listed(DurationInSeconds=6), id="another duration"),
        pytest.param(listed(EventStatus="Started", NotBefore=""), id="started"),
        pytest.param(listed(Description=5), id="unreadable description"),
        pytest.param(listed(ResourceType=7), id="unreadable field without meaning"),
        pytest.param(listed(EventId="other"), id="another event with the same content"),
        pytest.param(body(), id="gone"),
    ],
)
def test_approval_is_not_sent_when_imds_does_not_confirm_the_event(
    world: World, document: bytes
) -> None:
    world.imds.set_document(document)  # the agent has not polled it

    assert world.approver.decide() == SHORT_WAIT
    assert world.reason == ""
    assert world.imds.start_requests == []
    assert not world.listed.attempts


def test_answer_that_is_no_document_confirms_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.imds.set_document(b"<html>")

    assert world.approver.decide() == PAUSE
    assert f"approval of {ID}: rejected: " in caplog.text
    assert world.imds.start_requests == []

    world.wait(PAUSE)

    assert world.decide() == "accepted"
    assert world.ends[-1]["requests"] == 1


def test_approved_event_is_not_approved_again_when_it_is_listed_again(world: World) -> None:
    world.approver.decide()

    world.sees(body())
    world.sees(listed())

    assert world.approver.decide() == LONG_WAIT
    assert world.imds.start_requests == [ID]


def test_approver_remembers_the_last_attempts_at_ended_events(world: World) -> None:
    for number in range(30):
        world.sees(listed(EventId=f"e-{number}"))
        world.approver.decide()

    assert len(world.imds.start_requests) == 30
    assert len(world.listed.attempts) == 21


def test_approval_is_not_sent_when_its_writing_took_too_long(world: World) -> None:
    world.after_write = lambda: world.passes(16)

    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.attempt.state == "sending"
    assert world.attempt.requests == 0

    world.sees(listed())

    assert world.decide() == "accepted"
    assert world.ends[-1]["requests"] == 1


# ---- the answers of IMDS


def test_approval_is_sent_again_until_imds_accepts_it(world: World) -> None:
    world.imds.fault("start-status", 500, times=9)

    assert world.waits() == [PAUSE] * 9
    assert world.end[:2] == ("approved", "accepted")
    assert world.imds.start_requests == [ID]
    assert world.ends[-1]["requests"] == 10


def test_unanswered_approval_does_not_delay_another_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = ImdsClient.post

    def answer_only_other(client: ImdsClient, path: str, request: bytes) -> ImdsAnswer:
        if ID.encode() in request:
            raise ImdsError("server_error")
        return post(client, path, request)

    monkeypatch.setattr(ImdsClient, "post", answer_only_other)
    both = body(item(NotBefore=FUTURE), item("other", NotBefore=FUTURE))
    world.sees(both)

    for _ in range(3):
        world.wait(world.approver.decide(), both)

    (end,) = world.ends
    assert end["id"] == "other"
    assert end["reason"] == "accepted"


def test_approval_is_not_sent_again_when_imds_refuses_it_for_good(world: World) -> None:
    world.imds.fault("start-status", 400, times=1)

    assert world.decide() == "refused"
    assert world.end[0] == "approval_failed"
    assert world.approver.decide() == LONG_WAIT
    assert world.imds.start_requests == []


def test_approval_fails_when_the_event_ends_before_imds_answers(world: World) -> None:
    world.imds.fault("start-status", 500, times=1)
    world.approver.decide()

    world.sees(body())
    world.approver.decide()

    change, reason, detail = world.end
    assert change == "approval_failed"
    assert reason == "no_answer"
    assert world.ends[-1]["requests"] == 1
    assert detail.startswith("it is gone; ")
    assert world.attempt.outcome == f"approval_failed (no_answer): {detail}"


def test_next_agent_resumes_approvals_that_imds_had_not_answered(world: World) -> None:
    world.imds.fault("start-status", 500, times=1)
    world.approver.decide()
    world.approver.stop()

    world.approver = world.successor()

    assert world.decide() == "accepted"
    assert world.ends[-1]["requests"] == 2


def test_stopping_agent_sends_no_more_approvals(world: World) -> None:
    world.after_write = world.approver.stop

    assert world.decide() == ""
    assert world.imds.start_requests == []
    assert world.attempt.state == "sending"
    assert world.attempt.requests == 0


def test_start_request_names_the_event_and_the_version_in_use(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Mock()
    monkeypatch.setattr(ImdsClient, "post", post)
    imds = Imds(api_version="2019-01-01")
    world.agent.config = msgspec.structs.replace(world.agent.config, imds=imds)

    assert world.decide() == "accepted"

    path, request = post.call_args.args
    assert path == "/metadata/scheduledevents?api-version=2019-01-01"
    assert json.loads(request) == {"StartRequests": [{"EventId": ID}]}


def test_start_request_of_the_first_version_has_the_incarnation(world: World) -> None:
    imds = Imds(api_version="2017-03-01")
    world.agent.config = msgspec.structs.replace(world.agent.config, imds=imds)
    world.sees(listed(incarnation=7))

    outcome = world.decide()

    assert outcome == "accepted"
    assert world.imds.start_requests == [ID]
    assert world.imds.start_incarnations == [7]


# ---- by hand


WITHOUT_RULES = msgspec.structs.replace(ON, rules=())


def test_approval_by_hand_needs_no_rule(world: World) -> None:
    world.use(WITHOUT_RULES)

    reply = world.by_hand("CHG-1")

    assert reply.done
    assert world.imds.start_requests == [ID]
    assert world.ends[-1]["rule"] == "operator"
    assert world.ends[-1]["by"] == "eve"


def test_approval_by_hand_needs_a_readable_event(world: World) -> None:
    world.use(WITHOUT_RULES)
    world.sees(listed(DurationInSeconds=9, ResourceType=7))

    reply = world.by_hand()

    assert not reply.done
    assert world.end[1:] == ("changed", "a part of it could not be read")
    assert world.imds.start_requests == []


@pytest.mark.parametrize("resources", [[], None])
def test_event_without_resources_is_approved_only_on_request(
    world: World, resources: list[str] | None
) -> None:
    world.sees(listed(Resources=resources))
    world.approver.decide()

    assert world.ends == []
    assert world.imds.start_requests == []

    refusal = world.by_hand()

    assert not refusal.done
    assert "--without-resources" in refusal.words
    assert world.end[:2] == ("approval_skipped", "no_resources")
    assert world.imds.start_requests == []

    reply = world.by_hand(without_resources=True)

    assert reply.done
    assert world.imds.start_requests == [ID]


def test_resources_of_blanks_are_never_approved(world: World) -> None:
    world.sees(listed(Resources=[" "]))

    reply = world.by_hand(without_resources=True)

    assert not reply.done
    assert world.imds.start_requests == []
    assert world.decide() == "changed"


def test_approval_by_hand_fails_at_once_while_polls_fail(world: World) -> None:
    world.use(WITHOUT_RULES)
    world.passes(16)

    reply = world.by_hand()

    assert "IMDS does not answer: nothing was sent" in reply.words
    assert world.imds.start_requests == []


def test_approval_by_hand_that_imds_does_not_answer_may_be_repeated(world: World) -> None:
    world.use(WITHOUT_RULES)
    world.imds.fault("start-status", 500, times=1)

    reply = world.by_hand()

    assert "500" in reply.words
    assert world.end[:2] == ("approval_failed", "no_answer")
    assert world.imds.start_requests == []

    second_reply = world.by_hand()

    assert second_reply.done


def test_approval_by_hand_is_not_sent_when_it_cannot_be_written(world: World) -> None:
    world.use(WITHOUT_RULES)

    with LockedDisk(world.agent.store):
        reply = world.by_hand()

    assert "the state cannot be written" in reply.words
    assert world.imds.start_requests == []


def test_approval_by_hand_is_not_sent_when_the_event_has_changed(world: World) -> None:
    world.use(WITHOUT_RULES)
    world.imds.set_document(listed(DurationInSeconds=6))

    reply = world.by_hand()

    assert "IMDS does not list it like this any more" in reply.words
    assert world.imds.start_requests == []


def test_operator_does_not_interfere_with_a_rule(world: World) -> None:
    world.imds.fault("start-status", 500, times=1)
    world.approver.decide()

    reply = world.by_hand()

    assert not reply.done
    assert "an approval of it is under way" in reply.words

    world.wait(PAUSE)
    world.approver.decide()
    second_reply = world.by_hand()

    assert world.reason == "accepted"
    assert "it is approved already" in second_reply.words
    assert world.imds.start_requests == [ID]


def test_next_agent_does_not_send_an_approval_by_hand(world: World) -> None:
    world.use(WITHOUT_RULES)
    (tracked,) = world.listed.events.values()

    world.agent.state.write_attempt(ApprovalAttempt(tracked, "operator", by="eve", requests=1))

    assert world.decide() == "no_answer"
    assert "ask again" in world.end[2]
    assert world.imds.start_requests == []


def test_approval_by_hand_is_not_sent_when_it_comes_too_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.use(WITHOUT_RULES)
    monkeypatch.setattr("notbefore.agent.approver.OPERATOR_PATIENCE", 0.0)
    content = world.approver.answer(ControlRequest(ID), "eve").content

    reply = world.approver.answer(ControlRequest(ID, content), "eve")
    world.approver.decide()

    assert "not decided" in reply.words
    assert world.imds.start_requests == []
    assert world.ends == []


class FaultyRuntime(Published[Runtime]):
    """A runtime that the approver cannot read until an error is counted."""

    def __init__(self, runtime: Runtime, errors: ThreadGuard) -> None:
        super().__init__(runtime)
        self._errors = errors

    @property
    def current(self) -> Runtime:
        if threading.current_thread().name == "approve" and self._errors.count == 0:
            raise RuntimeError("a bug")
        return super().current


def test_approver_decides_again_after_an_unforeseen_error(world: World) -> None:
    runtime = FaultyRuntime(world.runtime.current, world.errors)
    approver = Approver(world.agent.state, runtime, world.errors)
    approver.start()
    try:
        eventually(lambda: world.errors.count == 1)

        approver.wake()

        eventually(lambda: world.reason == "accepted")
    finally:
        approver.stop()
