"""docs/messages.md: what people are sent, made by the sinks' own code; for `tools/reference.py`."""

import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.config.sinks import Alertmanager, Email, Links, Messages
from notbefore.core.event_types import SPOT_REBALANCE
from notbefore.core.message import Message
from notbefore.courier.sinks import alertmanager, email, pagerduty, slack
from notbefore.wording.texts import text_of
from support.azure import ME, STARTED, at
from support.messages import message, recording

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
MESSAGES: Final = {  # by their kinds
    "Announced": message(REBOOT, now=at(2)),
    "Announced, of another type": message({}, now=at(2)),
    "Announced, of several VMs": message(
        REBOOT | {"Resources": [ME, *(f"WestNO_{one}" for one in range(1, 5))]}
    ),
    "Updated: NotBefore moved": message(REBOOT, REBOOT | LATER, now=at(60)),
    "Updated: it no longer affects this VM": message(
        REBOOT, REBOOT | {"Resources": ["WestNO_7"]}, now=at(60)
    ),
    "Reminder": message(REBOOT, kind="reminder", now=at(600)),
    "Started": message(REBOOT, REBOOT | STARTED, seconds=(2, 900), now=at(900)),
    "Started without notice": message(REBOOT | STARTED, now=at(2)),
    "Finished": recording(FINISHED, interruption_seconds=95.0),
    "Canceled": message(REBOOT, None, now=at(120)),
    "Ended: nobody saw how": recording(
        message(REBOOT, None, kind="ended"), change="ended", outcome="unknown"
    ),
    "Announced: a recommendation": message(ADVICE, now=at(2)),
    "Ended: a recommendation was withdrawn": message(ADVICE, None, now=at(120)),
    "Approved": recording(message(REBOOT, kind="approved", now=at(60)), **APPROVAL),
}
APART: Final = ("approved", "approval_failed", "approval_skipped")  # they change no alert
COLORS: Final = {"critical": "red", "warning": "orange", "info": "blue"}
TABLE: Final = """## The kinds

The subject, and how the sinks mark the message.

| message | subject | Slack | PagerDuty | Alertmanager |
|---|---|---|---|---|
"""


def mail(one: Message) -> str:
    """The e-mail as text."""
    account = Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",))
    found = email.compose(one, text_of(one, Messages(links=LINKS)), account)
    return f"```text\nSubject: {found['Subject']}\n\n{found.get_content()}```\n"


def pager(one: Message) -> dict[str, Any]:
    """The request to PagerDuty, without its routing key."""
    said = one if one.record.no_longer_affected else one.shared
    return pagerduty.event(said, text_of(said, Messages(links=LINKS)))


def row(heading: str, one: Message) -> str:
    """One line of the table."""
    text = text_of(one, Messages(links=LINKS))
    (attachment,) = slack.content(one, text)["attachments"]
    colors = {slack.COLORS[severity]: color for severity, color in COLORS.items()} | {
        slack.OVER: "green"
    }
    incident = alert = "-"
    if one.kind not in APART:
        event = pager(one)
        incident = f"{event['event_action']}, {event['payload']['severity']}"
        made = alertmanager.alerts(one, text, Alertmanager(urls=("http://am-0:9093",)))[0]
        alert = f"{'resolved' if one.over else 'firing'}, {made['labels']['severity']}"
    return f"| {heading} | {text.title} | {colors[attachment['color']]} | {incident} | {alert} |\n"


def page() -> str:
    """What is generated in docs/messages.md."""
    parts = ["## One Reboot\n"]
    parts += [
        f"### {heading}\n\n{mail(MESSAGES[heading])}"
        for heading in ("Announced", "Started", "Finished")
    ]
    parts.append(
        "## One pager\n\nWhat PagerDuty is sent of this Reboot; its end is a `resolve` with the"
        " same key.\n"
    )
    parts.append(
        f"```json\n{json.dumps(pager(MESSAGES['Announced']), indent=2, ensure_ascii=False)}\n```\n"
    )
    parts.append(
        "## One drill\n\n`notbefore drill` sends this through the real routes and sinks.\n"
    )
    parts.append(mail(message(REBOOT, exercise=True, now=at(2))))
    parts.append(TABLE + "".join(row(heading, one) for heading, one in MESSAGES.items()))
    return "\n".join(parts)
