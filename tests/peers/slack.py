"""Slack, as an incoming webhook and the Web API see it, with the published limits.

What a request may hold is written down here from Slack's reference (docs.slack.dev/reference:
chat.postMessage, chat.update, block-kit/blocks, block-kit/composition-objects/text-object), as a
JSON Schema. A request that Slack would refuse is refused with Slack's own word for it.
"""

import http.server
import itertools
import json
from typing import Any, Final

import jsonschema
import msgspec

from support.peers import Answer, HttpPeer, Request


def _text(most: int, kind: str = "mrkdwn") -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "maxLength": most}
    # which one of them the other kind may not have
    own = "verbatim" if kind == "mrkdwn" else "emoji"
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "text": text, own: {"type": "boolean"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }


def _block(kind: str, **properties: Any) -> dict[str, Any]:
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
        "text": {
            "type": "string",
            "maxLength": 4_000,
        },  # longer ones are taken, but Slack asks for less
        "blocks": _BLOCKS,
        "attachments": {"type": "array", "maxItems": 100, "items": _ATTACHMENT},
        "unfurl_links": {"type": "boolean"},
    }
}
_CHANNEL: Final = {"type": "string", "minLength": 1}
_TIMESTAMP: Final = {"type": "string", "pattern": r"^\d+\.\d{6}$"}
_METHODS: Final = {  # of the Web API: what each takes beyond a message
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
            "channel": {**_CHANNEL, "pattern": "^[CDG][A-Z0-9]+$"},  # an id: no name is accepted
            "ts": _TIMESTAMP,
        },
        "required": ["channel", "ts", "text"],
        "additionalProperties": False,
    },
}
_WORDS: Final = {
    "blocks": "invalid_blocks",
    "attachments": "invalid_attachments",
    "text": "msg_too_long",
}


class SlackServer(HttpPeer):
    """A channel, behind an incoming webhook."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.faults: list[str] = []  # what in the requests is against Slack's reference

    @property
    def titles(self) -> list[str]:
        """The headers of the messages."""
        return [title_of(content) for content in self.messages]

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """The answer that a test gives, or else Slack's."""
        super().answer(
            handler, self._reply(self.request(handler)) if answer == Answer() else answer
        )

    def _reply(self, request: Request) -> Answer:
        content: dict[str, Any] = json.loads(request.body)
        if error := self._fault(content):
            return Answer(400, body=error.encode())
        self.messages.append(content)
        return Answer(body=b"ok")

    def _fault(self, content: dict[str, Any]) -> str:
        for fault in jsonschema.Draft202012Validator(_CONTENT).iter_errors(content):
            self.faults.append(f"{fault.json_path}: {fault.message}")
            return _WORDS.get(str(next(iter(fault.absolute_path), "")), "invalid_arguments")
        return (
            ""
            if content.get("text") or content.get("blocks") or content.get("attachments")
            else "no_text"
        )


class PostedMessage(msgspec.Struct):
    """A message in a channel."""

    ts: str
    content: dict[str, Any]  # as it was posted, or last updated
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
        """The headers of the replies that the channel shows too."""
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
        self._numbers = itertools.count(1)  # of messages: several may come at the same time
        self.faults: list[str] = []  # what in the requests is against Slack's reference

    @property
    def api_url(self) -> str:
        """The address of the Web API."""
        return f"{self.url}/api/"

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """The answer that a test gives, or else Slack's."""
        if answer == Answer():
            answer = Answer(body=json.dumps(self._reply(self.request(handler))).encode())
        super().answer(handler, answer)

    @property
    def methods(self) -> list[str]:
        """The methods that were called."""
        return [request.path.removeprefix("/api/") for request in self.requests]

    def _reply(self, request: Request) -> dict[str, Any]:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _error("invalid_auth")
        if request.headers.get("content-type") != "application/json; charset=utf-8":
            return _error("invalid_form_data")

        method = request.path.removeprefix("/api/")
        arguments: dict[str, Any] = json.loads(request.body)
        for fault in jsonschema.Draft202012Validator(_METHODS[method]).iter_errors(arguments):
            self.faults.append(f"{method} {fault.json_path}: {fault.message}")
            return _error(_WORDS.get(str(next(iter(fault.absolute_path), "")), "invalid_arguments"))

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
        return next((message for message in self.posted if message.ts == ts), None)


def _error(name: str) -> dict[str, Any]:
    return {"ok": False, "error": name}
