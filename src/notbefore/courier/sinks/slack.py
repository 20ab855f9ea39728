"""Slack: an incoming webhook, or a bot's token.

With a token an event is one message, which is brought up to date (``chat.update``); its thread holds the steps. With an
incoming webhook each step is a message. Block Kit; times in the reader's own zone by Slack's date markup. What comes
from Azure cannot mention anybody.
"""

import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from notbefore.config.messages import Messages
from notbefore.config.sinks import Slack
from notbefore.core.duration import countdown
from notbefore.core.record import json_line
from notbefore.core.text import one_line
from notbefore.courier.http import Http
from notbefore.courier.message import Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.courier.wording import Fact, Text, text_of
from notbefore.errors import SendError

Payload = dict[str, Any]

HEADERS: Final = {"Content-Type": "application/json"}
MAX_HEADER: Final = 150  # characters; Slack's limits
MAX_SECTION: Final = 3_000
MAX_FIELD: Final = 2_000
MAX_FIELDS: Final = 10  # in a section
MAX_TEXT: Final = 4_000
LOUD: Final = ("started", "reminder")  # kinds that the whole channel is to see, not the thread alone
COLORS: Final = {"critical": "#c4314b", "warning": "#e8a33d", "info": "#3a7bd5"}
OVER: Final = "#2e9e5b"
# errors of https://docs.slack.dev/reference/methods/chat.postMessage that pass by themselves
_PASSING: Final = re.compile("rate_?limited|limit_exceeded|_error$|unavailable|timeout|team_added|accesslimited")

log = logging.getLogger("notbefore.slack")


class Sink(BaseSink):
    """A channel."""

    def __init__(self, name: str, settings: Slack, messages: Messages) -> None:
        self._name = name
        self._channel = settings.channel
        self._api = settings.api.rstrip("/")
        self._token = settings.token.reveal() if settings.token is not None else None
        self._url = settings.url.reveal() if settings.url is not None else ""
        self._messages = messages
        self._http = Http(settings.timeout.seconds)

    def send(self, message: Message) -> Receipt:
        """Post it. It is accepted when Slack says `ok`."""
        now = datetime.now(UTC)
        text = text_of(message, now, self._messages)
        payload, thread = content(message, text, now), None
        if self._token is None:
            self._post_webhook(payload)
        else:
            thread = self._post_to_channel(message, text, payload)
        return Receipt(thread=thread)

    def _post_to_channel(self, message: Message, text: Text, payload: Payload) -> str | None:
        """Bring the event's message up to date, or post one; returns the name of its thread."""
        # a thread is its channel's: after the channel was changed there is none yet
        channel, _, root = (message.thread or "").rpartition(" ")
        if channel == self._channel:
            try:
                self._update(root, payload)
                self._post(message, {**step(text), "thread_ts": root, "reply_broadcast": message.kind in LOUD})
            except SendError as error:  # it was deleted, say, or the thread is locked
                if not error.permanent:
                    raise
                log.warning("sink %s: the message of an event cannot be updated (%s): another", self._name, error)
            else:
                return message.thread
        began = self._post(message, payload)
        return f"{self._channel} {began}" if began else None

    def _update(self, root: str, payload: Payload) -> None:
        self._call("chat.update", {"channel": self._channel, "ts": root} | payload)

    def _post(self, message: Message, payload: Payload) -> str | None:
        """Post a message; returns its name."""
        identity = {"delivery_id": message.delivery_id, "event_id": one_line(message.record.event_id)}
        metadata = {"event_type": "notbefore_change", "event_payload": identity}
        posted = self._call("chat.postMessage", payload | {"channel": self._channel, "metadata": metadata})
        name: str | None = posted.get("ts")
        return name

    def _post_webhook(self, payload: Payload) -> None:
        answer = self._http.post(self._url, HEADERS, json_line(payload))
        answer.check()
        if answer.body.strip() != b"ok":  # such as a captive portal
            raise SendError(f"this is not an answer of Slack: {answer.cause}")

    def _call(self, method: str, payload: Payload) -> dict[str, Any]:
        headers = {"Content-Type": "application/json; charset=utf-8", "Authorization": f"Bearer {self._token}"}
        answer = self._http.post(f"{self._api}/{method}", headers, json_line(payload))
        answer.check()
        try:
            said = msgspec.convert(answer.said(), dict[str, Any])
        except ValueError:
            raise SendError(f"this is not an answer of Slack: {answer.cause}") from None
        if said.get("ok") is not True:
            error = str(said.get("error", "no reason given"))
            passing = _PASSING.search(error) is not None
            raise SendError(f"Slack says {error}", permanent=not passing, may_pass=True, retry_after=answer.retry_after)
        return said

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def content(message: Message, text: Text, now: datetime) -> Payload:
    """The message in the form of the Slack API: plain text for notifications, blocks for the channel.

    The header stands above the attachment, which has the colour: a text beside blocks is not shown.
    """
    header = {"type": "header", "text": {"type": "plain_text", "text": text.title[:MAX_HEADER], "emoji": False}}
    blocks = list(_blocks(text, now))
    footer = [f"<{link.value.replace('>', '%3E').replace('|', '%7C')}|{link.name}>" for link in text.links]
    footer.append(f"Delivery {message.delivery_id}")
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": " · ".join(footer)[:MAX_SECTION]}]})
    color = OVER if message.is_good_news else COLORS[message.shown_severity]
    return {
        "text": inert(text.title[:MAX_HEADER]),
        "blocks": [header],
        "attachments": [{"color": color, "blocks": blocks}],
        "unfurl_links": False,
    }


def _blocks(text: Text, now: datetime) -> Iterator[dict[str, Any]]:
    if text.time is not None:
        utc = f"{text.time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        date = f"<!date^{int(text.time.timestamp())}^{{date_short_pretty}} {{time_secs}}|{utc}>"
        yield _section(f"*{date}* (your local time), {countdown(text.time, now)}")
    if text.summary:
        yield _section(inert(text.summary))
    if text.advice:
        yield _section(f"*What to do*\n{inert(text.advice)}")
    for start in range(0, len(text.facts), MAX_FIELDS):
        yield {"type": "section", "fields": [_field(fact) for fact in text.facts[start : start + MAX_FIELDS]]}


def step(text: Text) -> Payload:
    """A step of an event, as it stands in the thread: the event's message above has everything else."""
    return {"text": f"*{inert(text.title[:MAX_HEADER])}*\n{inert(text.summary)}"[:MAX_TEXT], "unfurl_links": False}


def inert(text: str) -> str:
    """Slack's own escapes: no mention, no link, no markup that opens with ``<``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(text: str) -> dict[str, Any]:
    # verbatim, here and below: Slack makes no link or mention of what looks like one
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:MAX_SECTION], "verbatim": True}}


def _field(fact: Fact) -> dict[str, Any]:
    text = f"*{fact.name}*\n{inert(fact.value)}"[:MAX_FIELD]
    return {"type": "mrkdwn", "text": text, "verbatim": True}
