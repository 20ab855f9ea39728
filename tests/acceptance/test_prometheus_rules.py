"""From Azure to the pager by way of Prometheus: simulator, agent, scrape, rule, Alertmanager,
receiver.

Debian's Prometheus and Alertmanager run what is in ``config/``, with shorter times and receivers of
ours.
"""

import json
import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import RunningAgent, eventually
from support.alertmanager import alerts, cluster_of_two
from support.azure import body, item
from support.peers import HttpPeer
from support.scraping import Prometheus

CONFIG: Final = Path(__file__).parents[2] / "config"
RULES: Final = CONFIG / "prometheus/notbefore.rules.yml"


def example() -> dict[str, Any]:
    """The example for Alertmanager, with shorter times."""
    config: dict[str, Any] = yaml.safe_load(
        (CONFIG / "alertmanager/alertmanager.yml").read_text(encoding="utf-8")
    )

    def hasten(route: dict[str, Any]) -> None:
        route.update(group_wait="1s", group_interval="1s")
        for inner in route.get("routes", []):
            hasten(inner)

    hasten(config["route"])
    config["templates"] = [str(CONFIG / "alertmanager/notbefore.tmpl")]
    return config


@pytest.mark.long
def test_alertmanager_tells_slack_and_pagerduty_of_event_start_and_end(
    tmp_path: Path,
) -> None:
    """The shipped files as they are, but for the addresses: what people are shown is printed
    (``pytest -s``).
    """
    names = ("web_0", "web_1")
    soon = f"{datetime.now(UTC) + timedelta(minutes=20):%a, %d %b %Y %H:%M:%S GMT}"
    reboot = item(
        "reboot", EventType="Reboot", NotBefore=soon, DurationInSeconds=-1, Resources=list(names)
    )
    with ExitStack() as stack:
        simulator = stack.enter_context(Simulator(names))
        slack = stack.enter_context(HttpPeer())
        pager = stack.enter_context(PagerDuty())
        sink = stack.enter_context(HttpPeer())
        own = {"sinks": {"am": {"alertmanager": {"urls": [sink.url]}}}}
        agents = [
            stack.enter_context(RunningAgent(simulator.endpoint_of(name), tmp_path / name, own))
            for name in names
        ]
        key = tmp_path / "key"
        config = example()
        key.write_text(ROUTING_KEY, encoding="utf-8")
        config["global"] = {"slack_api_url": slack.url, "pagerduty_url": f"{pager.url}/v2/enqueue"}
        config["receivers"][0]["pagerduty_configs"][0]["routing_key_file"] = str(key)
        members = stack.enter_context(cluster_of_two(tmp_path, config))
        managers = [{"static_configs": [{"targets": [f"127.0.0.1:{port}" for port in members]}]}]
        alerting = {"alertmanagers": managers}
        targets = [{"targets": [f"127.0.0.1:{agent.port}" for agent in agents]}]
        stack.enter_context(
            Prometheus(tmp_path, targets, rule_files=[str(RULES)], alerting=alerting)
        )

        def in_slack() -> str:
            shown = [json.loads(request.body)["attachments"][0] for request in slack.requests]
            return "\n".join(f"{one['title']}\n{one.get('text', '')}" for one in shown)

        def on_call() -> list[str]:
            return [
                f"{step.effect}: {step.event.get('payload', {}).get('summary', '')}"
                for step in pager.steps
            ]

        simulator.set_document(body(reboot, incarnation=2))

        eventually(lambda: "Reboot of web_0, web_1, not before 20" in in_slack())
        eventually(lambda: pager.steps)
        assert on_call()[0].startswith("opened: Reboot of web_0, web_1, not before 20")
        assert "UTC" in on_call()[0]
        assert "Azure will reboot web_0, web_1. What to do: Move or stop" in in_slack()
        assert "Azure says: Virtual machine is being paused" in in_slack()

        # notbefore's own sink gives an alert the same labels
        (alert,) = alerts(members[0])
        (sent,) = json.loads(eventually(lambda: sink.requests)[0].body)

        assert sent["labels"] == alert["labels"]

        simulator.set_document(
            body({**reboot, "EventStatus": "Started", "NotBefore": ""}, incarnation=3)
        )

        eventually(lambda: "Reboot of web_0, web_1 has started" in in_slack())
        eventually(lambda: any("has started" in one for one in on_call()))
        assert "Azure started the Reboot reboot at 20" in in_slack()
        assert "is over" not in in_slack()

        simulator.set_document(body(incarnation=4))
        eventually(lambda: "Reboot of web_0, web_1 is over" in in_slack())
        eventually(lambda: pager.effects[-1] == "resolved")

        sys.stdout.write(f"Slack:\n{in_slack()}\nPagerDuty:\n" + "\n".join(on_call()) + "\n")
        assert "any moment" not in in_slack()
        assert not pager.faults
