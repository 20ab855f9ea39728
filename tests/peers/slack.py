"""``SlackServer`` stands for an incoming webhook of Slack, ``SlackWorkspace`` for the Web API.

The JSON Schemas of requests follow Slack's reference (docs.slack.dev/reference: chat.postMessage,
chat.update, block-kit/blocks, block-kit/composition-objects/text-object). A request that Slack
would refuse is refused with Slack's own error.
"""

import http.server
import itertools
import json
from typing import Any, Final

import jsonschema
import msgspec

from support.peers import Answer, HttpPeer, Request


def _text(max_length: int, kind: str = "mrkdwn") -> dict[str, Any]:
    """Return the schema of a text object."""
    text = {"type": "string", "minLength": 1, "maxLength": max_length}
    option = "verbatim" if kind == "mrkdwn" else "emoji"  # each kind has an option of its own
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "text": text, option: {"type": "boolean"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }


def _block(kind: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a block; all of the properties are required."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **properties},
        "required": ["type", *properties],
        "additionalProperties": False,
    }


_BLOCKS: Final = {
    "type": "array",
    "maxItems": 50,
    "items": {
        "oneOf": [
            _block("header", text=_text(150, "plain_text")),
            _block("section", text=_text(3_000)),
            _block(
                "section",
                fields={"type": "array", "minItems": 1, "maxItems": 10, "items": _text(2_000)},
            ),
            _block(
                "context",
                elements={"type": "array", "minItems": 1, "maxItems": 10, "items": _text(3_000)},
            ),
        ]
    },
}
_ATTACHMENT: Final = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "pattern": "^(good|warning|danger|#[0-9a-f]{6})$"},
        "blocks": _BLOCKS,
    },
    "required": ["blocks"],
    "additionalProperties": False,
}
_CONTENT: Final = {
    "properties": {
        # Slack accepts longer texts, but asks for 4,000 characters at most
        "text": {"type": "string", "maxLength": 4_000},
        "blocks": _BLOCKS,
        "attachments": {"type": "array", "maxItems": 100, "items": _ATTACHMENT},
        "unfurl_links": {"type": "boolean"},
    }
}
_CHANNEL: Final = {"type": "string", "minLength": 1}
_TIMESTAMP: Final = {"type": "string", "pattern": r"^\d+\.\d{6}$"}
_METHODS: Final = {  # method of the Web API -> the schema of its arguments
    "chat.postMessage": {
        "properties": {
            **_CONTENT["properties"],
            "channel": _CHANNEL,
            "thread_ts": _TIMESTAMP,
            "reply_broadcast": {"type": "boolean"},
        },
        "required": ["channel", "text"],
        "dependentRequired": {"reply_broadcast": ["thread_ts"]},
        "additionalProperties": False,
    },
    "chat.update": {
        "properties": {
            "text": _CONTENT["properties"]["text"],
            "blocks": _BLOCKS,
            "attachments": _CONTENT["properties"]["attachments"],
            "channel": {**_CHANNEL, "pattern": "^[CDG][A-Z0-9]+$"},  # an id, not a name
            "ts": _TIMESTAMP,
        },
        "required": ["channel", "ts", "text"],
        "additionalProperties": False,
    },
}
_ERRORS: Final = {  # argument -> Slack's error if it is invalid
    "blocks": "invalid_blocks",
    "attachments": "invalid_attachments",
    "text": "msg_too_long",
}


class SlackServer(HttpPeer):
    """A channel with an incoming webhook."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.faults: list[str] = []  # violations of Slack's reference in the requests

    @property
    def titles(self) -> list[str]:
        """The headers of the messages."""
        return [title_of(content) for content in self.messages]

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """Send the answer that a test has set, or else Slack's."""
        if answer == Answer():
            answer = self._reply(self.request(handler))
        super().answer(handler, answer)

    def _reply(self, request: Request) -> Answer:
        """Post a message, and return the answer."""
        content: dict[str, Any] = json.loads(request.body)
        violation = _violation(_CONTENT, content)
        if violation is not None:
            self.faults.append(f"{violation.json_path}: {violation.message}")
            return Answer(400, body=_error_of(violation).encode())
        if not (content.get("text") or content.get("blocks") or content.get("attachments")):
            return Answer(400, body=b"no_text")
        self.messages.append(content)
        return Answer(body=b"ok")


