"""The dead man's switch of the installed agent: it pings while it polls well, says so where it does not, and stops."""

from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import ME
from support.peers import HttpPeer


def test_who_waits_for_pings_hears_when_imds_is_silent_and_when_the_agent_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"heartbeat": {"every": "10s", "ping_url_env": "PING_URL"}}
    with HttpPeer() as switch, Simulator((ME,)) as simulator:
        monkeypatch.setenv("PING_URL", f"{switch.url}/uuid")
        with RunningAgent(simulator.endpoint, tmp_path / "state", config) as agent:
            eventually(lambda: [request.path for request in switch.requests if request.path == "/uuid"])
            assert switch.requests[0].path in ("/uuid/start", "/uuid")  # IMDS may have been faster
            assert agent.metric("notbefore_courier_running") == 0  # no process was started for it
            simulator.fault("status", times=1000)
            eventually(lambda: switch.requests[-1].path == "/uuid/fail")
            assert b"the last good answer of IMDS is" in switch.requests[-1].body
            agent.stop()
        assert "uuid" not in agent.log
