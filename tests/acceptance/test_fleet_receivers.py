"""A wave of 500 VMs reaches Alertmanager, a pager, Slack and a mail server as few messages."""

import email
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.core.change import LifecycleKind
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
GROUP_INTERVAL = 4.0  # seconds


class Receivers:
    """A hub and a receiver of each kind."""

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
        # An alert without an end resolves after a second. This proves that an alert of the fleet,
        # which is not sent again while its event lasts, has an end of its own.
        routing = {
            "global": {"resolve_timeout": "1s"},
            "route": {"receiver": "hook", **route},
            "receivers": [hook],
        }
        # only one member is used: test_one_reboot uses both
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
        # otherwise a sink that is slower than another drops its digests once the wave is over
        for sink in values["sinks"].values():
            for settings in sink.values():
                settings["expire_on_end"] = False
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    @property
    def steps(self) -> list[str]:
        """The changes that the webhook received."""
        return [
            json.loads(request.body)["azure.scheduled_event.change"]
            for request in self.hook.requests
        ]

    @property
    def alerts(self) -> list[str]:
        """The notifications that the receiver behind Alertmanager received."""
        return [json.loads(request.body)["status"] for request in self.behind.requests]

    @property
    def threads(self) -> set[str]:
        """The threads of the mails."""
        return {str(email.message_from_bytes(body)["References"]) for _, body in self.mail.mails}


@pytest.fixture
def receivers(tmp_path: Path) -> Iterator[Receivers]:
    with ExitStack() as stack:
        yield Receivers(stack, tmp_path)


def reports(kind: LifecycleKind, numbers: range, **fields: Any) -> list[Record]:
    """Return reports of one event for each of these VMs: by the VM and its two neighbors."""
    records: list[Record] = []
    for number in numbers:
        affected = [VMS[number].name]
        for distance in range(3):
            reporter = VMS[(number + distance) % 500]
            records.append(report(reporter, kind, f"E-{number}", resources=affected, **fields))
    return records


def vms_of_wave(fleet: RunningFleet) -> int:
    """Return how many VMs the only open wave affects."""
    (wave,) = fleet.json("/api/v1/fleet/events")["waves"]
    return len(wave["vms"])


@pytest.mark.long
def test_wave_of_500_vms_is_one_incident_and_few_messages(
    receivers: Receivers, tmp_path: Path
) -> None:
    grouping = {
        "group_by": ["subscription", "resource_group", "scale_set", "event_type"],
        "group_wait": "2s",
        "group_interval": f"{GROUP_INTERVAL:g}s",
    }
    news = 'notbefore_fleet_records_total{result="news"}'
    with RunningFleet(receivers.configuration(tmp_path, **grouping), tmp_path / "state") as fleet:
        began = time.monotonic()
        send(receivers.hub, reports("announced", range(100)))
        eventually(lambda: receivers.steps)
        eventually(lambda: len(alerts(receivers.alertmanager)) == 1)

        send(receivers.hub, reports("announced", range(100, 500)))
        eventually(lambda: receivers.steps[-1] == "updated")
        eventually(lambda: vms_of_wave(fleet) == 500)

        send(receivers.hub, reports("started", range(500)))
        eventually(lambda: "started" in receivers.steps)
        eventually(lambda: (fleet.metric(news) or 0) >= 1000)

        send(receivers.hub, reports("finished", range(500), interruption=7.0))
        eventually(lambda: receivers.steps[-1] == "finished")
        most_digests = (time.monotonic() - began) / GROUP_INTERVAL
        for sink in ("am", "bot", "chat", "hook", "mail", "pager"):
            eventually(lambda: fleet.count("delivered", sink) == len(receivers.steps))
        eventually(lambda: alerts(receivers.alertmanager) == [])
        eventually(lambda: receivers.alerts[-1:] == ["resolved"])
        assert fleet.stop() == 0

    steps = [step for step in receivers.steps if step != "updated"]
    assert steps == ["announced", "started", "finished"]
    assert 1 <= receivers.steps.count("updated") <= most_digests, "one in each group_interval"
    last = json.loads(receivers.hook.requests[-1].body)
    assert last["azure.scheduled_event.fleet.vms"] == 500

    effects = receivers.pager.effects
    assert effects.count("opened") == 1
    assert effects.count("resolved") == 1
    assert effects[-1] == "resolved"
    assert receivers.pager.faults == []

    assert len(receivers.slack.messages) == len(receivers.steps)
    (posted,) = receivers.workspace.posted
    assert posted.title == receivers.slack.titles[-1]
    assert len(posted.thread) == len(receivers.steps)
    assert receivers.workspace.faults == []

    assert receivers.alerts == ["firing", "resolved"]
    assert len(receivers.mail.mails) == len(receivers.steps)
    assert len(receivers.threads) == 1
