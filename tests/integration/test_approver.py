"""The approver against an IMDS that counts, in a world that changes at the moment in which
something is sent.
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
from support.agent import PATIENCE, eventually
from support.azure import FUTURE, ID, ME, PEER, body, item
from support.locked_disk import LockedDisk
from support.tracking import SteppedClock, Tracking

FREEZES = RuleMatch(event_type=("Freeze",))
ON = Policy(enabled=True, dry_run=False, rules=(Rule(FREEZES),))


def listed(incarnation: int = 1, **fields: Any) -> bytes:
    return body(item(**{"NotBefore": FUTURE, **fields}), incarnation=incarnation)


class World:
    """A tracker that knows of one event, an IMDS that counts, and what happens when something is
    written down.
    """

    def __init__(self, imds: Simulator, directory: Path) -> None:
        self.imds = imds
        # right after the next thing is written down
        self.after_write: Callable[[], None] = lambda: None
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
        self.imds.set_document(document)
        self.agent.tracker.handle(Poll(0.0, 0.0, document))

    def use(self, policy: Policy) -> None:
        """Reload the configuration with other settings of approvals."""
        self.agent.config = msgspec.structs.replace(self.agent.config, approval=policy)

    def decide(self) -> str:
        """Decide once; the reason in the record of the approval, if there is one."""
        self.approver.decide()
        return self.reason

    def passes(self, seconds: float) -> None:
        self.clock.go(seconds)

    def wait(self, seconds: float, document: bytes | None = None) -> None:
        """So much later; IMDS has just answered."""
        self.passes(seconds)
        self.sees(document or listed())

    def waits(self, most: int = 20, document: bytes | None = None) -> list[float]:
        """Decide until there is a record of the approval.

        The seconds that each decision waited for the next.
        """
        waits = []
        for _ in range(most):
            wait = self.approver.decide()
            if self.reason:
                break
            waits.append(wait)
            self.wait(wait, document)
        return waits

    def by_hand(self, reason: str = "", *, without_resources: bool = False) -> ControlReply:
        """What an operator is answered, who approves the event as it is listed."""
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
        """What is remembered of the one event."""
        (attempt,) = self.listed.attempts.values()
        return attempt

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The records of approvals."""
        prefix = re.compile(r"azure\.scheduled_event\.(approval\.)?")
        records = [
            {prefix.sub("", name): value for name, value in record.items()}
            for record in self.agent.records
        ]
        return [record for record in records if "approv" in record["change"]]

    @property
    def reason(self) -> str:
        return str(self.ends[-1]["reason"]) if self.ends else ""

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
            written = write_attempt(state, attempt, change)
            act = world.after_write
            world.after_write = lambda: None
            act()
            return written

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
    assert f"Freeze {ID}, rules[0]: approved (accepted)" in [
        record.getMessage() for record in caplog.records
    ]
    assert world.approver.decide() == LONG_WAIT
    assert world.imds.start_requests == [ID]
    assert len(
        {record["azure.scheduled_event.change_id"] for record in world.agent.records}
    ) == len(world.agent.records)


# ---- the last look


Happens = Callable[[World], None]


def switched(**values: Any) -> Happens:
    return lambda world: world.runtime.replace(**values)


def used(policy: Policy) -> Happens:
    return lambda world: world.use(policy)


def listing(document: bytes) -> Happens:
    return lambda world: world.sees(document)


def ruled(**values: Any) -> Happens:
    return used(msgspec.structs.replace(ON, rules=(Rule(FREEZES, **values),)))


