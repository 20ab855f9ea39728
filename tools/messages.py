"""The examples in docs/messages.md, from the code of the sinks. For ``tools/reference.py``."""

import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.config.sinks import Alertmanager, Email, Links, Messages
from notbefore.core.event_types import SPOT_REBALANCE
from notbefore.core.message import Message
from notbefore.courier.sinks import alertmanager, email, pagerduty, slack
from notbefore.wording import colors
from notbefore.wording.texts import text_of
from support.azure import ME, STARTED, at
from support.messages import message, with_record_fields

LINKS: Final = Links(
    dashboard="https://grafana.example.org/d/notbefore-vm?var-vm={vm}",
    runbook="https://wiki.example.org/scheduled-events#{event_type}",
    page="https://{vm}.example.org:10169/",
)
REBOOT: Final = {
    "EventType": "Reboot",
    "DurationInSeconds": -1,
    "EventSource": "User",
    "Description": "Virtual machine is going to be restarted as requested by authorized user.",
}
ADVICE: Final = {"EventType": SPOT_REBALANCE, "DurationInSeconds": -1}
LATER: Final = {"NotBefore": "Sun, 01 Mar 2026 12:45:00 GMT"}
FINISHED: Final = message(REBOOT, REBOOT | STARTED, None, seconds=(2, 900, 1500))
APPROVAL: Final = {
    "change": "approved",
    "reason": "accepted",
    "approval_rule": "drained",
    "approval_by": "rule",
}
MESSAGES: Final = {  # heading -> message
    "Announced": message(REBOOT, now=at(2)),
    "Announced, of another type": message({}, now=at(2)),
    "Announced, of several VMs": message(
        REBOOT | {"Resources": [ME, "WestNO_1", "WestNO_2", "WestNO_3", "WestNO_4"]}
    ),
    "Updated: NotBefore moved": message(REBOOT, REBOOT | LATER, now=at(60)),
    "Updated: it no longer affects this VM": message(
        REBOOT, REBOOT | {"Resources": ["WestNO_7"]}, now=at(60)
    ),
    "Reminder": message(REBOOT, kind="reminder", now=at(600)),
    "Started": message(REBOOT, REBOOT | STARTED, seconds=(2, 900), now=at(900)),
    "Started without notice": message(REBOOT | STARTED, now=at(2)),
    "Finished": with_record_fields(FINISHED, interruption_seconds=95.0),
    "Canceled": message(REBOOT, None, now=at(120)),
    "Ended: no agent saw how": with_record_fields(
        message(REBOOT, None, kind="ended"), change="ended", outcome="unknown"
    ),
    "Announced: a recommendation": message(ADVICE, now=at(2)),
    "Ended: a recommendation was withdrawn": message(ADVICE, None, now=at(120)),
    "Approved": with_record_fields(message(REBOOT, kind="approved", now=at(60)), **APPROVAL),
}
WITHOUT_ALERT: Final = ("approved", "approval_failed", "approval_skipped")
COLORS: Final = {  # color of an attachment in Slack -> its name
    colors.COLORS["critical"]: "red",
    colors.COLORS["warning"]: "orange",
    colors.COLORS["info"]: "blue",
    colors.OVER: "green",
}
TABLE: Final = """## The kinds

The title, and how the sinks mark the message.

| message | title | Slack | PagerDuty | Alertmanager |
|---|---|---|---|---|
"""


def mail(example: Message) -> str:
    """Return the e-mail as text."""
    account = Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",))
    composed = email.compose(example, text_of(example, Messages(links=LINKS)), account)
    plain = composed.get_body(("plain",))
    content = plain.get_content() if plain is not None else ""
    return f"```text\nSubject: {composed['Subject']}\n\n{content}```\n"


def pager(example: Message) -> dict[str, Any]:
    """Return the request to PagerDuty, without its routing key."""
    shown = example
    if not example.record.no_longer_affected:
        shown = example.shared
    return pagerduty.event(shown, text_of(shown, Messages(links=LINKS)))


def row(heading: str, example: Message) -> str:
    """Return a row of the table."""
    text = text_of(example, Messages(links=LINKS))
    (attachment,) = slack.content(example, text)["attachments"]
    incident = "-"
    alert = "-"
    if example.kind not in WITHOUT_ALERT:
        event = pager(example)
        incident = f"{event['event_action']}, {event['payload']['severity']}"
        member = Alertmanager(urls=("http://am-0:9093",))
        status = "resolved" if example.over else "firing"
        severity = alertmanager.alerts(example, text, member)[0]["labels"]["severity"]
        alert = f"{status}, {severity}"
    color = COLORS[attachment["color"]]
    return f"| {heading} | {text.title} | {color} | {incident} | {alert} |\n"


def page() -> str:
    """Return the generated part of docs/messages.md."""
    parts = ["## One Reboot\n"]
    for heading in ("Announced", "Started", "Finished"):
        parts.append(f"### {heading}\n\n{mail(MESSAGES[heading])}")

    parts.append(
        "## One pager\n\nThe request to PagerDuty for this Reboot. At its end follows a `resolve`"
        " with the same key.\n"
    )
    request = json.dumps(pager(MESSAGES["Announced"]), indent=2, ensure_ascii=False)
    parts.append(f"```json\n{request}\n```\n")

    parts.append(
        "## One drill\n\n`notbefore drill` sends this through the real routes and sinks.\n"
    )
    parts.append(mail(message(REBOOT, exercise=True, now=at(2))))

    rows = "".join(row(heading, example) for heading, example in MESSAGES.items())
    parts.append(TABLE + rows)
    return "\n".join(parts)
