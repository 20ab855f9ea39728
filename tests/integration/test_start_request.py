"""A start request whose world changes in the very moment in which it is written down."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from notbefore.agent.approval_log import ApprovalLog
from notbefore.agent.approver import SHORT_WAIT, Approver
from notbefore.agent.clock import Clock
from notbefore.agent.start_request import ApprovalSettings, StartRequest
from notbefore.agent.state import AgentState
from notbefore.core.approval import OPERATOR, ApprovalAttempt, Policy, Rule, RuleMatch, judge
from notbefore.core.change import Change
from notbefore.core.record import Vm
from notbefore.core.routing import RANK_DELAY
from notbefore.errors import ImdsError
from notbefore.imds.client import TIMEOUT, ImdsClient
from notbefore.imds.poller import Poll
from notbefore.simulator.server import Simulator
from support.azure import ID, ME, PEER, body, item
from support.tracking import Tracking

FUTURE = "Fri, 01 Mar 2058 12:00:00 GMT"
ON = Policy(enabled=True, dry_run=False, rules=(Rule(RuleMatch(event_type=("Freeze",))),))


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
        self.policy = ON
        self.stop = threading.Event()
        self.sees(listed())

    def sees(self, document: bytes) -> None:
        self.imds.set_document(document)
        self.agent.tracker.handle(Poll(0.0, 0.0, document))

    def settings(self) -> ApprovalSettings:
        return ApprovalSettings(self.policy, self.imds.endpoint, "2020-07-01", allowed=True)

    def request(self, rule: str = "rules[0]", patience: float | None = None, **values: Any) -> StartRequest:
        """To approve the one event."""
        (life,) = self.approvals.listed().events.values()
        attempt = ApprovalAttempt(life, rule, **{"step": judge(self.policy, life, ME).step, **values})
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
        return Approver(self.approvals, self.settings)


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


def test_the_agent_is_stopped(world: World) -> None:
    world.approvals.after_write = world.stop.set
    assert world.send() == ""
    assert world.imds.start_requests == []
    (attempt,) = world.approvals.listed().attempts.values()
    assert (attempt.state, attempt.approved) == ("sending", "")  # the next agent goes on from there


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


@pytest.mark.parametrize(("asked", "waited"), [(None, 2.0), (0.0, 1.0), (7.0, 7.0), (600.0, 60.0)])
def test_what_imds_asks_for_is_waited(world: World, asked: float | None, waited: float) -> None:
    class Stop(threading.Event):
        waits: ClassVar[list[float | None]] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.waits.append(timeout)
            return True

    world.stop = stop = Stop()
    world.request(requests=2)._pause(ImdsError("throttled", retry_after=asked))
    assert stop.waits == [waited]


def test_what_was_approved_before_the_list_flapped_is_not_approved_again(world: World) -> None:
    assert world.send() == "accepted"
    world.sees(body())
    world.sees(listed())
    approver = world.approver()
    approver.decide()
    assert not approver._requests
    for number in range(30):
        world.sees(listed(EventId=f"e-{number}"))
        (life,) = world.approvals.listed().events.values()
        world.approvals.write(ApprovalAttempt(life, "rules[0]").ended("approved"))
    assert len(world.approvals.listed().attempts) == 21
    assert world.imds.start_requests == [ID]


def test_somebody_else_was_faster(world: World) -> None:
    approver = world.approver()
    old = world.approvals.listed()
    assert world.send() == "accepted"
    (life,) = old.events.values()
    approver._consider(life, old)  # decided on what was known before
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