def _violation(
    schema: dict[str, Any], arguments: dict[str, Any]
) -> jsonschema.ValidationError | None:
    """Return the first violation of a schema, or ``None``."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(arguments)
    return next(errors, None)


def _error_of(violation: jsonschema.ValidationError) -> str:
    """Return Slack's error for a violation; it depends on the argument."""
    if not violation.absolute_path:
        return "invalid_arguments"
    return _ERRORS.get(str(violation.absolute_path[0]), "invalid_arguments")


class PostedMessage(msgspec.Struct):
    """A message in a channel."""

    ts: str
    content: dict[str, Any]  # as posted or last updated
    replies: list[dict[str, Any]] = []

    @property
    def title(self) -> str:
        """The header that the channel shows now."""
        return title_of(self.content)

    @property
    def thread(self) -> list[str]:
        """The headers of the replies."""
        return [title_of(reply) for reply in self.replies]

    @property
    def broadcast(self) -> list[str]:
        """The headers of the replies that also appear in the channel."""
        return [title_of(reply) for reply in self.replies if reply["reply_broadcast"]]


def title_of(content: dict[str, Any]) -> str:
    """Return the text of the header of a message."""
    title: str = content["blocks"][0]["text"]["text"]
    return title


class SlackWorkspace(HttpPeer):
    """A workspace with the channel #oncall, behind the Web API."""

    token = "xoxb-1-canary"
    channel = "C0ONCALL"

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[PostedMessage] = []
        self.faults: list[str] = []  # violations of Slack's reference in the requests
        self._numbers = itertools.count(1)  # of messages: several may arrive at the same time

    @property
    def api_url(self) -> str:
        """The address of the Web API."""
        return f"{self.url}/api/"

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """Send the answer that a test has set, or else Slack's."""
        if answer == Answer():
            reply = self._reply(self.request(handler))
            answer = Answer(body=json.dumps(reply).encode())
        super().answer(handler, answer)

    @property
    def methods(self) -> list[str]:
        """The methods that were called."""
        return [request.path.removeprefix("/api/") for request in self.requests]

    def _reply(self, request: Request) -> dict[str, Any]:
        """Carry out a call of a method, and return the answer."""
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _error("invalid_auth")
        if request.headers.get("content-type") != "application/json; charset=utf-8":
            return _error("invalid_form_data")

        method = request.path.removeprefix("/api/")
        arguments: dict[str, Any] = json.loads(request.body)
        violation = _violation(_METHODS[method], arguments)
        if violation is not None:
            self.faults.append(f"{method} {violation.json_path}: {violation.message}")
            return _error(_error_of(violation))

        channel = arguments.pop("channel")
        if channel not in (self.channel, "#oncall", "oncall"):
            return _error("channel_not_found")
        if method == "chat.update":
            return self._update(arguments.pop("ts"), arguments)
        return self._post(arguments)

    def _post(self, content: dict[str, Any]) -> dict[str, Any]:
        ts = f"1772366401.{next(self._numbers):06}"
        parent = content.pop("thread_ts", None)
        if parent is None:
            self.posted.append(PostedMessage(ts, content))
        else:
            message = self._message(parent)
            if message is None:
                return _error("thread_not_found")
            message.replies.append(content)
        return {"ok": True, "channel": self.channel, "ts": ts, "message": {"text": "..."}}

    def _update(self, ts: str, content: dict[str, Any]) -> dict[str, Any]:
        message = self._message(ts)
        if message is None:
            return _error("message_not_found")
        message.content = content
        return {"ok": True, "channel": self.channel, "ts": ts, "text": content["text"]}

    def _message(self, ts: str) -> PostedMessage | None:
        """Return the message with a timestamp, which is its id."""
        for message in self.posted:
            if message.ts == ts:
                return message
        return None


def _error(name: str) -> dict[str, Any]:
    return {"ok": False, "error": name}
