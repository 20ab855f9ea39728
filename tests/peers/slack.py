"""Slack, as far as a bot and an incoming webhook see it: messages, threads and updates, with the published limits.

What a request may hold is written down here from Slack's reference (docs.slack.dev/reference: chat.postMessage,
chat.update, block-kit/blocks, block-kit/composition-objects/text-object, messaging/metadata), as a JSON Schema. A
request that Slack would refuse is refused with Slack's own word for it.
"""

import http.server
import json
from typing import Any, Final

import jsonschema

from support.peers import HttpPeer, Request, Say

TOKEN: Final = "xoxb-1"
CHANNEL: Final = "C0123ABCD"


def _text(kinds: list[str], most: int) -> dict[str, Any]:
    properties = {
        "type": {"enum": kinds},
        "text": {"type": "string", "minLength": 1, "maxLength": most},
        "emoji": {"type": "boolean"},
        "verbatim": {"type": "boolean"},
    }
    plain, mrkdwn = {"type": {"const": "plain_text"}}, {"type": {"const": "mrkdwn"}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["type", "text"],
        "additionalProperties": False,
        "allOf": [  # `emoji` is for plain texts alone, `verbatim` for the others
            {"if": {"properties": plain}, "then": {"not": {"required": ["verbatim"]}}},
            {"if": {"properties": mrkdwn}, "then": {"not": {"required": ["emoji"]}}},
        ],
    }


def _block(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **properties},
        "required": ["type", *required],
        "additionalProperties": False,
    }


_BOTH: Final = ["plain_text", "mrkdwn"]
_BLOCKS: Final = {
    "type": "array",
    "maxItems": 50,
    "items": {
        "oneOf": [
            _block("header", ["text"], text=_text(["plain_text"], 150)),
            _block("section", ["text"], text=_text(_BOTH, 3_000)),
            _block(
                "section",
                ["fields"],
                fields={"type": "array", "minItems": 1, "maxItems": 10, "items": _text(_BOTH, 2_000)},
            ),
            _block(
                "context",
                ["elements"],
                elements={"type": "array", "minItems": 1, "maxItems": 10, "items": _text(_BOTH, 3_000)},
            ),
        ]
    },
}
_ATTACHMENTS: Final = {
    "type": "array",
    "maxItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "color": {"type": "string", "pattern": "^(good|warning|danger|#[0-9a-f]{6})$"},
            "blocks": _BLOCKS,
        },
        "required": ["blocks"],
        "additionalProperties": False,
    },
}
_CONTENT: Final = {
    "text": {"type": "string", "maxLength": 4_000},  # longer ones are taken, but Slack asks for less
    "blocks": _BLOCKS,
    "attachments": _ATTACHMENTS,
    "unfurl_links": {"type": "boolean"},
}
_METADATA: Final = {
    "type": "object",
    "properties": {
        "event_type": {"type": "string", "pattern": "^[a-z][a-z0-9_]*$"},
        "event_payload": {"type": "object"},
    },
    "required": ["event_type", "event_payload"],
    "additionalProperties": False,
}
_NAME: Final = {"type": "string", "pattern": r"^\d{10}\.\d{6}$"}
_CHANNEL: Final = {"channel": {"type": "string", "pattern": "^[CGD][A-Z0-9]{2,}$"}}
_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "webhook": {"properties": _CONTENT},
    "chat.postMessage": {
        "properties": {
            **_CONTENT,
            **_CHANNEL,
            "metadata": _METADATA,
            "thread_ts": _NAME,
            "reply_broadcast": {"type": "boolean"},
        },
        "required": ["channel"],
        "dependentRequired": {"reply_broadcast": ["thread_ts"]},
    },
    "chat.update": {
        # `unfurl_links` is no argument of it: Slack ignores what it does not know
        "properties": {**_CONTENT, **_CHANNEL, "ts": _NAME, "metadata": _METADATA},
        "required": ["channel", "ts"],
    },
}
_WORDS: Final = {"blocks": "invalid_blocks", "attachments": "invalid_attachments", "text": "msg_too_long"}


class SlackServer(HttpPeer):
    """A workspace with one channel. ``refuse`` maps a method to the errors that its next calls are answered with."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, dict[str, Any]] = {}  # name -> message, as it stands in the channel or a thread
        self.refuse: dict[str, list[str]] = {}
        self.faults: list[str] = []  # what in the requests is against Slack's reference

    def answer(self, handler: http.server.BaseHTTPRequestHandler, say: Say) -> None:
        """The answer that a test gives, or else Slack's."""
        super().answer(handler, self._reply(self.requests[-1]) if say == Say() else say)

    @property
    def channel(self) -> list[dict[str, Any]]:
        """What the channel shows: messages, and the steps of a thread that everybody is to see."""
        return [one for one in self.messages.values() if "thread_ts" not in one or one.get("reply_broadcast")]

    def thread(self, name: str) -> list[dict[str, Any]]:
        """The replies in a thread."""
        return [one for one in self.messages.values() if one.get("thread_ts") == name]

    def _reply(self, request: Request) -> Say:
        content: dict[str, Any] = json.loads(request.body)
        method = request.path.rpartition("/api/")[2] if "/api/" in request.path else "webhook"
        error = self._error(method, request, content)
        if error == "ratelimited":
            return Say(429, (("Retry-After", "30"),), b'{"ok":false,"error":"ratelimited"}')
        if method == "webhook":
            if error:
                return Say(400, body=error.encode())
            self._store(content)
            return Say(body=b"ok")
        if error:
            return Say(body=json.dumps({"ok": False, "error": error}).encode())
        name = self._update(content) if method == "chat.update" else self._store(content)
        return Say(body=json.dumps({"ok": True, "channel": content["channel"], "ts": name}).encode())

    def _error(self, method: str, request: Request, content: dict[str, Any]) -> str:
        planned = self.refuse.get(method)
        if planned:
            return planned.pop(0)
        if method not in _SCHEMAS:
            return "unknown_method"
        if method != "webhook" and request.headers.get("authorization") != f"Bearer {TOKEN}":
            return "invalid_auth"
        return self._fault(method, content) or self._unknown(method, content)

    def _fault(self, method: str, content: dict[str, Any]) -> str:
        for fault in jsonschema.Draft202012Validator(_SCHEMAS[method]).iter_errors(content):
            self.faults.append(f"{method}: {fault.json_path}: {fault.message}")
            return _WORDS.get(str(next(iter(fault.absolute_path), "")), "invalid_arguments")
        return "" if content.get("text") or content.get("blocks") or content.get("attachments") else "no_text"

    def _unknown(self, method: str, content: dict[str, Any]) -> str:
        if method != "webhook" and content["channel"] != CHANNEL:
            return "channel_not_found"
        if method == "chat.update" and content["ts"] not in self.messages:
            return "message_not_found"
        return "" if content.get("thread_ts") in {None, *self.messages} else "thread_not_found"

    def _store(self, content: dict[str, Any]) -> str:
        name = f"1772366400.{len(self.messages):06}"
        self.messages[name] = content
        return name

    def _update(self, content: dict[str, Any]) -> str:
        """What is not given stays as it was; but a text without blocks takes the place of the blocks."""
        name: str = content["ts"]
        message = self.messages[name]
        if "text" in content and "blocks" not in content:
            message = {key: value for key, value in message.items() if key != "blocks"}
        self.messages[name] = message | {key: content[key] for key in _CONTENT if key in content}
        return name
