"""The installed agent reports a recommendation about a Spot VM, from IMDS to the history."""

from pathlib import Path

from notbefore.core.event_types import SPOT_REBALANCE
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore
from support.azure import ME
from support.peers import HttpPeer

ENDED_AT = "azure_scheduled_event_ended_timestamp_seconds"
RULE = {"match": "all", "name": "everything"}


def test_recommendation_is_reported_until_withdrawn_and_not_approved(
    hook: HttpPeer, tmp_path: Path
) -> None:
    config = {
        "approval": {"enabled": True, "dry_run": False, "rules": [RULE]},
        "sinks": {"hook": {"webhook": {"url": hook.url, "allow_private": True}}},
    }
    with (
        Simulator((ME,)) as imds,
        RunningAgent(imds.endpoint, tmp_path / "state", config, "--allow-approval") as agent,
    ):
        event_id = imds.start("spot-rebalance")
        agent.wait_for_changes("announced")
        # the announcement expires if the end comes before it is sent
        eventually(lambda: agent.count("delivered") == 1)
        agent.wait_until_listening()
        by_hand = notbefore("approve", event_id, "--yes", "--state-dir", str(agent.state))

        imds.clear()
        _, end = agent.wait_for_changes("announced", "ended")
        eventually(lambda: len(hook.requests) == 2)
        ended_at = agent.metric(f'{ENDED_AT}{{event_id="{event_id}",outcome="unknown"}}')

    assert imds.start_requests == []
    assert by_hand.returncode == 1
    assert "it is a recommendation" in by_hand.stderr
    assert end["azure.scheduled_event.type"] == SPOT_REBALANCE
    assert end["azure.scheduled_event.reason"] == "withdrawn"
    assert end["azure.scheduled_event.outcome"] == "unknown"
    assert "azure.scheduled_event.not_before" not in end
    assert ended_at is not None
    assert hook.kinds == ["announced", "ended"]
