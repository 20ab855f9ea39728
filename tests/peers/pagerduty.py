"""``PagerDuty`` stands for PagerDuty's Events API v2.

It checks each event against the published schema, and keeps the incidents. The schema is that of
PagerDuty's OpenAPI document (repository ``api-schema``, events-v2). The documentation of the API
adds limits: 1,024 characters for a summary, 255 for a dedup_key, and 512 KB for an event.
"""

import http.server
import json
import threading
from typing import Any, Final, NamedTuple

import jsonschema

from support.peers import Answer, HttpPeer, Request

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
    """An accepted event and its effect on the incidents."""

    effect: str  # opened (this notifies people), added, resolved, nothing
    dedup_key: str
    event: dict[str, Any]


class PagerDuty(HttpPeer):
    """A service with one integration.

    ``steps``: the accepted events with their effects. ``faults``: the reasons for which it refused
    events.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.faults: list[str] = []
        self.open: set[str] = set()  # the keys of the open incidents
        self._lock = threading.Lock()  # otherwise two clients may both open an incident
        super().__init__()
        self._simulated = Answer(202)  # stands for the answer that ``_simulate`` computes
        self.default = self._simulated

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """Send the answer that a test has set, or else PagerDuty's."""
        if answer is self._simulated:
            answer = self._simulate(self.request(handler))
        super().answer(handler, answer)

    def _simulate(self, request: Request) -> Answer:
        """Check an event, carry it out, and return the answer."""
        fault = self._fault(request.path, request.body)
        if fault:
            self.faults.append(fault)
            return _json(
                400, status="invalid event", message="Event object is invalid", errors=[fault]
            )
        event = json.loads(request.body)
        with self._lock:
            step = self._step(event)
            self.steps.append(step)
        return _json(202, status="success", message="Event processed", dedup_key=step.dedup_key)

    def _fault(self, path: str, body: bytes) -> str:
        """Return why PagerDuty would refuse an event; empty if it would not."""
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
        errors = [f"{error.json_path}: {error.message}" for error in _VALIDATOR.iter_errors(event)]
        return "; ".join(errors)

    def _step(self, event: dict[str, Any]) -> Step:
        """Open, extend or resolve an incident."""
        key = event.get("dedup_key") or f"generated-{len(self.steps)}"
        if event["event_action"] == "trigger":
            effect = "added" if key in self.open else "opened"
            self.open.add(key)
        else:
            effect = "resolved" if key in self.open else "nothing"
            self.open.discard(key)
        return Step(effect, key, event)

    @property
    def effects(self) -> list[str]:
        """The effect of each event, in order."""
        return [step.effect for step in self.steps]


def _json(code: int, **content: Any) -> Answer:
    headers = (("Content-Type", "application/json"),)
    return Answer(code, headers, json.dumps(content).encode())
