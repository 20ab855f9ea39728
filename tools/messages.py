"""docs/messages.md: every kind of message of every sink, made by the sinks' own code; for `tools/reference.py`."""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from html import unescape
from itertools import count
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.messages import Links, Messages
from notbefore.config.sinks import KINDS, Alertmanager, Email, SinkSettings
from notbefore.core.change import SILENT, Change, LifecycleKind
from notbefore.core.clock import Instant
from notbefore.core.delivery import MessageKind, Routing, Terms, deliveries, delivery_id
from notbefore.core.document import Document, parse
from notbefore.core.lifecycle import diff
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.core.routing import Route
from notbefore.core.tracked import Observation, Tracked
from notbefore.courier.message import Message, Usual
from notbefore.courier.render import Renderer
from notbefore.courier.sinks import alertmanager, apprise, email, pagerduty, slack, windows_event_log
from notbefore.courier.wording import Text
from notbefore.fleet.partition import Item, Partition
from notbefore.fleet.waves import Grouping, Notification
from notbefore.simulator.fleet import heartbeats, maintenance, scale_set
from notbefore.simulator.fleet import message as hub_message

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
HEAD: Final = """# Messages

{note}
This page shows every kind of message of every sink for a Reboot, a Freeze and a Preempt: what somebody reads at three
in the morning. [Several VMs](#several-vms) and [the fleet](#the-fleet) follow. The configuration has
`messages.time_zone: Europe/Berlin` and all three links. [Notifications](notifications.md) says how to change the texts:
`messages.advice` says what to do, and templates replace the whole text.

Each message is printed as the e-mail: the subject and the plain text. The line below it says how the other sinks send
the same subject and text; what differs stands there as well. [Complete requests](#complete-requests) stand at the end.
The sinks `webhook`, `command`, `event_hub` and `otlp_logs` send [the record](record.md) instead of a text.

In Slack, with a bot token, an event is one message. The first message of the event is posted; each later one takes its
place, and is added to its thread in short. With an incoming webhook each message is posted.
"""


class Example(Struct, frozen=True):
    """A type of event, as Azure lists it; times in seconds."""

    event_type: str
    notice: int
    duration: int
    measured: float | None
    usual: Usual | None
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
    usual=Usual(88.0, 4),
    source="User",
    description="Virtual machine is going to be restarted as requested by authorized user.",
)
FREEZE: Final = Example(
    event_type="Freeze",
    notice=900,
    duration=5,
    measured=4.2,
    usual=Usual(3.9, 9),
    source="Platform",
    description="Virtual machine is being paused because of a memory-preserving Live Migration operation.",
)
PREEMPT: Final = Example(
    event_type="Preempt", notice=30, duration=-1, measured=None, usual=None, source="Platform", description=""
)
MANY: Final = replace(REBOOT, resources=tuple(f"web_{number}" for number in range(5)))
STARTED: Final = {"EventStatus": "Started", "NotBefore": ""}


# ---- the messages


