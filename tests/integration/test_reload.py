"""``Agent`` in this process: the order of the steps of a reload."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notbefore.agent.agent import Agent
from notbefore.agent.runtime import Published, Runtime
from notbefore.config.load import load
from notbefore.config.model import Config
from notbefore.simulator.server import Simulator
from support.agent import eventually
from support.azure import ME


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
    replace = Published.replace

    def watched(published: Published[Runtime], **changes: Any) -> None:
        outdated.append(agent._state.snapshot.poll.outdated)
        replace(published, **changes)

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
