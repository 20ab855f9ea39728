"""``Agent`` in this process: the order of the steps of a reload."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.agent.agent import Agent
from notbefore.agent.polling import Polling, PollThread
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Poll, Tracker
from notbefore.config.load import load
from notbefore.config.model import Config, Otlp, VmName
from notbefore.config.secret import Secret
from notbefore.core.approval import Policy, Rule
from notbefore.core.record import Vm
from notbefore.errors import ImdsError
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, eventually, free_port
from support.azure import FUTURE, ME, PEER, body, item
from support.peers import black_hole
from support.tracking import Tracking


def config_for(imds: Simulator, directory: Path) -> Config:
    settings = {
        "imds.endpoint": imds.endpoint,
        "imds.interval": "200ms",
        "server.listen": "127.0.0.1:0",
        "state.dir": str(directory),
    }
    return load(None, {}, settings)


@pytest.fixture
def imds() -> Iterator[Simulator]:
    with Simulator((ME,)) as simulator:
        yield simulator


def test_reload_outdates_events_before_it_replaces_runtime(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(imds, tmp_path)
    agent = Agent(config, lambda: config)
    outdated: list[bool] = []
    published_replace = Published.replace

    def watched(published: Published[Runtime], **changes: Any) -> None:
        outdated.append(agent._state.snapshot.poll.outdated)
        published_replace(published, **changes)

    monkeypatch.setattr("notbefore.agent.agent.set_up", lambda *_: None)  # the log of the tests
    with Simulator((ME,)) as other, agent._main:
        try:
            agent._start_polling(config)
            eventually(lambda: agent._state.snapshot.poll.answered)
            assert not agent._state.snapshot.poll.outdated

            monkeypatch.setattr(Published, "replace", watched)

            agent._use(config_for(other, tmp_path))

            assert outdated == [True]
            assert agent._runtime.current.endpoint == other.endpoint
            eventually(lambda: not agent._state.snapshot.poll.outdated)
        finally:
            agent._stop()


def test_reload_approves_nothing_at_old_imds_by_new_rules(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_event = Policy(enabled=True, dry_run=False, rules=(Rule("all"),))
    no_event = Policy(enabled=True, dry_run=False)
    imds.set_document(body(item(NotBefore=FUTURE)))
    monkeypatch.setattr("notbefore.agent.agent.set_up", lambda *_: None)  # the log of the tests
    port = free_port()
    with Simulator((ME,)) as other, black_hole(port) as host:
        hanging = f"http://{host}:{port}"
        other.set_document(body(item("other", NotBefore=FUTURE)))
        settings = config_for(imds, tmp_path)
        kept = replace(settings, approval=no_event, otlp=Otlp(endpoint=hanging))
        agent = Agent(kept, lambda: kept, allow_approval=True)
        with agent._main:
            try:
                agent._start()
                eventually(lambda: agent._state.snapshot.poll.answered)
                assert agent._exporter is not None

                agent._exporter.wake()  # an export hangs while the exporter is replaced

                for number in range(1, 4):
                    headers = {"X-Number": Secret(str(number))}
                    agent._use(
                        replace(
                            kept,
                            imds=config_for(other, tmp_path).imds,
                            approval=every_event,
                            otlp=Otlp(endpoint=hanging, headers=headers),
                        )
                    )
                    eventually(lambda: other.start_requests)
                    agent._use(kept)
                    eventually(lambda: not agent._state.snapshot.poll.outdated)

                assert set(other.start_requests) == {"other"}
                assert imds.start_requests == []
            finally:
                agent._stop()


def test_reload_of_name_judges_no_event_by_the_old_name(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch_nothing(_client: object, _timeout: float) -> Vm:
        raise ImdsError("not_found")

    monkeypatch.setattr("notbefore.agent.polling.fetch_vm", fetch_nothing)
    imds.set_document(body(item(NotBefore=FUTURE)))
    every_event = Policy(enabled=True, dry_run=False, rules=(Rule("all"),))
    no_event = Policy(enabled=True, dry_run=False)
    settings = config_for(imds, tmp_path)
    kept = replace(settings, vm=VmName(ME), approval=no_event)
    renamed = replace(settings, vm=VmName(PEER), approval=every_event)
    agent = Agent(kept, lambda: kept, allow_approval=True)
    monkeypatch.setattr("notbefore.agent.agent.set_up", lambda *_: None)
    with agent._main:
        try:
            agent._start()
            eventually(lambda: agent._state.snapshot.poll.answered)
            assert agent._state.snapshot.vm_name == ME

            monkeypatch.setattr(Polling, "start", lambda _: None)  # the new thread is slow

            agent._use(renamed)

            assert agent._state.snapshot.vm_name == ME

            for _ in range(3):
                agent._approver.decide()
            assert imds.start_requests == []
        finally:
            agent._stop()


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

    monkeypatch.setattr(Tracker, "handle", handle_while_stopping)

    polling._poll()
    stopping.join(PATIENCE)
    polling._poll()  # hands nothing on

    assert still_stopping == [True]

    agent.close()


def test_reload_that_keeps_imds_keeps_found_endpoint(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(imds, tmp_path)
    agent = Agent(config, lambda: config)
    found = "http://127.0.0.1:9"

    monkeypatch.setattr("notbefore.agent.agent.set_up", lambda *_: None)
    with agent._main:
        try:
            agent._runtime.replace(endpoint=found)

            agent._use(config_for(imds, tmp_path))

            assert agent._runtime.current.endpoint == found
        finally:
            agent._stop()
