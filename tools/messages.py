"""docs/messages.md: what people are sent, made by the sinks' own code; for `tools/reference.py`."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.messages import Links, Messages
from notbefore.config.sinks import Alertmanager, Email, MessageSettings
from notbefore.core.clock import Instant
from notbefore.core.delivery import MessageKind, Routing, Terms, deliveries, delivery_id
from notbefore.core.document import Document, parse
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.core.routing import Route
from notbefore.core.tracked import Observation, Tracked
from notbefore.courier.message import Message
from notbefore.courier.render import Renderer
from notbefore.courier.sinks import alertmanager, email, pagerduty, slack

BEGIN: Final = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)  # three in the morning, in Berlin
SETTINGS: Final = Messages(
    time_zone="Europe/Berlin",
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
TABLE: Final = """## Every kind

The subject, and how the sinks mark the message.

| event | message | subject | Slack | PagerDuty | Alertmanager |
|---|---|---|---|---|---|
"""


class Example(Struct, frozen=True):
    """A type of event, as Azure lists it; times in seconds."""

    event_type: str
    notice: int
    duration: int
    measured: float | None
    source: str
    description: str
    resources: tuple[str, ...] = ("web_0",)

    def item(self, **fields: Any) -> dict[str, Any]:
        """The event in the document."""
        return {
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "EventStatus": "Scheduled",
            "EventType": self.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(self.resources),
            "NotBefore": format_datetime(BEGIN + timedelta(seconds=self.notice), usegmt=True),
            "Description": self.description,
            "EventSource": self.source,
            "DurationInSeconds": self.duration,
            **fields,
        }


REBOOT: Final = Example(
    event_type="Reboot",
    notice=900,
    duration=-1,
    measured=95.0,
    source="User",
    description="Virtual machine is going to be restarted as requested by authorized user.",
)
FREEZE: Final = Example(
    event_type="Freeze",
    notice=900,
    duration=5,
    measured=4.2,
    source="Platform",
    description="Virtual machine is being paused because of a memory-preserving Live Migration operation.",
)
PREEMPT: Final = Example(event_type="Preempt", notice=30, duration=-1, measured=None, source="Platform", description="")
MANY: Final = replace(REBOOT, resources=tuple(f"web_{number}" for number in range(5)))
LIFE: Final = ("Announced", "Started", "Finished")
NO_ALERTS: Final = ("approved", "approval_failed", "approval_skipped")
STARTED: Final = {"EventStatus": "Started", "NotBefore": ""}


# ---- the messages


def messages(example: Example) -> Iterator[tuple[str, tuple[Message, datetime]]]:
    """Every kind of message of an event: a heading, and the message with the time at which it is sent."""
    listed, started = (2, example.item()), (example.notice, example.item(**STARTED))
    end = (example.notice + 600, None)
    later = format_datetime(BEGIN + timedelta(seconds=3 * example.notice), usegmt=True)
    longer = f"{example.description} It takes longer.".strip()
    yield "Announced", _message(example, listed)
    yield "Updated: NotBefore moved", _message(example, listed, (60, example.item(NotBefore=later)))
    yield "Updated: not NotBefore", _message(example, listed, (60, example.item(Description=longer)))
    yield "Updated: it no longer affects this VM", _message(example, listed, (60, example.item(Resources=["web_7"])))
    yield "Reminder", _as("reminder", *_message(example, listed), after=example.notice * 2 // 3)
    yield "Started", _message(example, listed, started)
    yield "Started without notice", _message(example, (2, started[1]))
    yield "Finished", _message(example, listed, started, end)
    if example.measured is not None:
        yield "Finished, and nothing was measured", _message(replace(example, measured=None), listed, started, end)
    yield "Canceled", _message(example, listed, (120, None))
    yield "Ended: nobody saw how", _message(example, listed, end, silence=7_200.0)
    approvals: tuple[tuple[str, MessageKind, str], ...] = (
        ("Approved", "approved", "accepted"),
        ("Approval failed", "approval_failed", "refused"),
        ("Approval skipped", "approval_skipped", "several_resources"),
    )
    for heading, kind, reason in approvals:
        fields: dict[str, Any] = {"change": kind, "reason": reason, "approval_rule": "drained", "approval_by": "rule"}
        yield heading, _as(kind, *_message(example, listed, **fields))


def _message(
    example: Example, *looks: tuple[int, dict[str, Any] | None], silence: float = 1.0, **fields: Any
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
        fields["interruption_seconds"] = example.measured
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
    found = email.compose(message, Renderer(MessageSettings(), SETTINGS)(message, now), account, now)
    body = found.get_body(("plain",))
    if body is None:
        raise SystemExit("the e-mail has no text")
    return f"```text\nSubject: {found['Subject']}\n\n{body.get_content()}```\n"


def pager(message: Message, now: datetime) -> dict[str, Any]:
    """The request to PagerDuty, without its routing key."""
    said = message if message.record.no_longer_affected else message.shared
    return pagerduty.event(said, Renderer(MessageSettings(), SETTINGS)(said, now))


def row(event_type: str, heading: str, message: Message, now: datetime) -> str:
    """One line of the table."""
    text = Renderer(MessageSettings(), SETTINGS)(message, now)
    (attachment,) = slack.content(message, text, now)["attachments"]
    colors = {color: name for name, color in slack.COLORS.items()} | {slack.OVER: "over"}
    color = {"critical": "red", "warning": "orange", "info": "blue", "over": "green"}[colors[attachment["color"]]]
    incident = alert = "-"
    if message.kind not in NO_ALERTS:
        event = pager(message, now)
        incident = f"{event['event_action']}, {event['payload']['severity']}"
        made = alertmanager.alerts(message, text, Alertmanager(urls=("http://am-0:9093",)))[0]
        alert = f"{'resolved' if message.over else 'firing'}, {made['labels']['severity']}"
    return f"| {event_type} | {heading} | {text.title} | {color} | {incident} | {alert} |\n"


# ---- the page


def page() -> str:
    """What is generated in docs/messages.md."""
    of_the_reboot = dict(messages(REBOOT))
    parts = ["## One Reboot\n"]
    shown = ("Announced", "Started", "Finished")  # a reminder has the text of the announcement
    parts += [f"### {heading}\n\n{mail(*of_the_reboot[heading])}" for heading in shown]
    parts.append("## One pager\n\nWhat PagerDuty is sent of this Reboot; its end is a `resolve` with the same key.\n")
    parts.append(_json(pager(*of_the_reboot["Announced"])))
    parts.append("## One drill\n\n`notbefore drill` sends this through the real routes and sinks.\n")
    announced, when = of_the_reboot["Announced"]
    exercise = replace(announced, content=replace(announced.record, exercise=True))
    parts.append(mail(exercise, when))
    rows = (
        row(example.event_type, heading, *one)
        for example in (REBOOT, FREEZE, PREEMPT)
        for heading, one in messages(example)
        if example is REBOOT or one[0].kind not in NO_ALERTS  # these are the same for each type
    )
    several = (row("Reboot of 5 VMs", heading, *one) for heading, one in messages(MANY) if heading in LIFE)
    parts.append(TABLE + "".join((*rows, *several)))
    return "\n".join(parts)


def _json(value: Mapping[str, Any]) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
