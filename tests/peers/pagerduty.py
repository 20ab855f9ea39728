"""PagerDuty's Events API v2, played: it checks what it gets against the published schema, and keeps
the incidents.

The schema is that of PagerDuty's OpenAPI document (its repository `api-schema`, events-v2). Lengths
and size are from the documentation of the API: a summary of 1,024 characters, a dedup_key of 255,
512 KB.
"""

import http.server
import json
import threading
from typing import Any, Final, NamedTuple

import jsonschema

from support.peers import Answer, HttpPeer

MAX_BYTES: Final = 512 * 1024
ROUTING_KEY: Final = "e93facc04764012d7bfb002500d5d1a6"  # the example of the documentation

_TEXT: Final = {"type": "string", "minLength": 1}
_URL: Final = {"type": "string", "format": "uri", "pattern": "^https?://"}
SCHEMA: Final = {
    "type": "object",
    "required": ["routing_key", "event_action"],
    "additionalProperties": False,
    "properties": {
        "routing_key": {"type": "string", "minLength": 32, "maxLength": 32},
        "event_action": {"enum": ["trigger", "resolve"]},
        "dedup_key": {"type": "string", "minLength": 1, "maxLength": 255},
        "client": _TEXT,
        "client_url": _URL,
        "links": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["href"],
                "properties": {"href": _URL, "text": _TEXT},
            },
        },
        "images": {"type": "array"},
        "payload": {
            "type": "object",
            "required": ["summary", "severity", "source"],
            "additionalProperties": False,
            "properties": {
                "summary": {"type": "string", "minLength": 1, "maxLength": 1024},
                "timestamp": {"type": "string", "format": "date-time"},
                "severity": {"enum": ["critical", "warning", "error", "info"]},
                "source": _TEXT,
                "component": _TEXT,
                "group": _TEXT,
                "class": _TEXT,
                "custom_details": {"type": "object"},
            },
        },
    },
    "if": {"properties": {"event_action": {"const": "trigger"}}},
    "then": {"required": ["payload"]},
    "else": {"required": ["dedup_key"]},
}
_VALIDATOR: Final = jsonschema.Draft202012Validator(
    SCHEMA, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
)


class Step(NamedTuple):
    """What an accepted event did."""

    what: str  # opened (somebody is notified), added, resolved, nothing
    dedup_key: str
    event: dict[str, Any]


class PagerDuty(HttpPeer):
    """``steps``: what became of each event that was accepted.

    ``wrong``: what was refused, and why.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.wrong: list[str] = []
        self.open: set[str] = set()
        self._one_at_a_time = threading.Lock()  # else two clients may both open an incident
        super().__init__()
        self.accepts = self.default = Answer(202)  # `default` may be set to another answer

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer is not self.accepts:
            super().answer(handler, answer)
            return
        reason = self._wrong(handler.path, self.request(handler).body)
        if reason:
            self.wrong.append(reason)
            said: dict[str, Any] = {
                "status": "invalid event",
                "message": "Event object is invalid",
                "errors": [reason],
            }
            super().answer(handler, Answer(400, body=json.dumps(said).encode()))
            return
        event = json.loads(self.request(handler).body)
        with self._one_at_a_time:
            self.steps.append(step := self._step(event))
        said = {"status": "success", "message": "Event processed", "dedup_key": step.dedup_key}
        super().answer(
            handler, Answer(202, (("Content-Type", "application/json"),), json.dumps(said).encode())
        )

    def _wrong(self, path: str, body: bytes) -> str:
        if path != "/v2/enqueue":
            return f"no such path: {path}"
        if len(body) > MAX_BYTES:
            return f"{len(body)} bytes"
        try:
            event = json.loads(body)
        except ValueError as error:
            return f"JSON parse error: {error}"
        if event.get("routing_key") != ROUTING_KEY:
            return "no integration has this routing key"
        found = [
            f"{'/'.join(map(str, error.path))}: {error.message}"
            for error in _VALIDATOR.iter_errors(event)
        ]
        return "; ".join(found)

    def _step(self, event: dict[str, Any]) -> Step:
        key = event.get("dedup_key") or f"generated-{len(self.steps)}"
        if event["event_action"] == "trigger":
            what = "added" if key in self.open else "opened"
            self.open.add(key)
        else:
            what = "resolved" if key in self.open else "nothing"
            self.open.discard(key)
        return Step(what, key, event)

    @property
    def effects(self) -> list[str]:
        """What happened, in order: a word for each event."""
        return [step.what for step in self.steps]