TERMINATE = listed(EventType="Terminate", Resources=[ME, PEER])


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (used(msgspec.structs.replace(ON, dry_run=True)), "switched_off: approval.dry_run is true"),
        (
            used(msgspec.structs.replace(ON, enabled=False)),
            "switched_off: approval.enabled is not true",
        ),
        (
            switched(allow_approval=False),
            "switched_off: `notbefore run` was started without --allow-approval",
        ),
        (ruled(action="leave"), "changed: the rules say leave now: its action is leave"),
        (ruled(name="other"), "changed: the rules say approve now: the rule says so"),
        (listing(body()), "no_longer_scheduled: it is gone"),
        (
            listing(listed(EventStatus="Started", NotBefore="")),
            "no_longer_scheduled: it is Started",
        ),
        (listing(listed(DurationInSeconds=9)), "changed: the event has changed"),
        (listing(TERMINATE), "changed: the event has changed"),
        (
            listing(listed(EventSource=17)),
            "changed: the rules say leave now: a part of it could not be read",
        ),
    ],
)
def test_approval_is_skipped_when_something_changes_while_it_is_written(
    world: World, happens: Happens, says: str
) -> None:
    world.after_write = lambda: happens(world)
    world.approver.decide()

    assert world.imds.start_requests == []

    kind, reason, words = world.end

    assert kind == "approval_skipped"
    assert f"{reason}: {words}" == says
    assert world.ends[-1]["requests"] == 0


def test_approval_is_not_sent_to_an_imds_that_is_no_longer_watched(world: World) -> None:
    world.after_write = lambda: switched(endpoint="http://127.0.0.1:9")(world)
    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.ends == []

    world.after_write = lambda: None
    world.runtime.replace(endpoint=world.imds.endpoint)
    world.approver.decide()

    assert len(world.imds.start_requests) == 1
    assert world.end[:2] == ("approved", "accepted")


def test_approver_sends_nothing_until_new_imds_answers(world: World) -> None:
    new_imds = "http://127.0.0.1:9"
    world.agent.tracker.use(new_imds, "2020-07-01")  # in the order of a reload

    world.approver.decide()

    assert world.imds.start_requests == []

    world.runtime.replace(endpoint=new_imds)
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


def test_vm_that_is_renamed_to_another_one_approves_nothing(world: World) -> None:
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


def test_successor_approves_event_that_is_still_scheduled_in_its_turn(world: World) -> None:
    world.use(LEADER)
    world.sees(listed(Resources=[PEER, ME]))

    waits = world.waits(document=listed(Resources=[PEER, ME]))

    assert sum(waits) == pytest.approx(30, abs=SHORT_WAIT)
    assert world.reason == "accepted"
    assert world.imds.start_requests == [ID]


def test_successor_sends_nothing_when_event_has_started_before_its_turn(world: World) -> None:
    world.use(LEADER)
    world.sees(listed(Resources=[PEER, ME]))

    world.wait(31, listed(Resources=[PEER, ME], EventStatus="Started"))
    world.approver.decide()

    assert world.imds.start_requests == []
    assert world.ends == []


@pytest.mark.parametrize(
    ("policy", "action", "result"),
    [
        (ON, "approve", ["approved"]),
        (msgspec.structs.replace(ON, enabled=False), "off", []),
        (msgspec.structs.replace(ON, dry_run=True), "dry_run", ["approval_skipped"]),
        (msgspec.structs.replace(ON, rules=()), "leave", []),
        (
            msgspec.structs.replace(ON, rules=(Rule(FREEZES, approve_after=Duration("9999d")),)),
            "approve",
            [],
        ),
        (
            msgspec.structs.replace(ON, rules=(Rule(FREEZES, approve_after=Duration("99999d")),)),
            "skip",
            ["approval_skipped"],
        ),
    ],
)
def test_approver_does_what_the_plan_says(
    world: World, policy: Policy, action: str, result: list[str]
) -> None:
    world.use(policy)
    (tracked,) = world.listed.events.values()
    before = world.listed.plan(world.runtime.current, tracked)

    world.approver.decide()

    after = world.listed.plan(world.runtime.current, tracked)
    assert before.action == action
    assert [end["change"] for end in world.ends] == result
    assert len(world.imds.start_requests) == result.count("approved")
    assert after.action == ("done" if result else action)


