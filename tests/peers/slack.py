"""Slack, as far as an incoming webhook sees it, with the published limits.

What a request may hold is written down here from Slack's reference (docs.slack.dev/reference:
chat.postMessage, block-kit/blocks, block-kit/composition-objects/text-object), as a JSON Schema. A
request that Slack would refuse is refused with Slack's own word for it.
"""

import http.server
import json
from typing import Any, Final

import jsonschema

from support.peers import HttpPeer, Request, Say


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

    def answer(self, handler: http.server.BaseHTTPRequestHandler, say: Say) -> None:
        """The answer that a test gives, or else Slack's."""
        super().answer(handler, self._reply(self.request(handler)) if say == Say() else say)

    def _reply(self, request: Request) -> Say:
        content: dict[str, Any] = json.loads(request.body)
        if error := self._fault(content):
            return Say(400, body=error.encode())
        self.messages.append(content)
        return Say(body=b"ok")

    def _fault(self, content: dict[str, Any]) -> str:
        for fault in jsonschema.Draft202012Validator(_CONTENT).iter_errors(content):
            self.faults.append(f"{fault.json_path}: {fault.message}")
            return _WORDS.get(str(next(iter(fault.absolute_path), "")), "invalid_arguments")
        return (
            ""
            if content.get("text") or content.get("blocks") or content.get("attachments")
            else "no_text"
        )
