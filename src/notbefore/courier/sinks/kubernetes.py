"""Kubernetes: an ``Event`` on the node for each message, and the condition ``AzureScheduledEvent``
of the node while an event of this VM is listed.

``kubectl describe node`` finds an Event by the kind and the name of its object and by its uid, for
which the kubelet writes the node's name, as this sink does. The object has no namespace, so the
Event is in ``default``.

Several events share the one condition. Its message names them all, and the node keeps it: an empty
patch returns the node, and the sink adds or removes one event. So a restart forgets nothing.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Struct

from notbefore.config.sinks import SERVICE_ACCOUNT, Kubernetes, Messages
from notbefore.core.change import APPROVAL_KINDS
from notbefore.core.message import Message, Templated
from notbefore.core.record import json_line
from notbefore.core.text import one_line, rfc3339, sha256, shortened
from notbefore.courier.http_sink import HttpSink
from notbefore.courier.sink import Receipt
from notbefore.errors import SendError
from notbefore.net.http import Http
from notbefore.net.response import SUCCESSFUL, HttpResponse, error_of_status
from notbefore.wording.texts import Text, text_of

CONDITION: Final = "AzureScheduledEvent"
CA_FILE: Final = f"{SERVICE_ACCOUNT}/ca.crt"
EVENTS: Final = "/api/v1/namespaces/default/events"
JSON: Final = "application/json"
PATCH: Final = "application/strategic-merge-patch+json"
REQUESTS: Final = 3  # for one message
HEARTBEAT: Final = 300.0  # seconds between two updates of the condition, as the kubelet's
MAX_MESSAGE: Final = 1024  # characters; the limit of events.k8s.io
MAX_REASON: Final = 128  # characters; the same
MAX_LISTED_EVENTS: Final = 50  # in the condition; when there are more, it forgets the oldest
MAX_SENTENCE: Final = 300  # characters about one event in the condition
CONFLICT: Final = 409
SEPARATOR: Final = " | "  # between the events in the message of the condition
HINTS: Final = {
    401: "the API server does not accept the token of the service account",
    403: "the service account needs `create` of events in the namespace default and `patch` of"
    " nodes/status, which the Helm chart grants",
    404: "is this the name of the node, and the address of its API server?",
}
_LISTED: Final = re.compile(r"(\w+): (.*) \(([^()|]+)\)")


class ListedEvent(NamedTuple):
    """One event in the message of the condition."""

    event_id: str
    reason: str  # Azure's type and status: RebootScheduled
    sentence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.sentence} ({self.event_id})"


class NodeCondition(Struct, frozen=True):
    """A condition of a node, as the API server has it."""

    type: str
    message: str = ""


class NodeStatus(Struct, frozen=True):
    """The status of a node."""

    conditions: tuple[NodeCondition, ...] = ()


class Node(Struct, frozen=True):
    """A node, as far as this sink reads it."""

    kind: Literal["Node"]
    status: NodeStatus = NodeStatus()

    @property
    def condition(self) -> NodeCondition | None:
        """The condition of this sink; ``None`` if the node does not have it."""
        for condition in self.status.conditions:
            if condition.type == CONDITION:
                return condition
        return None


class Sink(HttpSink):
    """The node of this agent."""

    def __init__(self, _name: str, settings: Kubernetes, messages: Messages) -> None:
        url = settings.api_server()
        self._settings = settings
        self._node = settings.node()
        self._events_url = f"{url}{EVENTS}"
        self._status_url = f"{url}/api/v1/nodes/{quote(self._node)}/status"
        timeout = settings.timeout.seconds / REQUESTS
        super().__init__(messages, Http(timeout, ca_file=settings.ca_file or CA_FILE))

    def send(self, message: Message) -> Receipt:
        """Update the condition, and create the Event.

        An Event that exists was created by an attempt whose answer was lost.
        """
        record = message.record
        if record.fleet_events is not None:
            raise SendError("this sink is for the agent on a node, not for a fleet", permanent=True)

        is_in_condition = self._update_condition(message)
        event = event_of(message, self._node, text_of(message, self._messages))
        response = self._http.post(self._events_url, self._headers(JSON), json_line(event))
        if response.status != CONFLICT:
            _check(response, "create the event")

        if not is_in_condition:
            return Receipt()
        return Receipt(thread=CONDITION, repeat=HEARTBEAT)

    def _update_condition(self, message: Message) -> bool:
        """Add the event of a message to the condition, or remove it; return whether it is there.

        The result of an approval may arrive after the event has ended, so it adds no event.
        """
        condition = self._patch_status({}).condition
        events: dict[str, ListedEvent] = {}
        if condition is not None:
            events = read_events(condition.message)
        event = listed_event(message)
        was_there = events.pop(event.event_id, None) is not None
        may_be_added = was_there or message.kind not in APPROVAL_KINDS
        is_there = is_listed(message) and may_be_added
        if is_there:
            events[event.event_id] = event

        if events:
            updated = condition_of(events.values(), rfc3339(message.now))
            if condition is None:
                updated["lastTransitionTime"] = updated["lastHeartbeatTime"]
        elif condition is not None:
            updated = {"type": CONDITION, "$patch": "delete"}
        else:
            return False
        self._patch_status({"status": {"conditions": [updated]}})
        return is_there

    def _patch_status(self, patch: dict[str, Any]) -> Node:
        """Patch the status of the node, and return the node."""
        response = self._http.patch(self._status_url, self._headers(PATCH), json_line(patch))
        _check(response, f"patch the status of the node {self._node}")
        try:
            return msgspec.convert(response.json(), type=Node)
        except msgspec.ValidationError as error:
            raise SendError(
                f"this is not the answer of an API server: {error}: {response.cause}"
            ) from None

    def _headers(self, content_type: str) -> dict[str, str]:
        """Return the headers, with the token as it is now: the kubelet replaces it every hour."""
        return {
            "Accept": JSON,
            "Authorization": f"Bearer {self._settings.token.reveal()}",
            "Content-Type": content_type,
        }


def event_of(message: Message, node: str, text: Text) -> dict[str, Any]:
    """Return the Event of a message. Its name is the same for each attempt."""
    record = message.record
    digest = sha256(f"{node}\n{message.delivery_id}".encode())[:32]
    # not the title: its times are relative to now, and people read an Event later
    words = f"{record.body}. {text.advice}"
    if message.templated != Templated():
        words = f"{text.title}: {text.plain}"
    tail = f" EventId: {one_line(record.event_id)}"
    event_type = "Warning"
    if message.shown_severity == "info":
        event_type = "Normal"
    time = rfc3339(record.time)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"notbefore-{digest}", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "type": event_type,
        "reason": _reason(record.event_type, *message.kind.split("_")),
        "message": shortened(one_line(words), MAX_MESSAGE - len(tail)) + tail,
        "source": {"component": "notbefore", "host": node},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


def is_listed(message: Message) -> bool:
    """Whether the event of a message is listed by Azure, and affects this VM or may do so."""
    record = message.record
    return not message.settled and not record.exercise and record.scope != "peer"


def listed_event(message: Message) -> ListedEvent:
    """Return the event of a message as the condition names it."""
    record = message.record
    sentence = one_line(record.body).replace(SEPARATOR, " ")
    return ListedEvent(
        event_id=re.sub(r"[()|\s]", "_", one_line(record.event_id)),
        reason=_reason(record.event_type, record.event_status),
        sentence=shortened(sentence, MAX_SENTENCE),
    )


def read_events(text: str) -> dict[str, ListedEvent]:
    """Return the events, by id, that the message of a condition names."""
    events: dict[str, ListedEvent] = {}
    for part in text.split(SEPARATOR):
        match = _LISTED.fullmatch(part)
        if match is not None:
            reason, sentence, event_id = match.groups()
            events[event_id] = ListedEvent(event_id, reason, sentence)
    return events


def condition_of(events: Iterable[ListedEvent], now: str) -> dict[str, str]:
    """Return the condition for these events, the oldest first."""
    newest = list(events)[-MAX_LISTED_EVENTS:]
    reasons = dict.fromkeys(event.reason for event in newest)
    return {
        "type": CONDITION,
        "status": "True",
        "reason": ",".join(reasons),
        "message": SEPARATOR.join(str(event) for event in newest),
        "lastHeartbeatTime": now,
    }


def _reason(*words: str) -> str:
    """Return words in the form of a reason: RebootScheduled."""
    letters = [re.sub("[^A-Za-z0-9]", "", word) for word in words]
    capitalized = [word[:1].upper() + word[1:] for word in letters]
    return "".join(capitalized)[:MAX_REASON] or "Unknown"


def _check(response: HttpResponse, action: str) -> None:
    """Raise ``SendError`` unless the API server did what it was asked for."""
    if response.status in SUCCESSFUL:
        response.check()
        return
    cause = response.cause
    status = response.json()
    if isinstance(status, dict) and isinstance(status.get("message"), str):
        cause = f"{response.status}: {one_line(status['message'])}"
    hint = HINTS.get(response.status)
    if hint is not None:
        cause = f"{cause} ({hint})"
    error = error_of_status(response.status, f"cannot {action}: {cause}", response.retry_after)
    if error is not None:
        raise error
