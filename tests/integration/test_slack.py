"""Slack, against a server that refuses what Slack's reference does not allow."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Slack
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from peers.slack import SlackServer
from support.azure import ME, STARTED
from support.messages import message, sent, with_record_fields
from support.peers import Answer, HttpPeer

REBOOT = {"EventType": "Reboot"}


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server
        assert server.faults == []


def hook(server: HttpPeer) -> SinkConfig:
    url = Secret(f"{server.url}/services/T0/B0/x")
    return SinkConfig(slack=Slack(url=url, timeout=Duration("60s")))


STEPS = (
    message(REBOOT),
    message(REBOOT, REBOOT | STARTED),
    message(REBOOT, REBOOT | STARTED, None),
)


def test_each_step_of_an_event_is_a_message(slack: SlackServer) -> None:
    sent(hook(slack), *STEPS)

    _, started, finished = (content["blocks"][0]["text"]["text"] for content in slack.messages)
    colors = [content["attachments"][0]["color"] for content in slack.messages]
    assert started == "Reboot of WestNO_0 has started"
    assert finished == "Reboot of WestNO_0 is over"
    assert colors == ["#c4314b", "#c4314b", "#2e9e5b"]


@pytest.mark.parametrize("step", STEPS, ids=["announced", "started", "finished"])
def test_message_has_its_title_once_and_its_delivery_id(slack: SlackServer, step: Message) -> None:
    sent(hook(slack), step)

    (content,) = slack.messages
    text = json.dumps([content["blocks"], content["attachments"]])
    assert f"Delivery {step.delivery_id}" in text
    assert text.count("Reboot of WestNO_0") == 1
    # with blocks, Slack shows the text only in notifications
    assert content["text"] == content["blocks"][0]["text"]["text"]


def test_message_has_times_in_the_readers_zone_and_in_utc(slack: SlackServer) -> None:
    sent(hook(slack))

    text = json.dumps(slack.messages[0]["attachments"])
    assert "<!date^1772367300^{date_short_pretty} {time_secs}|2026-03-01 12:15:00 UTC>" in text


def test_message_links_the_dashboard(slack: SlackServer) -> None:
    sent(hook(slack))

    text = json.dumps(slack.messages[0]["attachments"])
    assert "<https://grafana.example.org/d/x?a=1&b=2|Dashboard>" in text


@pytest.mark.parametrize(
    "fact",
    [
        "rg-1",
        "WestNO",
        "zone 2",
        "s-1",
        "Expected interruption*\\n5 s",
        "Platform",
        "Live Migration",
    ],
)
def test_message_has_the_facts_of_the_event(slack: SlackServer, fact: str) -> None:
    sent(hook(slack))

    assert fact in json.dumps(slack.messages[0]["attachments"])


@pytest.mark.parametrize("body", [b"", b"no_service", b'{"success":true}', b"<Response/>"])
def test_any_success_accepts_a_message(peer: HttpPeer, body: bytes) -> None:
    peer.default = Answer(body=body)

    sent(hook(peer))

    assert len(peer.requests) == 1


def test_texts_of_azure_mention_no_one(slack: SlackServer) -> None:
    evil = {
        "Description": "<!channel> <@U1> & <https://evil.example|click>",
        "EventType": "<!here>",
    }

    sent(hook(slack), message(evil), message(evil, evil | STARTED))

    for request in slack.requests:
        body = request.body.decode()
        assert "<!channel>" not in body
        assert "<@U1>" not in body
        assert "<!here>" not in json.loads(body)["text"]
    text = json.dumps(slack.messages[0]["attachments"])
    assert "!channel&gt; &lt;\\u200b@\\u200bU1&gt; &amp;" in text


MANY = st.lists(st.text(min_size=1, max_size=80), max_size=60)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(st.text(max_size=9_000), MANY, st.text(max_size=400))
def test_slack_accepts_any_text_of_azure(
    slack: SlackServer, description: str, names: list[str], event_type: str
) -> None:
    announced = message(
        {
            "Description": description,
            "Resources": [*names, ME],
            "EventType": f"x{event_type}",
            "EventSource": event_type,
        }
    )
    unbounded = with_record_fields(announced, description=description, event_type=event_type)

    sent(hook(slack), announced, unbounded)

    assert slack.faults == []
