"""Slack: an incoming webhook, or ``chat.postMessage`` with a bot's token; later changes then answer the first.

Block Kit; times in the reader's own zone by Slack's date markup. What comes from Azure cannot mention anybody.
"""

import logging
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from notbefore.config.sinks import Links, Slack
from notbefore.core.duration import countdown
from notbefore.core.record import json_line
from notbefore.delivery.http import Http, HttpResponse
from notbefore.delivery.message import Message, Receipt
from notbefore.delivery.render import Fact, Renderer, Text
from notbefore.errors import SendError

MAX_HEADER: Final = 150  # characters; Slack's limits
MAX_SECTION: Final = 3_000
MAX_FIELD: Final = 2_000
MAX_TEXT: Final = 4_000
COLORS: Final = {"critical": "#c4314b", "warning": "#e8a33d", "info": "#3a7bd5"}
OVER: Final = "#2e9e5b"

log = logging.getLogger("notbefore.slack")

# https://docs.slack.dev/reference/methods/chat.postMessage: nothing can be added to the thread, but to its channel
REFUSED_THREAD: Final = (
    "restricted_action_thread_locked",
    "restricted_action_non_threadable_channel",
    "cannot_reply_to_message",
    "message_not_found",
    "thread_not_found",
    "invalid_thread_ts",
)
# ... and of incoming webhooks: the layout is refused, and a text is not
REFUSED_BLOCKS: Final = (
    "invalid_blocks",
    "invalid_attachments",
    "too_many_attachments",
    "msg_blocks_too_long",
    "attachment_payload_limit_exceeded",
    "invalid_payload",
)
# errors that pass by themselves
PASSING: Final = frozenset(
    {
        "ratelimited",
        "rate_limited",
        "message_limit_exceeded",
        "internal_error",
        "fatal_error",
        "service_unavailable",
        "request_timeout",
        "team_added_to_org",
        "accesslimited",
    }
)


class Sink:
    """A channel."""

    def __init__(self, name: str, settings: Slack, links: Links) -> None:
        self._name = name
        self._links = links
        self._channel = settings.channel
        self._api = settings.api.rstrip("/")
        self._token = settings.token.reveal() if settings.token is not None else None
        self._url = settings.url.reveal() if settings.url is not None else ""
        self._render = Renderer(settings.title, settings.body, inert)
        self._http = Http(settings.timeout.seconds)

    def send(self, message: Message) -> Receipt:
        """Post it, as text alone where Slack refuses the blocks. It is accepted when Slack says `ok`."""
        text = self._render(message)
        payload = content(message, text, self._links, datetime.now(UTC))
        post = self._post_webhook if self._token is None else partial(self._post_message, message)
        try:
            thread = post(payload)
        except SendError as error:
            if not any(name in str(error) for name in REFUSED_BLOCKS):
                raise
            log.warning("sink %s: Slack refused the blocks of a message (%s): sent as text", self._name, error)
            thread = post({"text": inert(f"{text.title}\n{text.plain}")[:MAX_TEXT], "unfurl_links": False})
        return Receipt(thread=thread, fallback=text.fallback)

    def _post_webhook(self, payload: dict[str, Any]) -> None:
        answer = self._http.post(self._url, json_line(payload), {"Content-Type": "application/json"})
        answer.check()
        if answer.body.strip() != b"ok":  # such as a captive portal
            raise SendError(f"this is not an answer of Slack: {answer.cause}")

    def _post_message(self, message: Message, payload: dict[str, Any]) -> str | None:
        """Post to the thread of the event, or to the channel; returns the name of the thread."""
        payload = payload | {
            "channel": self._channel,
            "metadata": {
                "event_type": "notbefore_change",
                "event_payload": {"delivery_id": message.delivery_id, "event_id": message.record.event_id},
            },
        }
        # a thread is its channel's: after the channel was changed there is none yet
        channel, _, first = (message.thread or "").rpartition(" ")
        if channel == self._channel:
            try:
                self._call(
                    "chat.postMessage", {**payload, "thread_ts": first, "reply_broadcast": message.kind == "started"}
                )
            except SendError as error:
                if not any(name in str(error) for name in REFUSED_THREAD):
                    raise
                log.warning("sink %s: nothing can be added to the thread of an event (%s)", self._name, error)
            else:
                return message.thread
        began = self._call("chat.postMessage", payload).get("ts")
        return f"{self._channel} {began}" if began else None

    def _call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json; charset=utf-8", "Authorization": f"Bearer {self._token}"}
        answer = self._http.post(f"{self._api}/{method}", json_line(payload), headers)
        answer.check()
        return _checked(answer)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _checked(answer: HttpResponse) -> dict[str, Any]:
    try:
        said: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise SendError(f"this is not an answer of Slack: {answer.cause}") from None
    if said.get("ok") is not True:
        error = str(said.get("error", "no reason given"))
        raise SendError(
            f"Slack says {error}", permanent=error not in PASSING, may_pass=True, retry_after=answer.retry_after
        )
    return said


def content(message: Message, text: Text, links: Links, now: datetime) -> dict[str, Any]:
    """The message as Slack takes it: the plain text for notifications, the blocks to look at."""
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": text.title[:MAX_HEADER], "emoji": False}}
    ]
    if text.body is not None:
        blocks.append(_section(text.body))
    else:
        if text.time is not None:
            blocks.append(_section(f"*{_date(text.time)}*, {countdown(text.time, now)}"))
        if text.meaning:
            blocks.append(_section(text.meaning))
        fields = [_field(fact) for fact in text.facts if fact.name != "Not before"]
        blocks += [{"type": "section", "fields": fields[start : start + 10]} for start in range(0, len(fields), 10)]
    found = (("Dashboard", links.dashboard), ("Runbook", links.runbook))
    leads = [f"<{link.replace('>', '%3E').replace('|', '%7C')}|{name}>" for name, link in found if link]
    if leads:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": " · ".join(leads)}]})
    color = OVER if message.over else COLORS[message.severity]
    return {"text": inert(text.title), "attachments": [{"color": color, "blocks": blocks}], "unfurl_links": False}


def inert(text: str) -> str:
    """Slack's own escapes: no mention, no link, no markup that opens with ``<``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:MAX_SECTION], "verbatim": True}}


def _field(fact: Fact) -> dict[str, Any]:
    # verbatim: Slack makes no link or mention of what looks like one
    text = f"*{fact.name}*\n{inert(fact.value)}"[:MAX_FIELD]
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _date(time: datetime) -> str:
    fallback = f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"<!date^{int(time.timestamp())}^{{date_short_pretty}} {{time_secs}}|{fallback}>"
