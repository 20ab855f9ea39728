"""Slack: an incoming webhook, or a bot's token.

With a token an event is one message, which is brought up to date (``chat.update``); its thread holds the steps. With an
incoming webhook each step is a message. Block Kit; times in the reader's own zone by Slack's date markup. What comes
from Azure cannot mention anybody.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec

from notbefore.config.messages import Messages
from notbefore.config.sinks import Slack
from notbefore.core.duration import countdown
from notbefore.core.record import json_line
from notbefore.core.text import one_line
from notbefore.courier.http import Http, HttpResponse
from notbefore.courier.message import Asked, Message, Receipt
from notbefore.courier.render import Renderer
from notbefore.courier.wording import Fact, Text
from notbefore.errors import SendError

T = TypeVar("T")

MAX_HEADER: Final = 150  # characters; Slack's limits
MAX_SECTION: Final = 3_000
MAX_FIELD: Final = 2_000
MAX_FIELDS: Final = 10  # in a section
MAX_TEXT: Final = 4_000
LOUD: Final = ("started", "reminder")  # kinds that the whole channel is to see, not the thread alone
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
# https://docs.slack.dev/reference/methods/chat.update: the message cannot be brought up to date
REFUSED_UPDATE: Final = ("message_not_found", "cant_update_message", "edit_window_closed")
# ... and of incoming webhooks: the layout is refused, and a text is not
REFUSED_BLOCKS: Final = (
    "invalid_blocks",
    "invalid_attachments",
    "too_many_attachments",
    "msg_blocks_too_long",
    "attachment_payload_limit_exceeded",
    "invalid_payload",
)
WITHOUT_TEXT: Final = (b"no_text", b"missing_text", b"ok")  # what an incoming webhook answers to a message without text
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

    def __init__(self, name: str, settings: Slack, messages: Messages) -> None:
        self._name = name
        self._channel = settings.channel
        self._api = settings.api.rstrip("/")
        self._token = settings.token.reveal() if settings.token is not None else None
        self._url = settings.url.reveal() if settings.url is not None else ""
        self._render = Renderer(settings, messages, inert)
        self._http = Http(settings.timeout.seconds)

    def send(self, message: Message) -> Receipt:
        """Post it, as text alone where Slack refuses the blocks. It is accepted when Slack says `ok`."""
        text = self._render(message)
        payload = content(message, text, datetime.now(UTC))
        if self._token is None:
            self._in_full(self._post_webhook, text, payload)
            return Receipt(fallback=bool(text.trouble))
        return Receipt(thread=self._post_to_channel(message, text, payload), fallback=bool(text.trouble))

    def _post_to_channel(self, message: Message, text: Text, payload: dict[str, Any]) -> str | None:
        """Bring the event's message up to date, or post one; returns the name of its thread."""
        # a thread is its channel's: after the channel was changed there is none yet
        channel, _, root = (message.thread or "").rpartition(" ")
        same = channel == self._channel and message.kind != "sink_failed"  # each of those is news of its own
        if same and self._update(root, text, payload) and self._reply(root, message, text):
            return message.thread
        began = self._in_full(lambda given: self._post(message, given), text, payload)
        return f"{self._channel} {began}" if began and message.kind != "sink_failed" else None

    def _in_full(self, post: Callable[[dict[str, Any]], T], text: Text, payload: dict[str, Any]) -> T:
        """Post with the blocks, or where Slack refuses those, as text."""
        try:
            return post(payload)
        except SendError as error:
            if not _says(error, REFUSED_BLOCKS):
                raise
            log.warning("sink %s: Slack refused the blocks of a message (%s): sent as text", self._name, error)
            plain = inert(f"{text.title}\n{text.plain}\n\n{text.footer}")[:MAX_TEXT]
            return post({"text": plain, "unfurl_links": False})

    def _update(self, root: str, text: Text, payload: dict[str, Any]) -> bool:
        """Bring the event's message up to date; false where Slack does not let us."""
        # what is not given stays as it was
        update: dict[str, Any] = {"channel": self._channel, "ts": root, "blocks": [], "attachments": []}
        try:
            self._in_full(lambda given: self._call("chat.update", update | given), text, payload)
        except SendError as error:
            if not _says(error, REFUSED_UPDATE):
                raise
            log.warning("sink %s: the message of an event cannot be updated (%s): posting another", self._name, error)
            return False
        return True

    def _reply(self, root: str, message: Message, text: Text) -> bool:
        """Add the step to the thread; false where the thread takes nothing."""
        try:
            self._post(message, {**step(text), "thread_ts": root, "reply_broadcast": message.kind in LOUD})
        except SendError as error:
            if not _says(error, REFUSED_THREAD):
                raise
            log.warning("sink %s: nothing can be added to the thread of an event (%s)", self._name, error)
            return False
        return True

    def _post(self, message: Message, payload: dict[str, Any]) -> str | None:
        """Post a message; returns its name."""
        identity = {"delivery_id": message.delivery_id, "event_id": one_line(message.record.event_id)}
        metadata = {"event_type": "notbefore_change", "event_payload": identity}
        posted = self._call("chat.postMessage", payload | {"channel": self._channel, "metadata": metadata})
        name: str | None = posted.get("ts")
        return name

    def _post_webhook(self, payload: dict[str, Any]) -> None:
        answer = self._http.post(self._url, json_line(payload), {"Content-Type": "application/json"})
        answer.check()
        if answer.body.strip() != b"ok":  # such as a captive portal
            raise SendError(f"this is not an answer of Slack: {answer.cause}")

    def _call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json; charset=utf-8", "Authorization": f"Bearer {self._token}"}
        answer = self._http.post(f"{self._api}/{method}", json_line(payload), headers)
        answer.check()
        return _checked(answer)

    def connect(self) -> Asked:
        """Ask whose token it is; or post a message without text, which a webhook in use refuses as ``no_text``."""
        if self._token is not None:
            said = self._call("auth.test", {})
            whose = f"{said.get('user')} of {said.get('team')}"
            return Asked(remark=f"the token of {whose}; `notbefore drill` shows whether it may write to the channel")
        answer = self._http.post(self._url, b'{"text": ""}', {"Content-Type": "application/json"})
        if answer.body.strip() in WITHOUT_TEXT:
            return Asked()
        if answer.status == HTTPStatus.BAD_REQUEST:  # another service that takes Slack's messages
            return Asked(None, f"it answers {answer.cause}; `notbefore drill` shows whether it accepts a message")
        answer.check()
        raise SendError(f"this is not an answer of Slack: {answer.cause}")

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _checked(answer: HttpResponse) -> dict[str, Any]:
    try:
        said = msgspec.convert(answer.said(), dict[str, Any])
    except ValueError:
        raise SendError(f"this is not an answer of Slack: {answer.cause}") from None
    if said.get("ok") is not True:
        error = str(said.get("error", "no reason given"))
        raise SendError(
            f"Slack says {error}", permanent=error not in PASSING, may_pass=True, retry_after=answer.retry_after
        )
    return said


