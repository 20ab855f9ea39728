"""Slack with a bot token, against a server that refuses what Slack's reference does not allow."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Slack
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.courier.slack_bot import TODO
from notbefore.errors import SendError
from peers.slack import SlackWorkspace
from support.azure import STARTED
from support.messages import message, outcomes, sent, sink_of
from support.peers import Answer

REBOOT = {"EventType": "Reboot"}
ANNOUNCED = message(REBOOT)
HAS_STARTED = message(REBOOT, REBOOT | STARTED)
FINISHED = message(REBOOT, REBOOT | STARTED, None)
ANNOUNCED_TITLE = "Reboot of WestNO_0 in 14 min"
STARTED_TITLE = "Reboot of WestNO_0 has started"
FINISHED_TITLE = "Reboot of WestNO_0 is over"


@pytest.fixture
def slack() -> Iterator[SlackWorkspace]:
    with SlackWorkspace() as workspace:
        yield workspace
        assert workspace.faults == []


def bot(workspace: SlackWorkspace, **fields: Any) -> SinkConfig:
    """Return a sink that posts in the channel of a workspace; ``fields``: other settings."""
    settings = {
        "token": Secret(workspace.token),
        "channel": "#oncall",
        "api_url": workspace.api_url,
        "timeout": Duration("60s"),
        **fields,
    }
    return SinkConfig(slack=Slack(**settings))


def continued(step: Message, thread: str | None) -> Message:
    """Return a later message of an event whose sink returned ``thread``."""
    return msgspec.structs.replace(step, thread=thread)


def send_steps(config: SinkConfig, *steps: Message) -> str:
    """Send the steps of one event, each with a new sink; return its thread."""
    thread: str | None = None
    for step in steps:
        (receipt,) = sent(config, continued(step, thread))
        thread = receipt.thread
    assert thread is not None
    return thread


def failure(config: SinkConfig, step: Message) -> SendError:
    """Send a step that fails, and return the error."""
    (error,) = outcomes(sink_of(config), step)
    assert isinstance(error, SendError)
    return error


def refusal(name: str, **fields: str) -> Answer:
    """Return Slack's answer to a request that it refuses; ``name``: of the error."""
    return Answer(body=json.dumps({"ok": False, "error": name, **fields}).encode())


def test_steps_of_an_event_update_one_message_and_reply(slack: SlackWorkspace) -> None:
    send_steps(bot(slack), ANNOUNCED, HAS_STARTED, FINISHED)

    (posted,) = slack.posted
    assert posted.title == FINISHED_TITLE
    assert posted.thread == [ANNOUNCED_TITLE, STARTED_TITLE, FINISHED_TITLE]
    assert posted.content["attachments"][0]["color"] == "#2e9e5b"
    assert slack.methods == [
        "chat.postMessage",
        "chat.postMessage",
        *(["chat.update", "chat.postMessage"] * 2),
    ]


def test_critical_step_is_also_sent_to_the_channel(slack: SlackWorkspace) -> None:
    reminder = message(REBOOT, kind="reminder", delivery_id="r")

    send_steps(bot(slack), ANNOUNCED, reminder, HAS_STARTED, FINISHED)

    (posted,) = slack.posted
    assert posted.broadcast == [f"{ANNOUNCED_TITLE} (reminder)", STARTED_TITLE]


def test_step_that_is_not_critical_stays_in_the_thread(slack: SlackWorkspace) -> None:
    send_steps(bot(slack), message(), message({}, STARTED), message({}, STARTED, None))

    (posted,) = slack.posted
    assert len(posted.replies) == 3
    assert posted.broadcast == []


def test_two_events_are_two_messages(slack: SlackWorkspace) -> None:
    sent(bot(slack), ANNOUNCED, message(REBOOT | {"EventId": "another"}))

    assert len(slack.posted) == 2


def test_failed_first_reply_continues_with_the_same_message(slack: SlackWorkspace) -> None:
    # the first request posts the message, the second is its reply
    slack.answers.extend([Answer(), Answer(503)])
    config = bot(slack)

    error = failure(config, ANNOUNCED)
    sent(config, continued(ANNOUNCED, error.thread))

    (posted,) = slack.posted
    assert not error.permanent
    assert posted.thread == [ANNOUNCED_TITLE]
    assert posted.broadcast == []


def test_failed_later_reply_is_sent_again_into_the_thread(slack: SlackWorkspace) -> None:
    config = bot(slack)
    thread = send_steps(config, ANNOUNCED)
    slack.answers.extend([Answer(), Answer(503)])

    error = failure(config, continued(HAS_STARTED, thread))
    sent(config, continued(HAS_STARTED, error.thread))

    (posted,) = slack.posted
    assert posted.thread == [ANNOUNCED_TITLE, STARTED_TITLE]


