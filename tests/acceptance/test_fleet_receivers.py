"""What people get of a fleet: a wave of 500 VMs, and single events, at an Alertmanager, a pager,
Slack and by mail.
"""

import email
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.core.record import Record
from peers.pagerduty import ROUTING_KEY, PagerDuty
from peers.slack import SlackServer, SlackWorkspace
from support.agent import eventually
from support.alertmanager import alerts, cluster_of_two
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.needs import needs
from support.peers import HttpPeer, MailPeer

VMS = [vm(f"web_{number}") for number in range(500)]
PATIENCE = 120.0


class Receivers:
    """All of them, and what each got."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        needs("prometheus-alertmanager", "proton")
        self.hub = stack.enter_context(Hub(directory))
        self.slack = stack.enter_context(SlackServer())
        self.workspace = stack.enter_context(SlackWorkspace())
        self.pager = stack.enter_context(PagerDuty())
        self.hook = stack.enter_context(HttpPeer())
        self.behind = stack.enter_context(HttpPeer())
        self.mail = stack.enter_context(MailPeer())
        route = {"group_by": ["alertname", "event_id"], "group_wait": "1s", "group_interval": "1s"}
        hook = {
            "name": "hook",
            "webhook_configs": [{"url": self.behind.url, "send_resolved": True}],
        }
        # an alert that has no end of its own is over soon: one of the fleet is not sent again while
        # its event lasts
        routing = {
            "global": {"resolve_timeout": "1s"},
            "route": {"receiver": "hook", **route},
            "receivers": [hook],
        }
        # one of the two is notified: what a cluster makes of it is test_one_reboot's
        self.alertmanager = stack.enter_context(cluster_of_two(directory, routing))[0]

    def configuration(self, directory: Path, **fleet: Any) -> Path:
        path = write_fleet_config(directory, self.hub, self.hook.url, **fleet)
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        mail = {
            "host": "127.0.0.1",
            "port": self.mail.port,
            "tls": "none",
            "from": "a@b.org",
            "to": ["c@b.org"],
        }
        values["sinks"] |= {
            "chat": {"slack": {"url": self.slack.url}},
            "bot": {
                "slack": {
                    "token": self.workspace.token,
                    "channel": "#oncall",
                    "api_url": self.workspace.api_url,
                }
            },
            "pager": {
                "pagerduty": {"routing_key": ROUTING_KEY, "url": f"{self.pager.url}/v2/enqueue"}
            },
            "am": {"alertmanager": {"urls": [f"http://127.0.0.1:{self.alertmanager}"]}},
            "mail": {"email": mail},
        }
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    @property
    def steps(self) -> list[str]:
        """What the webhook was notified of."""
        return [
            json.loads(request.body)["azure.scheduled_event.change"]
            for request in self.hook.requests
        ]

    @property
    def alerts(self) -> list[str]:
        """What the receiver behind the Alertmanagers was notified of."""
        return [json.loads(request.body)["status"] for request in self.behind.requests]

    @property
    def threads(self) -> set[str]:
        """The threads of the mails."""
        return {str(email.message_from_bytes(body)["References"]) for _, body in self.mail.mails}


@pytest.fixture
def receivers(tmp_path: Path) -> Iterator[Receivers]:
    with ExitStack() as stack:
        yield Receivers(stack, tmp_path)


def reports(kind: Any, numbers: range, **more: Any) -> list[Record]:
    """Each VM has an event of its own, which it reports, and so do its two neighbours."""
    return [
        report(
            VMS[(number + other) % 500], kind, f"E-{number}", resources=[VMS[number].name], **more
        )
        for number in numbers
        for other in range(3)
    ]


@pytest.mark.long
def test_wave_of_500_vms_is_one_incident_and_few_messages(
    receivers: Receivers, tmp_path: Path
) -> None:
    grouping = {
        "group_by": ["subscription", "resource_group", "scale_set", "event_type"],
        "group_wait": "2s",
        "group_interval": "4s",
    }
    with RunningFleet(receivers.configuration(tmp_path, **grouping), tmp_path / "state") as fleet:
        news = 'notbefore_fleet_records_total{result="news"}'
        send(receivers.hub, reports("announced", range(100)))

        eventually(lambda: receivers.steps == ["announced"], PATIENCE)
        eventually(lambda: len(alerts(receivers.alertmanager)) == 1, PATIENCE)

        send(receivers.hub, reports("announced", range(100, 500)))
        eventually(lambda: receivers.steps[-1] == "updated", PATIENCE)  # the digest
        eventually(
            lambda: len(fleet.json("/api/v1/fleet/events")["waves"][0]["vms"]) == 500, PATIENCE
        )

        send(receivers.hub, reports("started", range(500)))
        eventually(lambda: "started" in receivers.steps, PATIENCE)
        eventually(lambda: (fleet.metric(news) or 0) >= 1000, PATIENCE)

        send(receivers.hub, reports("finished", range(500), interruption=7.0))

        eventually(lambda: receivers.steps[-1] == "finished", PATIENCE)
        eventually(lambda: receivers.alerts[-1:] == ["resolved"], PATIENCE)
        eventually(lambda: receivers.pager.effects[-1:] == ["resolved"], PATIENCE)
        eventually(lambda: len(receivers.mail.mails) == len(receivers.steps), PATIENCE)
        eventually(lambda: alerts(receivers.alertmanager) == [], PATIENCE)
        assert fleet.stop() == 0
    digests = [step for step in receivers.steps if step == "updated"]

    assert [step for step in receivers.steps if step != "updated"] == [
        "announced",
        "started",
        "finished",
    ]
    assert 1 <= len(digests) <= 10, "one in each group_interval"
    assert json.loads(receivers.hook.requests[-1].body)["azure.scheduled_event.fleet.vms"] == 500

    effects = receivers.pager.effects

    assert effects.count("opened") == 1
    assert effects.count("resolved") == 1
    assert receivers.pager.faults == []
    assert len(receivers.slack.messages) == len(receivers.steps)
    (posted,) = receivers.workspace.posted
    assert posted.title == receivers.slack.titles[-1]
    assert len(posted.thread) == len(receivers.steps)
    assert receivers.workspace.faults == []
    assert receivers.alerts == ["firing", "resolved"]
    assert len(receivers.threads) == 1
