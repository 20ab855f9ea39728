"""Slack: messages in Block Kit, by an incoming webhook, or by a bot that updates them.

Slack's date markup shows times in the reader's time zone. Texts from Azure cannot mention anyone.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from notbefore.config.sinks import Messages, Slack
from notbefore.core.duration import countdown
from notbefore.core.message import Message
from notbefore.core.record import json_line
from notbefore.courier.http_sink import HttpSink
from notbefore.courier.sink import Receipt
from notbefore.net.http import Http
from notbefore.wording.colors import color_of
from notbefore.wording.texts import Text, text_of
from notbefore.wording.times import clock

if TYPE_CHECKING:
    from notbefore.courier.slack_bot import SlackBot

JSON_HEADERS: Final = {"Content-Type": "application/json"}
BOT_REQUESTS: Final = 2  # for one step of an event; they share the timeout
MAX_TITLE: Final = 150  # characters; Slack's limits
MAX_SECTION: Final = 3_000
MAX_FIELD: Final = 2_000
MAX_FIELDS: Final = 10  # in a section


class Sink(HttpSink):
    """A channel."""

    def __init__(self, _name: str, settings: Slack, messages: Messages) -> None:
        timeout = settings.timeout.seconds
        if settings.token is not None:
            timeout /= BOT_REQUESTS
        super().__init__(messages, Http(timeout))
        self._url = ""
        if settings.url is not None:
            self._url = settings.url.reveal()
        self._bot = _bot_of(settings, self._http)

    def send(self, message: Message) -> Receipt:
        """Post the message; a 2xx answer of a webhook accepts it.

        Slack answers `ok`, and chats with the same interface answer JSON, or nothing.
        """
        payload = content(message, text_of(message, self._messages))
        if self._bot is not None:
            return self._bot.send(message, payload)
        self._http.post(self._url, JSON_HEADERS, json_line(payload)).check()
        return Receipt()


def _bot_of(settings: Slack, http: Http) -> "SlackBot | None":
    """Return the bot that posts and updates; ``None`` for a webhook."""
    if settings.token is None:
        return None
    from notbefore.courier.slack_bot import SlackBot  # noqa: PLC0415 - an optional extra

    return SlackBot(settings, http)


def content(message: Message, text: Text) -> dict[str, Any]:
    """Return the message for the Slack API: plain text for notifications, blocks for the channel.

    The header is above the attachment, which has the color: Slack does not show the text of a
    message with blocks.
    """
    title = text.title[:MAX_TITLE]
    header = {
        "type": "header",
        "text": {"type": "plain_text", "text": title, "emoji": False},
    }
    blocks = [*_blocks(message, text), _footer(message, text)]
    return {
        "text": inert(title),
        "blocks": [header],
        "attachments": [{"color": color_of(message), "blocks": blocks}],
        "unfurl_links": False,
    }


def _footer(message: Message, text: Text) -> dict[str, Any]:
    """Return the block with the links and the id."""
    parts: list[str] = []
    for link in text.links:
        address = link.value.replace(">", "%3E").replace("|", "%7C")
        parts.append(f"<{address}|{link.name}>")
    parts.append(f"Delivery {message.delivery_id}")
    line = " · ".join(parts)[:MAX_SECTION]
    return {"type": "context", "elements": [{"type": "mrkdwn", "text": line}]}


def _blocks(message: Message, text: Text) -> Iterator[dict[str, Any]]:
    not_before = message.record.not_before
    if message.is_ahead and not_before is not None and not text.has_own_body:
        time = _local_time(not_before)
        yield _section(f"*{time}* (your local time), {countdown(not_before, message.now)}")
    if text.summary:
        yield _section(inert(text.summary))
    if text.advice:
        yield _section(f"*What to do*\n{inert(text.advice)}")
    for start in range(0, len(text.facts), MAX_FIELDS):
        fields: list[dict[str, Any]] = []
        for fact in text.facts[start : start + MAX_FIELDS]:
            fields.append(_text(f"*{fact.name}*\n{inert(fact.value)}", MAX_FIELD))
        yield {"type": "section", "fields": fields}


def _local_time(time: datetime) -> str:
    """Return Slack's markup for a time in the reader's time zone; other programs show UTC."""
    return f"<!date^{int(time.timestamp())}^{{date_short_pretty}} {{time_secs}}|{clock(time)}>"


def inert(text: str) -> str:
    """Escape a text for Slack: no mention, no link, no markup that starts with ``<``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _text(text, MAX_SECTION)}


def _text(text: str, most: int) -> dict[str, Any]:
    # verbatim: Slack makes no links and mentions from plain text
    return {"type": "mrkdwn", "text": text[:most], "verbatim": True}
