"""``SlackBot`` keeps one Slack message for each event, with a reply in its thread for each step.

The message shows the present state of the event: the bot posts it at the first step and updates it
at each later one. Slack notifies no one of an update, so the reply about a critical step is also
shown in the channel.

A step takes two requests: the update, which may be repeated, then the reply. At the first step both
are posts. If that reply fails, the error contains the thread, and the next attempt continues there.
"""

import logging
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError
from slack_sdk.web import SlackResponse

from notbefore.config.sinks import Slack
from notbefore.core.message import Message
from notbefore.core.record import json_line
from notbefore.courier.sink import Receipt
from notbefore.errors import SendError
from notbefore.net.http import Http

# errors for a message that cannot be updated any more: it was deleted, is too old for the
# workspace's rules, is of another bot, or is in a channel that the bot has left. The bot opens
# another message
GONE: Final = frozenset(
    {
        "message_not_found",
        "cant_update_message",
        "edit_window_closed",
        "channel_not_found",
        "not_in_channel",
        "is_archived",
    }
)
# errors after which Slack would refuse the same request again
PERMANENT_ERRORS: Final = frozenset(
    {
        "invalid_arguments",
        "invalid_attachments",
        "invalid_blocks",
        "invalid_blocks_format",
        "attachment_payload_limit_exceeded",
        "too_many_attachments",
        "msg_blocks_too_long",
        "msg_too_long",
        "no_text",
    }
)
# errors that a person can correct -> what to do
TODO: Final = {
    "invalid_auth": "the token is wrong: write the app's present `Bot User OAuth Token`",
    "not_authed": "the token is wrong: write the app's present `Bot User OAuth Token`",
    "token_revoked": "install the app in the workspace again, and write its new token",
    "token_expired": "switch off the app's token rotation, and write its new token",
    "account_inactive": "the app was removed: install it again, and write its new token",
    "not_allowed_token_type": "expected the token of a bot, xoxb-...",
    "missing_scope": "add the scope chat:write to the app's bot token, and install the app again",
    "channel_not_found": "check `channel`; in a private channel, write `/invite @BOT`",
    "not_in_channel": "write `/invite @BOT` in the channel",
    "is_archived": "unarchive the channel, or configure another one",
    "restricted_action": "let the app post in this channel: a rule of the workspace forbids it",
}


class SlackThread(Struct, frozen=True):
    """The message of an event, as the outbox remembers it."""

    channel: str  # as it is configured
    channel_id: str
    ts: str  # the id of the message within its channel
    opened_by: str  # the delivery that opened it

    @property
    def text(self) -> str:
        """The thread as a text, for the outbox."""
        return msgspec.json.encode(self).decode()


class Client(WebClient):
    """Slack's own client, which sends by ``Http``.

    So it has a deadline, no redirects, and the proxies and CA bundles that all sinks use.
    """

    def __init__(self, token: str, api_url: str, http: Http) -> None:
        # at `debug` it would log the address of a proxy, with the proxy's password
        logger = logging.getLogger("slack_sdk")
        logger.setLevel(logging.INFO)
        super().__init__(token=token, base_url=api_url, logger=logger)
        self._http = http

    def api_call(self, api_method: str, **arguments: Any) -> SlackResponse:
        """Call a method of the Web API.

        Raises ``SendError`` if HTTP says that it failed, ``SlackApiError`` if Slack does.
        """
        body = arguments["json"]
        url = f"{self.base_url}{api_method}"
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json; charset=utf-8",
        }
        response = self._http.post(url, headers, json_line(body))
        response.check()

        answer = response.json()
        if not isinstance(answer, dict) or "ok" not in answer:
            raise SendError(f"this is not an answer of Slack: {response.cause}")
        unchecked: Any = SlackResponse(
            client=self,
            http_verb="POST",
            api_url=url,
            req_args={},
            data=answer,
            headers={},
            status_code=response.status,
        )
        accepted: SlackResponse = unchecked.validate()
        return accepted


class SlackBot:
    """A channel in which a bot posts."""

    def __init__(self, settings: Slack, http: Http) -> None:
        token = ""
        if settings.token is not None:
            token = settings.token.reveal()
        self._client = Client(token, settings.api_url, http)
        self._channel = settings.channel or ""

    def send(self, message: Message, content: dict[str, Any]) -> Receipt:
        """Post or update the message of the event, and post the step in its thread."""
        thread = self._thread_of(message)
        if thread is None or not self._update(thread, content):
            thread = self._open(message, content)

        try:
            self._reply(thread, message, content)
        except SendError as error:
            error.thread = thread.text
            raise
        return Receipt(thread=thread.text)

    def _thread_of(self, message: Message) -> SlackThread | None:
        """Return the event's message; ``None`` if there is none in the configured channel."""
        if message.thread is None:
            return None
        with suppress(msgspec.DecodeError):
            thread = msgspec.json.decode(message.thread, type=SlackThread)
            if thread.channel == self._channel:
                return thread
        return None

    def _open(self, message: Message, content: dict[str, Any]) -> SlackThread:
        try:
            answer = self._client.chat_postMessage(channel=self._channel, **content)
        except SlackApiError as error:
            raise _send_error(error) from None
        return SlackThread(
            channel=self._channel,
            channel_id=_text_in(answer, "channel"),
            ts=_text_in(answer, "ts"),
            opened_by=message.delivery_id,
        )

    def _update(self, thread: SlackThread, content: dict[str, Any]) -> bool:
        """Update the event's message; return whether it could be updated."""
        try:
            self._client.chat_update(
                channel=thread.channel_id,
                ts=thread.ts,
                text=content["text"],
                blocks=content["blocks"],
                attachments=content["attachments"],
            )
        except SlackApiError as error:
            if error.response.get("error") in GONE:
                return False
            raise _send_error(error) from None
        return True

    def _reply(self, thread: SlackThread, message: Message, content: dict[str, Any]) -> None:
        """Post the step in the thread, and a critical one also in the channel.

        The delivery that opened the thread is in the channel already.
        """
        is_update = thread.opened_by != message.delivery_id
        try:
            self._client.chat_postMessage(
                channel=thread.channel_id,
                thread_ts=thread.ts,
                reply_broadcast=is_update and message.shown_severity == "critical",
                **content,
            )
        except SlackApiError as error:
            raise _send_error(error) from None


def _text_in(answer: SlackResponse, name: str) -> str:
    """Return a field of an accepting answer. Raises ``SendError`` if it is missing."""
    value = answer.get(name)
    if not isinstance(value, str):
        raise SendError(f"this is not an answer of Slack: it has no {name}")
    return value


def _send_error(error: SlackApiError) -> SendError:
    """Return the error for an answer with ``"ok": false``."""
    name = str(error.response.get("error", "no reason given"))
    todo = TODO.get(name)
    if todo is not None:
        return SendError(f"Slack answered {name}: {todo}", by_hand=True)
    return SendError(f"Slack answered {name}", permanent=name in PERMANENT_ERRORS)