def messages(example: Example) -> Iterator[tuple[str, tuple[Message, datetime]]]:
    """Every kind of message of an event: a heading, and the message with the time at which it is sent."""
    listed, started = example.item(), example.item(**STARTED)
    later = example.item(NotBefore=format_datetime(BEGIN + timedelta(seconds=3 * example.notice), usegmt=True))
    others = example.item(Resources=["web_7"])
    end = example.notice + 600
    yield "Announced", _message(example, (2, listed))
    yield "Updated: NotBefore moved", _message(example, (2, listed), (60, later))
    described = example.item(Description=f"{example.description} It takes longer.".strip())
    yield "Updated: not NotBefore", _message(example, (2, listed), (60, described))
    yield "Updated: it no longer affects this VM", _message(example, (2, listed), (60, others))
    yield "Reminder", _reminder(example, example.notice * 2 // 3, (2, listed))
    yield "Started", _message(example, (2, listed), (example.notice, started))
    yield "Started without notice", _message(example, (2, started))
    yield "Reminder that it has not ended", _reminder(example, 1_800, (2, listed), (example.notice, started))
    yield "Finished", _message(example, (2, listed), (example.notice, started), (end, None))
    if example.measured is not None:
        steps = ((2, listed), (example.notice, started), (end, None))
        yield "Finished, and nothing was measured", _message(replace(example, measured=None), *steps)
    yield "Canceled", _message(example, (2, listed), (120, None))
    gone = _message(example, (2, listed), (end, None), silence=7_200.0)
    yield "Ended: nobody saw how", gone
    approvals: tuple[tuple[str, MessageKind, str], ...] = (
        ("Approved", "approved", "accepted"),
        ("Approval failed", "approval_failed", "refused"),
        ("Approval skipped", "approval_skipped", "not_ready"),
    )
    for heading, kind, reason in approvals:
        fields = {"change": kind, "reason": reason, "approval_rule": "drained", "approval_by": "rule"}
        one, when = _message(example, (2, listed), fields=fields)
        yield heading, (_as(kind, one), when)
    one, when = _message(example, (2, listed))
    note = "sink oncall refused a message: 403: invalid_token"
    yield "A sink fails", (replace(_as("sink_failed", one), note=note), when)


def _message(
    example: Example,
    *looks: tuple[int, dict[str, Any] | None],
    silence: float = 1.0,
    fields: Mapping[str, Any] = {},
) -> tuple[Message, datetime]:
    """The message about the last of the steps that IMDS shows, each with its second."""
    tracked, last = Tracked(), None
    steps: list[tuple[int, dict[str, Any] | None]] = [(0, None), *looks]
    for number, (second, item) in enumerate(steps):
        when = BEGIN + timedelta(seconds=second)
        pause = silence if number == len(steps) - 1 else 1.0
        step = diff(tracked, _document(number, item), Observation(Instant(when, "boot", second, when), VM.name, pause))
        tracked, last = step.tracked, next(iter(step.changes), last)
    if last is None:
        raise SystemExit("these steps make no change")
    measured = {"interruption_seconds": example.measured} if last.outcome == "finished" else {}
    return _opened(example, last, measured | dict(fields)), last.time


def _opened(example: Example, change: Change, fields: dict[str, Any]) -> Message:
    record = replace(Record.of(change, VM), **fields)
    return replace(_delivered(change, record), usual=example.usual)


def _delivered(change: Change, record: Record) -> Message:
    routing = Routing((Route(sinks=("it",), announce_by="all"),), {"it": Terms()})
    (delivery,) = deliveries(change, record.line(), routing, VM)
    return Message.of(delivery)


def _reminder(example: Example, after: int, *looks: tuple[int, dict[str, Any] | None]) -> tuple[Message, datetime]:
    one, when = _message(example, *looks)
    return _as("reminder", one), when + timedelta(seconds=after)


def _as(kind: MessageKind, one: Message) -> Message:
    """The message as one of another kind, under an id of its own."""
    return replace(one, kind=kind, delivery_id=delivery_id(one.record.change_id, one.sink, kind))


def _document(number: int, item: dict[str, Any] | None) -> Document:
    return parse(msgspec.json.encode({"DocumentIncarnation": number, "Events": [item] if item else []}))


# ---- what `notbefore fleet` sends


def fleet_messages() -> Iterator[tuple[str, tuple[Message, datetime]]]:
    """A wave of events, and VMs that fall silent: a heading, and the message with the time at which it is sent."""
    fold = Partition("0", Grouping(("scale_set", "event_type")), 3_600.0, lambda *_: None)
    vms = scale_set("web", 20)
    events = maintenance(vms, 4, BEGIN, 900.0)
    silent, silence = vms[-2:], range(3_000, 5_000)  # two VMs, and the seconds in which nothing is heard from them
    made: list[Notification] = []
    sequence = count()

    def read(second: float, records: Iterable[Record | Heartbeat]) -> None:
        for record in records:
            number = next(sequence)
            made.extend(fold.add(Item(hub_message(record)[1], number, str(number), BEGIN.timestamp() + second)))

    steps: dict[int, LifecycleKind] = {60: "announced", 960: "started", 1_560: "finished"}
    for second in range(0, 7_200, 60):
        now = BEGIN + timedelta(seconds=second)
        if second % 300 == 0:
            read(second, heartbeats((vm for vm in vms if not (vm in silent and second in silence)), now, 300.0))
        if second in steps:
            read(second, (event.seen(vm, steps[second], now) for event in events for vm in vms))
        made.extend(fold.advance(now.timestamp()))
    headings = {  # what stands between these is a digest
        ("Freeze", "announced"): "Announced",
        ("Freeze", "started"): "Started",
        ("Freeze", "finished"): "Finished",
        (SILENT, "started"): "VMs are silent",
        (SILENT, "finished"): "They are heard from again",
    }
    for one in made:
        heading = headings.get((one.change.event.event_type, one.change.kind))
        if heading is not None:
            record = Record.of(one.change, one.vm, fleet=one.facts)
            yield heading, (_delivered(one.change, record), one.change.time)


# ---- what each sink makes of one


class Shown(Struct, frozen=True):
    """What a sink makes of a message: how it marks it, the title, and the complete request."""

    sink: str
    mark: str
    title: str
    request: Any

    def has(self, text: Text) -> bool:
        """Whether the request has everything that the e-mail says."""
        said = unescape(json.dumps(self.request, ensure_ascii=False)).replace('\\"', '"')
        parts = (text.summary, text.advice, *(fact.value for fact in text.facts))
        return all(part in said for part in parts)


def shown(message: Message, now: datetime) -> Iterator[Shown]:
    """By every sink that people read."""
    render = Renderer(SinkSettings(), SETTINGS)
    text, shared = render(message, now), message.shared
    colors = {color: name for name, color in slack.COLORS.items()} | {slack.OVER: "over"}
    content = slack.content(message, text, now)
    (attachment,) = content["attachments"]
    color = {"critical": "red", "warning": "orange", "info": "blue", "over": "green"}[colors[attachment["color"]]]
    yield Shown("slack", color, text.title, content)
    said = message if message.record.no_longer_affected else shared
    if message.kind not in ("sink_failed", "approved", "approval_failed", "approval_skipped"):  # they are no alerts
        event = pagerduty.event(said, render(said, now))
        payload = event["payload"]
        yield Shown("pagerduty", f"{event['event_action']}, {payload['severity']}", payload["summary"], event)
        alert = alertmanager.alert(message, render(shared, now), Alertmanager(urls=("http://am-0:9093",)))
        state = "resolved" if message.over else "firing"
        yield Shown("alertmanager", f"{state}, {alert['labels']['severity']}", alert["annotations"]["summary"], alert)
    notification = apprise.notification(message, text)
    yield Shown("apprise", notification["type"], notification["title"], notification)
    event_id, kind, strings = windows_event_log.entry(message, text)
    level = {windows_event_log.ERROR: "Error", windows_event_log.WARNING: "Warning"}.get(kind, "Information")
    entry = {"id": event_id, "type": level, "strings": strings[:2]}
    yield Shown("windows_event_log", f"{level}, id {event_id}", strings[0], entry)


def mail(message: Message, now: datetime) -> str:
    """The e-mail as text."""
    account = email.account_of(Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",)))
    text = Renderer(SinkSettings(), SETTINGS)(message, now)
    found = email.compose(message, text, account, now)
    body = found.get_body(("plain",))
    if body is None:
        raise SystemExit("the e-mail has no text")
    return f"Subject: {found['Subject']}\n\n{body.get_content()}"


# ---- the page


def page(note: str) -> str:
    """docs/messages.md."""
    known = {one.sink for one in shown(*_message(REBOOT, (2, REBOOT.item())))} | {"email"}
    missing = {name for name, settings in KINDS.items() if settings.WORDS} - known
    if missing:
        raise SystemExit(f"tools/messages.py: add {', '.join(missing)} to `shown`")
    parts = [HEAD.format(note=note)]
    for example in (REBOOT, FREEZE, PREEMPT):
        parts.append(f"## {example.event_type}\n")
        parts += [_section(f"### {example.event_type}: {heading}", *one) for heading, one in messages(example)]
    parts.append("## Several VMs\n\nOne Reboot of five VMs, sent by `web_0`.\n")
    kinds = ("Announced", "Started", "Finished")
    parts += [_section(f"### Five VMs: {heading}", *one) for heading, one in messages(MANY) if heading in kinds]
    parts.append(
        "## The fleet\n\nA maintenance of 20 VMs, four at a time, and two VMs that fall silent. `notbefore fleet` with"
        " `group_by: [scale_set, event_type]` sends these messages.\n"
    )
    parts += [_section(f"### The fleet: {heading}", *one) for heading, one in fleet_messages()]
    parts.append("## Complete requests\n\nThe announcement of the Reboot; and its end, for the sinks that close it.\n")
    for heading, one in messages(REBOOT):
        parts += [
            _request(heading, item)
            for item in shown(*one)
            if heading == "Announced" or (heading == "Finished" and item.sink in ("pagerduty", "alertmanager"))
        ]
    step = slack.step(Renderer(SinkSettings(), SETTINGS)(*_message(REBOOT, (2, REBOOT.item()), (900, None))))
    parts.append(f"### slack: a step in the thread\n\n{_json(step)}")
    return "\n".join(parts)


def _section(heading: str, message: Message, now: datetime) -> str:
    text = Renderer(SinkSettings(), SETTINGS)(message, now)
    sinks = " · ".join(f"`{one.sink}`: {one.mark}{_difference(one, message, text)}" for one in shown(message, now))
    return f"{heading}\n\n```text\n{mail(message, now)}```\n\n{sinks}\n"


def _difference(one: Shown, message: Message, text: Text) -> str:
    """What differs from the e-mail."""
    title = f', with the subject "{one.title}"' if one.title != text.title else ""
    if one.has(text):
        return title
    if one.sink in ("pagerduty", "alertmanager") and message.record.shared != message.record:
        return f"{title}, without what is known of {VM.name} alone"
    raise SystemExit(f"{one.sink} leaves something out: {text.title}")


def _request(heading: str, one: Shown) -> str:
    return f"### {one.sink}: {heading.lower()}\n\n{_json(one.request)}"


def _json(value: Mapping[str, Any]) -> str:
    return f"```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page(""))