@pytest.mark.parametrize("name", ["message_not_found", "cant_update_message", "edit_window_closed"])
def test_step_opens_another_message_when_the_first_cannot_be_updated(
    slack: SlackWorkspace, name: str
) -> None:
    thread = send_steps(bot(slack), ANNOUNCED)
    slack.answers.append(refusal(name))

    sent(bot(slack), continued(HAS_STARTED, thread))

    assert [posted.title for posted in slack.posted] == [ANNOUNCED_TITLE, STARTED_TITLE]


def test_step_opens_another_message_in_another_channel(slack: SlackWorkspace) -> None:
    thread = send_steps(bot(slack), ANNOUNCED)

    sent(bot(slack, channel=slack.channel), continued(HAS_STARTED, thread))

    assert [posted.title for posted in slack.posted] == [ANNOUNCED_TITLE, STARTED_TITLE]


@pytest.mark.parametrize("thread", ["", "{", "[]", '{"channel": 1}', "1234.5"])
def test_unreadable_thread_opens_another_message(slack: SlackWorkspace, thread: str) -> None:
    sent(bot(slack), continued(HAS_STARTED, thread))

    assert [posted.title for posted in slack.posted] == [STARTED_TITLE]


@pytest.mark.parametrize("name", TODO)
def test_error_that_a_person_can_correct_says_what_to_do(slack: SlackWorkspace, name: str) -> None:
    slack.answers.append(refusal(name, needed="chat:write", provided="x"))

    error = failure(bot(slack), ANNOUNCED)

    assert str(error) == f"Slack answered {name}: {TODO[name]}"
    assert error.by_hand
    assert not error.permanent


@pytest.mark.parametrize(
    ("name", "permanent"),
    [("msg_too_long", True), ("invalid_blocks", True), ("internal_error", False), ("new", False)],
)
def test_error_is_permanent_if_it_is_about_the_message(
    slack: SlackWorkspace, name: str, *, permanent: bool
) -> None:
    slack.answers.append(refusal(name))

    error = failure(bot(slack), ANNOUNCED)

    assert str(error) == f"Slack answered {name}"
    assert error.permanent == permanent
    assert not error.by_hand


def test_error_of_a_wrong_token_or_channel_does_not_show_the_token(
    slack: SlackWorkspace,
) -> None:
    wrong_token = failure(bot(slack, token=Secret("xoxb-wrong")), ANNOUNCED)
    wrong_channel = failure(bot(slack, channel="#nowhere"), ANNOUNCED)

    assert str(wrong_token).startswith("Slack answered invalid_auth")
    assert str(wrong_channel).startswith("Slack answered channel_not_found")
    assert "xoxb-wrong" not in str(wrong_token)


def test_rate_limit_is_an_error_with_the_pause_that_slack_asks_for(slack: SlackWorkspace) -> None:
    limit = Answer(429, (("Retry-After", "30"),), b'{"ok":false,"error":"ratelimited"}')
    slack.answers.extend([Answer(), limit])

    error = failure(bot(slack), ANNOUNCED)

    assert error.retry_after == 30
    assert not error.permanent
    assert error.thread is not None


def test_hanging_reply_takes_its_half_of_the_timeout_and_keeps_the_message(
    slack: SlackWorkspace,
) -> None:
    slack.answers.extend([Answer(), Answer(how="hang")])

    error = failure(bot(slack, timeout=Duration("10s")), ANNOUNCED)

    assert "no complete answer within 5 s" in str(error)
    assert error.thread is not None


@pytest.mark.parametrize("body", [b"fine", b"{}", b"[]", b'{"ok": true}', b'{"ok": true, "ts": 1}'])
def test_answer_of_another_form_accepts_nothing(slack: SlackWorkspace, body: bytes) -> None:
    slack.default = Answer(body=body)

    error = failure(bot(slack), ANNOUNCED)

    assert "this is not an answer of Slack" in str(error)
    assert not error.permanent


def test_proxy_is_used_and_its_password_is_not_logged(
    slack: SlackWorkspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    proxy = slack.url.replace("http://", "http://me:hunter2@")
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "")

    outcomes(sink_of(bot(slack, api_url="http://slack.invalid/api/")), ANNOUNCED)

    assert slack.requests[0].path == "http://slack.invalid/api/chat.postMessage"
    assert "hunter2" not in caplog.text