def test_successor_records_nothing_in_a_dry_run(world: World) -> None:
    world.use(msgspec.structs.replace(LEADER, dry_run=True))
    world.sees(listed(Resources=[PEER, ME]))

    world.wait(31, listed(Resources=[PEER, ME]))
    wait = world.approver.decide()

    assert wait == LONG_WAIT
    assert world.ends == []


def test_event_that_may_be_the_unreadable_one_is_not_approved(world: World) -> None:
    world.after_write = lambda: world.agent.tracker.handle(
        Poll(0.0, 0.0, body({"EventType": "Freeze"}))
    )
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
        TERMINATE,
        listed(DurationInSeconds=6),
        listed(EventStatus="Started", NotBefore=""),
        listed(Description=5),
        listed(ResourceType=7),  # the same in all that counts, and flawed
        listed(EventId="other"),  # the same content, and another event
        body(),
    ],
)
def test_approval_is_not_sent_when_imds_does_not_confirm_the_event(
    world: World, document: bytes
) -> None:
    """The tracker has not seen yet what IMDS says now: its poll hangs, say."""
    world.imds.set_document(document)

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


def test_approved_event_is_not_approved_again_after_the_list_flapped(world: World) -> None:
    assert world.decide() == "accepted"

    world.sees(body())
    world.sees(listed())

    assert world.approver.decide() == LONG_WAIT
    assert world.imds.start_requests == [ID]

    for number in range(30):
        world.sees(listed(EventId=f"e-{number}"))
        assert world.decide() == "accepted"
    assert len(world.listed.attempts) == 21


def test_approval_is_neither_sent_nor_counted_when_writing_took_too_long(world: World) -> None:
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

    def no_answer(client: ImdsClient, path: str, sent: bytes) -> ImdsAnswer:
        if ID.encode() in sent:
            raise ImdsError("server_error")
        return post(client, path, sent)

    monkeypatch.setattr(ImdsClient, "post", no_answer)
    both = body(item(NotBefore=FUTURE), item("other", NotBefore=FUTURE))
    world.sees(both)
    for _ in range(3):
        world.wait(world.approver.decide(), both)

    assert [(one["id"], one["reason"]) for one in world.ends] == [("other", "accepted")]


def test_approval_is_not_sent_again_when_imds_refuses_it_for_good(world: World) -> None:
    world.imds.fault("start-status", 400, times=1)

    assert world.decide() == "refused"
    assert world.end[0] == "approval_failed"
    assert world.approver.decide() == LONG_WAIT
    assert world.imds.start_requests == []


def test_approval_fails_with_no_answer_when_the_event_ends_before_imds_answers(
    world: World,
) -> None:
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
    posted: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        ImdsClient, "post", lambda _, path, body: posted.append((path, json.loads(body)))
    )
    world.sees(listed(NotBefore=FUTURE))
    imds = Imds(api_version="2019-01-01")
    world.agent.config = msgspec.structs.replace(world.agent.config, imds=imds)

    assert world.decide() == "accepted"

    wanted = {"StartRequests": [{"EventId": ID}]}
    assert posted == [("/metadata/scheduledevents?api-version=2019-01-01", wanted)]


def test_start_request_of_the_first_version_has_the_incarnation(world: World) -> None:
    imds = Imds(api_version="2017-03-01")
    world.agent.config = msgspec.structs.replace(world.agent.config, imds=imds)
    world.sees(listed(incarnation=7))

    outcome = world.decide()

    assert outcome == "accepted"
    assert world.imds.start_requests == [ID]
    assert world.imds.start_incarnations == [7]


# ---- by hand


def test_approval_by_hand_needs_no_rule_but_a_readable_event(world: World) -> None:
    world.use(msgspec.structs.replace(ON, rules=()))

    assert world.by_hand("CHG-1").done
    assert world.imds.start_requests == [ID]
    assert world.ends[-1]["rule"] == "operator"
    assert world.ends[-1]["by"] == "eve"

    world.sees(listed(DurationInSeconds=9, ResourceType=7))
    reply = world.by_hand()

    assert not reply.done
    assert world.end[1:] == ("changed", "a part of it could not be read")
    assert world.imds.start_requests == [ID]