def _says(error: SendError, names: tuple[str, ...]) -> bool:
    return any(name in str(error) for name in names)


def content(message: Message, text: Text, now: datetime) -> dict[str, Any]:
    """The message in the form of the Slack API: plain text for notifications, blocks for the channel.

    The header stands above the attachment, which has the colour: a text beside blocks is not shown.
    """
    header = {"type": "header", "text": {"type": "plain_text", "text": text.title[:MAX_HEADER], "emoji": False}}
    blocks = [_section(text.body)] if text.body is not None else list(_built_in_blocks(text, now))
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


def _built_in_blocks(text: Text, now: datetime) -> Iterator[dict[str, Any]]:
    if text.time is not None:
        yield _section(f"*{_date(text.time)}* (your local time), {countdown(text.time, now)}")
    if text.summary:
        yield _section(inert(text.summary))
    if text.advice:
        yield _section(f"*What to do*\n{inert(text.advice)}")
    fields = [_field(fact) for fact in text.facts]
    for start in range(0, len(fields), MAX_FIELDS):
        yield {"type": "section", "fields": fields[start : start + MAX_FIELDS]}


def step(text: Text) -> dict[str, Any]:
    """A step of an event, as it stands in the thread: the event's message above has everything else."""
    summary = f"\n{inert(text.summary)}" if text.body is None else ""
    return {"text": f"*{inert(text.title[:MAX_HEADER])}*{summary}"[:MAX_TEXT], "unfurl_links": False}


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
