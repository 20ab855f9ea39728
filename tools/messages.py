"""docs/messages.md: what people are sent, made by the sinks' own code; for `tools/reference.py`."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from notbefore.config.messages import Links, Messages
from notbefore.config.sinks import Alertmanager, Email
from notbefore.core.clock import Instant
from notbefore.core.delivery import MessageKind, Routing, Terms, deliveries, delivery_id
from notbefore.core.document import Document, parse
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.core.routing import Route
from notbefore.core.tracked import Observation, Tracked
from notbefore.courier.message import Message
from notbefore.courier.sinks import alertmanager, email, pagerduty, slack
from notbefore.courier.wording import text_of

BEGIN: Final = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)
SETTINGS: Final = Messages(
    links=Links(
        dashboard="https://grafana.example.org/d/notbefore-vm?var-vm={vm}",
        runbook="https://wiki.example.org/scheduled-events#{event_type}",
        page="https://{vm}.example.org:10169/",
    ),
)
VM: Final = Vm(
    name="web_0",
    vm_id="02aab8a4-74ef-476e-8182-f6d2ba4166a6",
    resource_id="/subscriptions/s-1/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines/web_0",
    subscription_id="s-1",
    resource_group="shop",
    location="westeurope",
    zone="2",
    scale_set="web",
)
TABLE: Final = """## The kinds

The subject, and how the sinks mark the message.

| message | subject | Slack | PagerDuty | Alertmanager |
|---|---|---|---|---|
"""


MEASURED: Final = 95.0  # seconds of interruption
APART: Final = ("approved", "approval_failed", "approval_skipped")  # they change no alert


def listed(event_type: str, notice: float = 900, **fields: Any) -> dict[str, Any]:
    """The event in the document, ``notice`` seconds before NotBefore."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": event_type,
        "ResourceType": "VirtualMachine",
        "Resources": ["web_0"],
        "NotBefore": format_datetime(BEGIN + timedelta(seconds=notice), usegmt=True),
        "Description": "Virtual machine is going to be restarted as requested by authorized user.",
        "EventSource": "User",
        "DurationInSeconds": -1,
        **fields,
    }


REBOOT: Final = listed("Reboot")
STARTED: Final = {**REBOOT, "EventStatus": "Started", "NotBefore": ""}


# ---- the messages


def messages() -> Iterator[tuple[str, tuple[Message, datetime]]]:
    """The kinds of messages: a heading, and the message with the time at which it is sent."""
    first = (2, REBOOT)
    yield "Announced", _message(first)
    yield "Announced, of another type", _message((2, listed("Freeze", DurationInSeconds=5)))
    yield "Announced, of several VMs", _message((2, listed("Reboot", Resources=[f"web_{one}" for one in range(5)])))
    yield "Updated: NotBefore moved", _message(first, (60, listed("Reboot", 2_700)))
    yield "Updated: it no longer affects this VM", _message(first, (60, {**REBOOT, "Resources": ["web_7"]}))
    yield "Reminder", _as("reminder", *_message(first), after=600)
    yield "Started", _message(first, (900, STARTED))
    yield "Started without notice", _message((2, STARTED))
    yield "Finished", _message(first, (900, STARTED), (1_500, None))
    yield "Canceled", _message(first, (120, None))
    yield "Ended: nobody saw how", _message(first, (1_500, None), silence=7_200.0)
    fields: dict[str, Any] = {
        "change": "approved",
        "reason": "accepted",
        "approval_rule": "drained",
        "approval_by": "rule",
    }
    yield "Approved", _as("approved", *_message(first, **fields))


def _message(
    *looks: tuple[int, dict[str, Any] | None], silence: float = 1.0, **fields: Any
) -> tuple[Message, datetime]:
    """The message about the last of the steps that IMDS shows, each with its second; ``fields``: of the record."""
    tracked, last = Tracked(), None
    for number, (second, item) in enumerate(((0, None), *looks)):
        when = BEGIN + timedelta(seconds=second)
        pause = silence if number == len(looks) else 1.0
        step = diff(tracked, _document(number, item), Observation(Instant(when, "boot", second, when), VM.name, pause))
        tracked, last = step.tracked, next(iter(step.changes), last)
    if last is None:
        raise SystemExit("these steps make no change")
    if last.outcome == "finished":
        fields["interruption_seconds"] = MEASURED
    record = replace(Record.of(last, VM), **fields)
    routing = Routing((Route(sinks=("it",), announce_by="all"),), {"it": Terms()})
    (delivery,) = deliveries(last, record.line(), routing, VM)
    return Message.of(delivery), last.time


def _as(kind: MessageKind, one: Message, when: datetime, after: int = 0) -> tuple[Message, datetime]:
    """The message as one of another kind, under an id of its own, so many seconds later."""
    own_id = delivery_id(one.record.change_id, one.sink, kind)
    return replace(one, kind=kind, delivery_id=own_id), when + timedelta(seconds=after)


def _document(number: int, item: dict[str, Any] | None) -> Document:
    return parse(msgspec.json.encode({"DocumentIncarnation": number, "Events": [item] if item else []}))


# ---- what the sinks make of one


def mail(message: Message, now: datetime) -> str:
    """The e-mail as text."""
    account = Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",))
    found = email.compose(message, text_of(message, now, SETTINGS), account, now)
    return f"```text\nSubject: {found['Subject']}\n\n{found.get_content()}```\n"


def pager(message: Message, now: datetime) -> dict[str, Any]:
    """The request to PagerDuty, without its routing key."""
    said = message if message.record.no_longer_affected else message.shared
    return pagerduty.event(said, text_of(said, now, SETTINGS))


def row(heading: str, message: Message, now: datetime) -> str:
    """One line of the table."""
    text = text_of(message, now, SETTINGS)
    (attachment,) = slack.content(message, text, now)["attachments"]
    colors = {color: name for name, color in slack.COLORS.items()} | {slack.OVER: "over"}
    color = {"critical": "red", "warning": "orange", "info": "blue", "over": "green"}[colors[attachment["color"]]]
    incident = alert = "-"
    if message.kind not in APART:
        event = pager(message, now)
        incident = f"{event['event_action']}, {event['payload']['severity']}"
        made = alertmanager.alerts(message, text, Alertmanager(urls=("http://am-0:9093",)))[0]
        alert = f"{'resolved' if message.over else 'firing'}, {made['labels']['severity']}"
    return f"| {heading} | {text.title} | {color} | {incident} | {alert} |\n"


# ---- the page


def page() -> str:
    """What is generated in docs/messages.md."""
    found = dict(messages())
    parts = ["## One Reboot\n"]
    parts += [f"### {heading}\n\n{mail(*found[heading])}" for heading in ("Announced", "Started", "Finished")]
    parts.append("## One pager\n\nWhat PagerDuty is sent of this Reboot; its end is a `resolve` with the same key.\n")
    parts.append(_json(pager(*found["Announced"])))
    parts.append("## One drill\n\n`notbefore drill` sends this through the real routes and sinks.\n")
    announced, when = found["Announced"]
    parts.append(mail(replace(announced, content=replace(announced.record, exercise=True)), when))
    parts.append(TABLE + "".join(row(heading, *one) for heading, one in found.items()))
    return "\n".join(parts)


def _json(value: Mapping[str, Any]) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