@pytest.mark.parametrize("resources", [[], None])
def test_event_without_resources_is_approved_only_on_request(
    world: World, resources: list[str] | None
) -> None:
    world.sees(listed(Resources=resources))
    world.approver.decide()

    assert world.ends == []
    assert world.imds.start_requests == []

    refused = world.by_hand()

    assert not refused.done
    assert "--without-resources" in refused.words
    assert world.end[:2] == ("approval_skipped", "no_resources")
    assert world.imds.start_requests == []

    assert world.by_hand(without_resources=True).done
    assert world.imds.start_requests == [ID]


def test_resources_of_blanks_are_never_approved(world: World) -> None:
    world.sees(listed(Resources=[" "]))

    reply = world.by_hand(without_resources=True)

    assert not reply.done
    assert world.imds.start_requests == []
    assert world.decide() == "changed"


def test_approval_by_hand_fails_at_once_when_imds_does_not_answer(world: World) -> None:
    world.use(msgspec.structs.replace(ON, rules=()))
    world.passes(16)

    assert "IMDS does not answer: nothing was sent" in world.by_hand().words

    world.sees(listed())
    world.imds.fault("start-status", 500, times=1)

    assert "500" in world.by_hand().words
    assert world.end[:2] == ("approval_failed", "no_answer")
    assert world.imds.start_requests == []
    assert world.by_hand().done  # and may ask again


def test_approval_by_hand_is_not_sent_when_the_event_has_changed(
    world: World,
) -> None:
    world.use(msgspec.structs.replace(ON, rules=()))
    with LockedDisk(world.agent.store):
        assert "the state cannot be written" in world.by_hand().words

    world.imds.set_document(listed(DurationInSeconds=6))

    assert "IMDS does not list it like this any more" in world.by_hand().words
    assert world.imds.start_requests == []


def test_operator_does_not_interfere_with_a_rule(world: World) -> None:
    world.imds.fault("start-status", 500, times=1)
    world.approver.decide()
    reply = world.by_hand()

    assert not reply.done
    assert "an approval of it is under way" in reply.words

    world.wait(PAUSE)

    assert world.decide() == "accepted"
    assert "it is approved already" in world.by_hand().words
    assert world.imds.start_requests == [ID]


def test_next_agent_does_not_send_approval_by_hand_of_the_ended_agent(world: World) -> None:
    world.use(msgspec.structs.replace(ON, rules=()))
    (tracked,) = world.listed.events.values()

    world.agent.state.write_attempt(ApprovalAttempt(tracked, "operator", by="eve", requests=1))

    assert world.decide() == "no_answer"
    assert "ask again" in world.end[2]
    assert world.imds.start_requests == []


def test_approval_by_hand_is_not_sent_when_the_operator_waited_too_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.use(msgspec.structs.replace(ON, rules=()))
    monkeypatch.setattr("notbefore.agent.approver.OPERATOR_PATIENCE", 0.0)
    content = world.approver.answer(ControlRequest(ID), "eve").content

    assert "not decided" in world.approver.answer(ControlRequest(ID, content), "eve").words

    world.approver.decide()
    assert world.imds.start_requests == []
    assert world.ends == []


def test_unforeseen_error_is_counted_and_the_next_decision_is_made(
    world: World,
) -> None:
    class Faulty(Published[Runtime]):
        @property
        def current(self) -> Runtime:
            if threading.current_thread().name == "approve" and not world.errors.count:
                raise RuntimeError("a bug")
            return super().current

    runtime = Faulty(world.runtime.current)
    approver = Approver(world.agent.state, runtime, world.errors)
    approver.start()
    try:
        eventually(lambda: world.errors.count == 1)

        approver.wake()
        eventually(lambda: world.reason == "accepted")
    finally:
        approver.stop()
