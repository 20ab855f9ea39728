"""A start request whose world changes in the very moment in which it is written down."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from notbefore.agent.approver import LOOK_AGAIN, Approver
from notbefore.agent.start_request import ApprovalSettings, StartRequest
from notbefore.agent.tracker import Tracker, now_utc
from notbefore.core.approval import ApprovalAttempt, Policy, Rule, Who, judge
from notbefore.core.change import Change
from notbefore.core.record import Vm
from notbefore.core.routing import RANK_DELAY
from notbefore.errors import ImdsError
from notbefore.imds.client import TIMEOUT, ImdsClient
from notbefore.imds.poller import Poll
from notbefore.metrics.process import Figures
from notbefore.simulator.server import Simulator
from notbefore.store.state import Store
from support.azure import ID, ME, PEER, body, item

FUTURE = "Fri, 01 Mar 2058 12:00:00 GMT"
ON = Policy(enabled=True, dry_run=False, rules=(Rule(Who(event_type=("Freeze",))),))


def listed(**fields: Any) -> bytes:
    return body(item(**{"NotBefore": FUTURE, **fields}))


class World:
    """A watch that knows of one event, an IMDS that counts, and what happens when something is written down."""

    def __init__(self, imds: Simulator, store: Store) -> None:
        self.imds = imds
        self.told: list[dict[str, Any]] = []
        self.watch = Tracker(store, Figures(), lambda line: self.told.append(msgspec.json.decode(line)))
        self.watch.use_api_version("2020-07-01")
        self.watch.set_vm(Vm(name=ME), None)
        self.policy = ON
        self.stop = threading.Event()
        self.at_note: Callable[[], None] = lambda: None
        self._note = self.watch.note
        self.watch.note = self.note  # type: ignore[method-assign]  # that is what this test is about
        self.sees(listed())

    def sees(self, document: bytes) -> None:
        self.imds.set_document(document)
        self.watch.handle(Poll(0.0, 0.0, document))

    def note(self, attempt: ApprovalAttempt, change: Change | None = None) -> bool:
        noted = self._note(attempt, change)
        act, self.at_note = self.at_note, lambda: None
        act()
        return noted

    def switches(self) -> ApprovalSettings:
        return ApprovalSettings(self.policy, self.imds.endpoint, "2020-07-01", allowed=True)

    def send(self) -> str:
        """Send for the one event; what was told of it, if anything."""
        life = self.watch.listed().lives[ID.casefold()]
        attempt = ApprovalAttempt(life, "rules[0]", judge(ON, life, ME).step)
        StartRequest(self.watch, self.switches, self.stop, attempt).send()
        ends = [one for one in self.told if "approv" in one["azure.scheduled_event.change"]]
        return ends[-1]["azure.scheduled_event.reason"] if ends else ""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Simulator((ME, PEER)) as imds, closing(Store(tmp_path)) as store:
        yield World(imds, store)


def test_nothing_happens_meanwhile(world: World) -> None:
    assert world.send() == "accepted"
    assert world.imds.start_requests == [ID]


def test_the_agent_is_stopped(world: World) -> None:
    world.at_note = world.stop.set
    assert world.send() == ""
    assert world.imds.start_requests == []
    (attempt,) = world.watch.listed().attempts.values()
    assert (attempt.state, attempt.approved) == ("sending", "")  # the next agent goes on from there


def test_approval_is_switched_off(world: World) -> None:
    world.at_note = lambda: setattr(world, "policy", msgspec.structs.replace(ON, enabled=False))
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
    world.at_note = lambda: world.sees(document)
    assert world.send() == reason
    assert world.imds.start_requests == []


def test_the_list_flaps(world: World) -> None:
    def flap() -> None:
        world.sees(body())
        world.sees(listed())

    world.at_note = flap
    assert world.send() == "accepted"
    assert world.imds.start_requests == [ID]


def test_after_each_change_the_second_waits_for_the_leader_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.policy = Policy(enabled=True, dry_run=False, rules=(Rule(for_all_resources="leader"),))
    clock = [now_utc()]
    monkeypatch.setattr("notbefore.agent.tracker.now_utc", lambda: clock[0])
    approver = Approver(world.watch, world.switches())
    for number in range(3):
        world.sees(listed(Resources=[PEER, ME], DurationInSeconds=number))
        assert approver._look() == RANK_DELAY
        clock[0] += timedelta(seconds=RANK_DELAY - 1)
        assert approver._look() == 1
        clock[0] += timedelta(seconds=60)
    assert approver._look() == LOOK_AGAIN  # nobody has spoken: it does


def test_imds_is_not_waited_for_beyond_not_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []
    post = ImdsClient.post

    def noted(client: ImdsClient, path: str, body: bytes, timeout: float) -> None:
        timeouts.append(timeout)
        post(client, path, body, timeout=timeout)

    monkeypatch.setattr(ImdsClient, "post", noted)
    soon = now_utc() + timedelta(seconds=TIMEOUT - 2)
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

    (life,) = world.watch.listed().lives.values()
    stop = Stop()
    request = StartRequest(world.watch, world.switches, stop, ApprovalAttempt(life, "rules[0]", requests=2))
    request._pause(ImdsError("throttled", retry_after=asked))
    assert stop.waits == [waited]


def test_what_was_approved_before_the_list_flapped_is_not_approved_again(world: World) -> None:
    assert world.send() == "accepted"
    world.sees(body())
    world.sees(listed())
    approver = Approver(world.watch, world.switches())
    approver._look()
    assert not approver._requests
    for number in range(30):
        world.sees(listed(EventId=f"e-{number}"))
        (life,) = world.watch.listed().lives.values()
        world.watch.note(ApprovalAttempt(life, "rules[0]").ended("approved"))
    assert len(world.watch.listed().attempts) == 21
    assert world.imds.start_requests == [ID]


def test_somebody_else_was_faster(world: World) -> None:
    approver = Approver(world.watch, world.switches())
    old = world.watch.listed()
    assert world.send() == "accepted"
    (life,) = old.lives.values()
    approver._consider(life, old)  # decided on what was known before
    assert not approver._requests
    assert world.imds.start_requests == [ID]
    assert len({one["azure.scheduled_event.change_id"] for one in world.told}) == len(world.told)
