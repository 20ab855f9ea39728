"""``Agent`` in this process: the order of the steps of a reload."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.agent import polling as polling_module
from notbefore.agent.agent import Agent
from notbefore.agent.polling import Polling, PollThread
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Poll, Tracker
from notbefore.config.load import load
from notbefore.config.model import Config, VmName
from notbefore.core.approval import Policy, Rule
from notbefore.core.record import Vm
from notbefore.errors import ImdsError
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, eventually
from support.azure import FUTURE, ME, PEER, body, item
from support.tracking import Tracking

EVERY_EVENT = Policy(enabled=True, dry_run=False, rules=(Rule("all"),))
NO_EVENT = Policy(enabled=True, dry_run=False)


def config_for(imds: Simulator, directory: Path) -> Config:
    settings = {
        "imds.endpoint": imds.endpoint,
        "imds.interval": "200ms",
        "server.listen": "127.0.0.1:0",
        "state.dir": str(directory),
    }
    return load(None, {}, settings)


@contextmanager
def agent_with(config: Config, *, allow_approval: bool = False) -> Iterator[Agent]:
    """An agent that the test starts, and that is stopped at the end."""
    agent = Agent(config, lambda: config, allow_approval=allow_approval)
    with agent._main:
        try:
            yield agent
        finally:
            agent._stop()


@pytest.fixture
def imds() -> Iterator[Simulator]:
    with Simulator((ME,)) as simulator:
        yield simulator


@pytest.fixture(autouse=True)
def _reload_keeps_the_log_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notbefore.agent.agent.set_up", lambda *_: None)


def test_reload_outdates_events_before_it_replaces_runtime(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(imds, tmp_path)
    outdated: list[bool] = []
    published_replace = Published.replace

    def watched(published: Published[Runtime], **changes: Any) -> None:
        outdated.append(agent._state.snapshot.poll.outdated)
        published_replace(published, **changes)

    with Simulator((ME,)) as other, agent_with(config) as agent:
        agent._start_polling(config)
        eventually(lambda: agent._state.snapshot.poll.answered)
        monkeypatch.setattr(Published, "replace", watched)

        agent._use(config_for(other, tmp_path))

        assert outdated == [True]
        assert agent._runtime.current.endpoint == other.endpoint
        eventually(lambda: not agent._state.snapshot.poll.outdated)


def test_answer_in_flight_at_a_reload_is_judged_by_the_old_rules(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_answer = body(item(NotBefore=FUTURE), incarnation=2)
    in_flight = threading.Event()
    stopping = threading.Event()
    judged = threading.Event()
    handle = Tracker.handle
    stop = Polling.stop

    def handle_late(tracker: Tracker, poll: Poll) -> None:
        """Let the last answer of the old IMDS arrive when the reload waits for the old polling."""
        is_last = poll.body == last_answer
        if is_last:
            in_flight.set()
            stopping.wait(PATIENCE)
        handle(tracker, poll)
        if is_last:
            agent._approver.decide()
            judged.set()

    def announced_stop(polling: Polling) -> None:
        stopping.set()
        stop(polling)

    monkeypatch.setattr(polling_module, "THREAD_PATIENCE", PATIENCE)  # on a busy machine too
    monkeypatch.setattr(Tracker, "handle", handle_late)
    monkeypatch.setattr(Polling, "stop", announced_stop)
    config = replace(config_for(imds, tmp_path), approval=NO_EVENT)
    with (
        Simulator((ME,)) as other,
        agent_with(config, allow_approval=True) as agent,
    ):
        other.set_document(body(item("other", NotBefore=FUTURE)))
        agent._start()
        eventually(lambda: agent._state.snapshot.poll.answered)
        imds.set_document(last_answer)
        assert in_flight.wait(PATIENCE)

        agent._use(replace(config_for(other, tmp_path), approval=EVERY_EVENT))
        eventually(lambda: other.start_requests)

        assert judged.is_set()
        assert imds.start_requests == []
        assert set(other.start_requests) == {"other"}


def test_reload_of_name_judges_no_event_by_the_old_name(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch_nothing(_client: object, _timeout: float) -> Vm:
        raise ImdsError("not_found")

    monkeypatch.setattr("notbefore.agent.polling.fetch_vm", fetch_nothing)
    imds.set_document(body(item(NotBefore=FUTURE)))
    config = config_for(imds, tmp_path)
    old = replace(config, vm=VmName(ME), approval=NO_EVENT)
    renamed = replace(config, vm=VmName(PEER), approval=EVERY_EVENT)
    with agent_with(old, allow_approval=True) as agent:
        agent._start()
        eventually(lambda: agent._state.snapshot.poll.answered)
        monkeypatch.setattr(Polling, "start", lambda _: None)  # the new thread is slow

        agent._use(renamed)
        for _ in range(3):
            agent._approver.decide()

        assert agent._state.snapshot.vm_name == ME
        assert imds.start_requests == []


def test_stop_of_polling_waits_until_the_tracker_has_an_answer(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Tracking(tmp_path, Clock())
    agent.runtime.replace(endpoint=imds.endpoint)
    polling = PollThread(agent.runtime, agent.tracker, agent.clock, ThreadGuard())
    stopping = threading.Thread(target=polling.stop)
    still_stopping: list[bool] = []

    def handle_while_stopping(_tracker: Tracker, _poll: Poll) -> None:
        stopping.start()
        stopping.join(0.3)
        still_stopping.append(stopping.is_alive())

    monkeypatch.setattr(polling_module, "THREAD_PATIENCE", PATIENCE)  # on a busy machine too
    monkeypatch.setattr(Tracker, "handle", handle_while_stopping)

    polling._poll()
    stopping.join(PATIENCE)
    polling._poll()  # passes nothing on

    assert still_stopping == [True]

    agent.close()


def test_reload_that_keeps_imds_keeps_the_endpoint_of_the_search(
    imds: Simulator, tmp_path: Path
) -> None:
    other_endpoint = "http://127.0.0.1:9"
    with agent_with(config_for(imds, tmp_path)) as agent:
        agent._runtime.replace(endpoint=other_endpoint)

        agent._use(config_for(imds, tmp_path))

        assert agent._runtime.current.endpoint == other_endpoint
