"""`announce_by: leader` with five agents: one message of each change while the leader's works, two at most else."""

import collections
import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, eventually, free_port
from support.azure import body, item
from support.peers import HttpPeer

GROUP = [f"127.0.0.{number}" for number in range(11, 16)]  # VMs, named as they are reached


class AgentOfGroup(RunningAgent):
    """It listens on an address of its own; all listen on the same port."""

    host = ""

    def answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            return connection.getresponse().status == 200
        return False

    def deliveries(self, result: str) -> float:
        """How many deliveries had this result."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        with closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        name = f'notbefore_deliveries_total{{result="{result}",sink="hook"}} '
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


@pytest.fixture
def imds() -> Iterator[Simulator]:
    with Simulator(tuple(GROUP)) as simulator:
        simulator.set_document(body())
        yield simulator


class Group:
    """``peers``: its agents can ask each other whether they are alive."""

    def __init__(self, imds: Simulator, hook: HttpPeer, place: Path, *, peers: bool) -> None:
        self.port = free_port()
        self._imds, self._place = imds, place
        sinks = {"hook": {"webhook": {"url": hook.url, "allow_private": True, "expire_on_end": False}}}
        config = {"sinks": sinks, "routes": [{"sinks": ["hook"], "announce_by": "leader"}]}
        if peers:
            config["peers"] = {"url": f"http://{{vm}}:{self.port}/readyz"}
        (place / "agent.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def start(self, name: str, monkeypatch: pytest.MonkeyPatch) -> AgentOfGroup:
        with monkeypatch.context() as patch:
            patch.setattr("support.agent.free_port", lambda: self.port)
            patch.setattr(AgentOfGroup, "host", name)
            patch.setenv("NOTBEFORE_VM__NAME", name)
            made = AgentOfGroup(self._imds.endpoint, self._place / name, str(self._place / "agent.yml"), host=name)
        made.host = name
        return made.ready()


def listed(status: str | None) -> bytes:
    if status is None:
        return body(incarnation=9)
    return body(item("a", Resources=GROUP, EventStatus=status), incarnation={"Scheduled": 2, "Started": 3}[status])


def messages(hook: HttpPeer) -> dict[str, int]:
    kinds = [json.loads(request.body)["notbefore.delivery.kind"] for request in hook.requests]
    return dict(collections.Counter(kinds))


def asked(agents: list[AgentOfGroup]) -> float:
    """How many messages these agents left to others."""
    return sum(one.deliveries("yielded") for one in agents)


@pytest.mark.long
def test_one_vm_notifies_and_the_next_one_while_its_agent_is_gone(
    imds: Simulator, hook: HttpPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(imds, hook, tmp_path, peers=True)
    with ExitStack() as stack:
        leader, *others = [stack.enter_context(group.start(name, monkeypatch)) for name in GROUP]
        imds.set_document(listed("Scheduled"))
        eventually(lambda: messages(hook) == {"announced": 1})
        eventually(lambda: asked(others) >= 2)
        leader.stop(signal.SIGKILL)
        imds.set_document(listed("Started"))
        eventually(lambda: messages(hook) == {"announced": 1, "started": 1})
        eventually(lambda: asked(others[1:]) >= 2)  # the third one finds that the second one is alive
        stack.enter_context(group.start(GROUP[0], monkeypatch))  # it finds that the event has been started
        eventually(lambda: messages(hook) == {"announced": 1, "started": 2})
        imds.set_document(listed(None))
        eventually(lambda: messages(hook) == {"announced": 1, "started": 2, "finished": 1})
        eventually(lambda: asked(others[:1]) == 2)
    assert messages(hook) == {"announced": 1, "started": 2, "finished": 1}


@pytest.mark.long
def test_where_they_cannot_ask_each_other_two_messages_come_and_what_waits_is_withdrawn_in_the_end(
    imds: Simulator, hook: HttpPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(imds, hook, tmp_path, peers=False)
    with ExitStack() as stack:
        others = [stack.enter_context(group.start(name, monkeypatch)) for name in GROUP[1:]]
        imds.set_document(listed("Scheduled"))  # the leader is gone from the beginning
        eventually(lambda: messages(hook) == {"announced": 1})
        imds.set_document(listed("Started"))
        eventually(lambda: all(one.kinds == ["announced", "started"] for one in others))
        imds.set_document(listed(None))  # before it was the second one's turn
        eventually(lambda: messages(hook) == {"announced": 1, "finished": 1})
        leader = stack.enter_context(group.start(GROUP[0], monkeypatch))
        imds.set_document(listed("Scheduled").replace(b'"a"', b'"b"'))
        eventually(lambda: messages(hook) == {"announced": 3, "finished": 1})  # the leader's, and the second one's
        assert asked([leader, *others]) == 0
    ids = [request.headers["x-notbefore-delivery-id"] for request in hook.requests]
    assert len(ids) - len(set(ids)) == 1  # both are one message to a receiver that looks at the id
