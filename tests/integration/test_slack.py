"""Slack, against a server that refuses what Slack's reference does not allow."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notbefore.config.messages import Links, Messages
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Slack
from notbefore.courier.message import Message, Receipt
from notbefore.errors import SendError
from peers.slack import CHANNEL, TOKEN, SlackServer
from support.azure import ME, STARTED
from support.messages import message, recording, sink_of
from support.peers import ConnectProxy, HttpPeer, Say

LINKS = Links(dashboard="https://grafana.example.org/d/x?a=1&b=2", runbook="https://wiki.example.org/r")
SETTINGS = Messages(links=LINKS)
REBOOT = {"EventType": "Reboot"}


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server
        assert server.faults == []


def bot(server: HttpPeer, **fields: Any) -> SinkConfig:
    return SinkConfig(slack=Slack(token=Secret(TOKEN), channel=CHANNEL, api=f"{server.url}/api", **fields))


def hook(server: HttpPeer, **fields: Any) -> SinkConfig:
    return SinkConfig(slack=Slack(url=Secret(f"{server.url}/services/T0/B0/x"), **fields))


def sent(config: SinkConfig, *messages: Message) -> list[Receipt]:
    """Send them one after the other, as the courier does: the thread of one is given to the next."""
    sink, receipts, thread = sink_of(config, SETTINGS), list[Receipt](), None
    try:
        for one in messages or (message(),):
            receipts.append(sink.send(msgspec.structs.replace(one, thread=one.thread or thread)))
            thread = receipts[-1].thread or thread
    finally:
        sink.close()
    return receipts


def title(content: dict[str, Any]) -> str:
    """What is read first."""
    (header,) = content["blocks"]
    found: str = header["text"]["text"]
    return found


def color(content: dict[str, Any]) -> str:
    (attachment,) = content["attachments"]
    found: str = attachment["color"]
    return found


LIFE = (message(REBOOT), message(REBOOT, REBOOT | STARTED), message(REBOOT, REBOOT | STARTED, None))


def test_with_a_token_an_event_is_one_message_that_is_brought_up_to_date(slack: SlackServer) -> None:
    colors, titles = [], []
    sink, thread = sink_of(bot(slack), SETTINGS), None
    for one in LIFE:
        thread = sink.send(msgspec.structs.replace(one, thread=thread)).thread
        root = next(iter(slack.messages.values()))
        colors.append(color(root))
        titles.append(title(root))
    sink.close()
    assert titles[1:] == [
        "Reboot of WestNO_0 has started",
        "Reboot of WestNO_0 is over",
    ]
    assert colors == ["#c4314b", "#c4314b", "#2e9e5b"]
    name = next(iter(slack.messages))
    steps = slack.thread(name)
    assert [step["text"].splitlines()[0] for step in steps] == [f"*{text}*" for text in titles[1:]]
    assert [one["metadata"]["event_payload"]["delivery_id"] for one in steps] == [one.delivery_id for one in LIFE[1:]]
    # everybody is to see that it has started, and nothing else beside the one message
    assert [one.get("reply_broadcast", False) for one in slack.channel] == [False, True]


def test_with_a_webhook_each_step_is_a_message(slack: SlackServer) -> None:
    sent(hook(slack), *LIFE)
    assert len(slack.channel) == 3
    for one, content in zip(LIFE, slack.channel, strict=True):
        shown = json.dumps([content["blocks"], content["attachments"]])  # beside blocks the text is for notifications
        assert f"Delivery {one.delivery_id}" in shown
        assert shown.count("Reboot of WestNO_0") == 1
        assert content["text"] == title(content)


def test_times_stand_in_the_reader_s_zone_and_in_utc(slack: SlackServer) -> None:
    sent(hook(slack))
    shown = json.dumps(slack.channel[0]["attachments"])
    assert "<!date^1772367300^{date_short_pretty} {time_secs}|2026-03-01 12:15:00 UTC>" in shown
    assert "<https://grafana.example.org/d/x?a=1&b=2|Dashboard>" in shown
    for fact in ("rg-1", "WestNO", "zone 2", "s-1", "Expected interruption*\\n5 s", "Platform", "Live Migration"):
        assert fact in shown


@pytest.mark.parametrize("error", ["message_not_found", "edit_window_closed"])
def test_what_cannot_be_updated_is_posted_anew_and_is_the_message_from_then_on(slack: SlackServer, error: str) -> None:
    slack.refuse["chat.update"] = [error]
    receipts = sent(bot(slack), *LIFE)
    first, second = (name for name, one in slack.messages.items() if "thread_ts" not in one)
    assert [receipt.thread for receipt in receipts] == [f"{CHANNEL} {name}" for name in (first, second, second)]
    assert title(slack.messages[second]) == "Reboot of WestNO_0 is over"
    assert len(slack.thread(first)) == 0
    assert len(slack.thread(second)) == 1


def test_where_a_thread_takes_nothing_the_message_goes_to_the_channel(slack: SlackServer) -> None:
    (first,) = sent(bot(slack), LIFE[0])
    slack.refuse["chat.postMessage"] = ["restricted_action_thread_locked"]
    (second,) = sent(bot(slack), msgspec.structs.replace(LIFE[1], thread=first.thread))
    assert second.thread != first.thread
    assert ["thread_ts" in one for one in slack.channel] == [False, False]
    assert {title(one) for one in slack.channel} == {"Reboot of WestNO_0 has started"}


@pytest.mark.parametrize("method", ["chat.postMessage", "chat.update"])
def test_a_pause_that_slack_asks_for_is_kept_and_no_step_is_lost_or_doubled(slack: SlackServer, method: str) -> None:
    (first,) = sent(bot(slack), LIFE[0])
    again = msgspec.structs.replace(LIFE[1], thread=first.thread)
    slack.refuse[method] = ["ratelimited"]
    with pytest.raises(SendError) as raised:
        sent(bot(slack), again)
    assert (raised.value.permanent, raised.value.retry_after) == (False, 30.0)
    sent(bot(slack), again)
    assert len(slack.messages) == 2


@pytest.mark.parametrize("said", [b"<html>log in first</html>", b"no_service", b""])
def test_a_webhook_says_ok_and_nothing_else(said: bytes) -> None:
    with HttpPeer() as peer:
        peer.default = Say(body=said)
        with pytest.raises(SendError, match="this is not an answer of Slack") as raised:
            sent(hook(peer))
    assert not raised.value.permanent


@pytest.mark.parametrize(
    ("said", "permanent"),
    [
        (b'{"ok":false,"error":"invalid_auth"}', True),
        (b'{"ok":false,"error":"channel_not_found"}', True),
        (b'{"ok":false,"error":"ratelimited"}', False),
        (b'{"ok":false,"error":"internal_error"}', False),
        (b"<html>maintenance</html>", False),
        (b"{}", True),
    ],
)
def test_a_refusal_is_understood(said: bytes, *, permanent: bool) -> None:
    with HttpPeer() as peer:
        peer.default = Say(body=said)
        with pytest.raises(SendError) as raised:
            sent(bot(peer))
    assert raised.value.permanent == permanent


def test_what_azure_says_mentions_nobody(slack: SlackServer) -> None:
    evil = {"Description": "<!channel> <@U1> & <https://evil.example|click>", "EventType": "<!here>"}
    sent(bot(slack), message(evil), message(evil, evil | STARTED))
    for request in slack.requests:
        text = request.body.decode()
        for mention in ("<!channel>", "<@U1>"):
            assert mention not in text
        content = json.loads(text)
        assert "<!here>" not in content["text"]
    assert "&lt;!channel&gt; &lt;@U1&gt; &amp;" in json.dumps(slack.channel[0]["attachments"])


MANY = st.lists(st.text(min_size=1, max_size=80), max_size=60)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.text(max_size=9_000), MANY, st.text(max_size=400))
def test_slack_takes_whatever_azure_says(
    slack: SlackServer, description: str, names: list[str], event_type: str
) -> None:
    look = {
        "Description": description,
        "Resources": [*names, ME],
        "EventType": f"x{event_type}",
        "EventSource": event_type,
    }
    sent(bot(slack), message(look), recording(message(look), description=description, event_type=event_type))
    assert slack.faults == []


def test_it_is_reached_through_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with HttpPeer(authority, "hooks.slack.com") as peer, ConnectProxy(peer.port) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        sent(SinkConfig(slack=Slack(url=Secret("https://hooks.slack.com/services/T0/B0/x"))))
        (request,) = peer.requests
        assert proxy.asked == ["hooks.slack.com:443"]
    assert request.path == "/services/T0/B0/x"
    assert json.loads(request.body)["text"].startswith("Freeze of WestNO_0 was due ")
