"""Slack, against a server that refuses what Slack's reference does not allow."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Slack
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


def hook(server: HttpPeer, **fields: Any) -> SinkConfig:
    return SinkConfig(slack=Slack(url=Secret(f"{server.url}/services/T0/B0/x"), **fields))


def test_each_step_of_an_event_is_a_message(slack: SlackServer) -> None:
    steps = (
        message(REBOOT),
        message(REBOOT, REBOOT | STARTED),
        message(REBOOT, REBOOT | STARTED, None),
    )
    sent(hook(slack), *steps)

    titles = [message["blocks"][0]["text"]["text"] for message in slack.messages]

    assert titles[1:] == ["Reboot of WestNO_0 has started", "Reboot of WestNO_0 is over"]
    assert [message["attachments"][0]["color"] for message in slack.messages] == [
        "#c4314b",
        "#c4314b",
        "#2e9e5b",
    ]

    for one, title, content in zip(steps, titles, slack.messages, strict=True):
        # beside blocks the text is for notifications
        shown = json.dumps([content["blocks"], content["attachments"]])
        assert f"Delivery {one.delivery_id}" in shown
        assert shown.count("Reboot of WestNO_0") == 1
        assert content["text"] == title


def test_message_has_times_in_the_readers_zone_and_in_utc(slack: SlackServer) -> None:
    sent(hook(slack))

    shown = json.dumps(slack.messages[0]["attachments"])

    assert "<!date^1772367300^{date_short_pretty} {time_secs}|2026-03-01 12:15:00 UTC>" in shown
    assert "<https://grafana.example.org/d/x?a=1&b=2|Dashboard>" in shown
    for fact in (
        "rg-1",
        "WestNO",
        "zone 2",
        "s-1",
        "Expected interruption*\\n5 s",
        "Platform",
        "Live Migration",
    ):
        assert fact in shown


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
        text = request.body.decode()
        for mention in ("<!channel>", "<@U1>"):
            assert mention not in text
        content = json.loads(text)
        assert "<!here>" not in content["text"]

    shown = json.dumps(slack.messages[0]["attachments"])
    assert "!channel&gt; &lt;\\u200b@\\u200bU1&gt; &amp;" in shown


MANY = st.lists(st.text(min_size=1, max_size=80), max_size=60)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(st.text(max_size=9_000), MANY, st.text(max_size=400))
def test_slack_accepts_any_text_of_azure(
    slack: SlackServer, description: str, names: list[str], event_type: str
) -> None:
    look = {
        "Description": description,
        "Resources": [*names, ME],
        "EventType": f"x{event_type}",
        "EventSource": event_type,
    }

    sent(
        hook(slack),
        message(look),
        with_record_fields(message(look), description=description, event_type=event_type),
    )

    assert slack.faults == []
