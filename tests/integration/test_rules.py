"""The rules in ``config/prometheus``: when each alert fires, with which texts, and when not.

The core computes the series that the rules read from the events of a fleet
(``support.fast_motion``). A renamed metric therefore breaks a test here.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from notbefore.core.event_types import EVENT_TYPES, SPOT_REBALANCE, event_type_of
from notbefore.core.routing import NEAR, severity_of
from notbefore.metrics import fleet
from notbefore.metrics.totals import ConfigFigures, OutboxView
from notbefore.wording.phrases import (
    FINISHED_TITLE,
    KINDS,
    WITHDRAWN_TITLE,
    TypePhrases,
    phrases_of,
)
from support.agent import PATIENCE, run
from support.azure import at, item
from support.fast_motion import Chapters, FleetInstance, FleetVm, Items, Target, input_series
from support.needs import needs

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "config/prometheus/notbefore.rules.yml"
RUNBOOK: Final = ROOT / "docs/runbook.md"
RUNBOOK_URL: Final = "https://github.com/notbefore/notbefore/blob/main/docs/runbook.md"
GROUPS: Final[list[dict[str, Any]]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALERTS: Final = {
    rule["alert"]: rule
    for rule in chain.from_iterable(group["rules"] for group in GROUPS)
    if "alert" in rule
}
# the metrics that the rules read
WANTED: Final = frozenset(
    re.findall(r"\b(?:notbefore|azure)_\w+|\bup\b", RULES.read_text(encoding="utf-8"))
)


class Look(NamedTuple):
    """An alert at some seconds: ``says`` has its summary then, which is empty if it is silent."""

    alert: str
    says: dict[int, str]
    labels: dict[str, str]
    description: str


Case = tuple[str, Sequence[Target], *tuple[Look, ...]]  # the title, the fleet, and its alerts


def look(
    alert: str, says: dict[int, str], value: str = "", description: str = "", **labels: str
) -> Look:
    """Return a look at an alert with these labels; an empty label is left out.

    Without a description, it has the rule's own with the labels and the ``value`` filled in.
    """
    rule = ALERTS[alert]
    all_labels = {**labels, **rule.get("labels", {})}
    present = {name: text for name, text in all_labels.items() if text}
    if not description:
        template = rule["annotations"]["description"]
        with_labels = re.sub(
            r"{{ \$labels\.(\w+) }}", lambda name: present.get(name[1], ""), template
        )
        description = re.sub(r"{{ \$value .*? }}", value, with_labels)
    return Look(alert, says, present, description)


def of_event(alert: str, says: dict[int, str], **more: str) -> Look:
    """Return a look at an alert about a Reboot of ``web_0``, or about an event with ``more``."""
    labels = {
        "event_id": "E1",
        "event_type": "Reboot",
        "event_source": "Platform",
        "severity": "critical",
        "subscription": "s",
        "resource_group": "g",
        "scale_set": "web",
    }
    return look(alert, says, **{**labels, **more})


def recommendation(event_id: str = "E1", **fields: Any) -> dict[str, Any]:
    """A recommendation with a NotBefore that is near, and an expected interruption that is long."""
    near = {"NotBefore": clock(120), "DurationInSeconds": 600}
    return reboot(event_id, **{"EventType": SPOT_REBALANCE, **near, **fields})


def phrases_for(labels: dict[str, str]) -> TypePhrases:
    """The phrases of messages about an event with these labels of its alert."""
    seconds = None
    if labels.get("severity") == "info":
        seconds = 5
    return phrases_of(labels.get("event_type", "Reboot"), seconds)


def filled(advice: str) -> str:
    """The advice as in a message about several VMs."""
    return advice.format(
        the_vm="each affected VM", The_vm="Each affected VM", name_it="give the EventId"
    )


def listed(says: dict[int, str], names: str = "web_0", **more: str) -> Look:
    words = more.pop("words", item()["Description"])
    phrases = phrases_for(more)
    requested = ""
    if more.get("event_source") == "User":
        requested = ", as requested by a user"
    description = (
        f"Azure {phrases.verb} {names}{requested}. What to do: {filled(phrases.ahead)}"
        f" Azure says: {words}"
    )
    return of_event("AzureScheduledEvent", says, description=description, **more)


def imminent(says: dict[int, str], **more: str) -> Look:
    kind = more.get("event_type", "Reboot")
    description = (
        f"NotBefore of the {kind} E1 is less than five minutes away. Azure does not start it"
        f" earlier. What to do: {filled(phrases_for(more).ahead)}"
    )
    return of_event("AzureScheduledEventImminent", says, description=description, **more)


def overdue(says: dict[int, str]) -> Look:
    description = (
        "NotBefore of the Reboot E1 has passed, and Azure has not started it yet: it can start at"
        f" any moment. What to do: {filled(phrases_for({}).ahead)}"
    )
    return of_event("AzureScheduledEventImminent", says, description=description)


def started(says: dict[int, str], at: str, **more: str) -> Look:
    kind = more.get("event_type", "Reboot")
    description = (
        f"Azure started the {kind} E1 at 1970-01-01 {at} UTC. What to do:"
        f" {filled(phrases_for(more).started)}"
    )
    return of_event("AzureScheduledEventStarted", says, description=description, **more)


def sudden(says: dict[int, str], names: str = "web_0", **more: str) -> Look:
    description = (
        f"The Reboot E1 of {names} started without an announcement. The usual cause is failed"
        " hardware, and Azure is already recovering the VM. `notbefore history` on another VM of"
        " the group has its steps."
    )
    return of_event(SUDDENLY, says, description=description, **more)


def of_agent(
    alert: str, says: dict[int, str], instance: str = "web_0", job: str = "notbefore", **more: str
) -> Look:
    """Return a look at an alert about an agent. Its summaries begin with the name of the agent."""
    summaries: dict[int, str] = {}
    for second, text in says.items():
        summaries[second] = text
        if text:
            summaries[second] = f"{instance}: {text}"
    return look(alert, summaries, job=job, instance=instance, **more)


def of_fleet(alert: str, says: dict[int, str], **more: str) -> Look:
    return look(alert, says, job="notbefore-fleet", **more)


def clock(second: int) -> str:
    return f"{at(second):%Y-%m-%dT%H:%M:%SZ}"


def reboot(event_id: str = "E1", **fields: Any) -> dict[str, Any]:
    return item(
        event_id,
        **{"EventType": "Reboot", "Resources": ["web_0"], "DurationInSeconds": -1, **fields},
    )


def freeze(event_id: str = "E1", **fields: Any) -> dict[str, Any]:
    return item(event_id, **{"Resources": ["web_0"], **fields})


def begun(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "EventStatus": "Started", "NotBefore": ""}


def vms(story: Chapters[Items | None], count: int = 1) -> list[FleetVm]:
    return [FleetVm(f"web_{number}", story) for number in range(count)]


def announced(seconds: int, **fields: Any) -> list[FleetVm]:
    return vms({0: [], 60: [freeze(NotBefore=clock(60 + seconds), **fields)]}, 2)


def reboots(count: int, vm_count: int) -> list[FleetVm]:
    """Return a fleet of VMs of which some have a Reboot announced."""
    events = [
        reboot(f"E{number}", Resources=[f"web_{number}"], NotBefore=clock(960))
        for number in range(count)
    ]
    return vms({0: events}, vm_count)


ANNOUNCED: Final = {0: [], 60: [reboot(NotBefore=clock(960))]}
DOWN_AT_300: Final = {**ANNOUNCED, 300: None}
LIFE: Final = {**ANNOUNCED, 300: [begun(reboot())], 600: []}
LISTED: Final = "Reboot of web_0, not before 1970-01-01 00:16 UTC"
OVER: Final = f"Reboot of web_0 {FINISHED_TITLE}"
CANCELED: Final = f"Reboot of web_0 {KINDS['canceled'].title}"
NOT_SEEN: Final = f"Reboot of web_0 {KINDS['ended'].title}"
OUTCOMES: Final = {
    FINISHED_TITLE: "finished",
    KINDS["canceled"].title: "canceled",
    KINDS["ended"].title: "unknown",
    WITHDRAWN_TITLE: "unknown",
}
BEGUN: Final = "Reboot of web_0 has started"
SUDDEN: Final = begun(reboot())
SUDDENLY: Final = "AzureScheduledEventStartedWithoutNotice"
WITHOUT_NOTICE: Final = "Reboot of web_0 started without notice"
TOO_LONG: Final = "AzureScheduledEventStartedTooLong"
DOWN_FOR_LONG: Final = {0: [reboot(NotBefore=clock(900))], 300: [begun(reboot())], 3660: []}
LATER: Final = freeze("E2", NotBefore=clock(9000), Resources=["web_0", "web_1"])
FROZEN: Final = freeze(NotBefore=clock(960), Resources=["web_0", "web_1"])
FREEZE: Final = {0: [LATER], 60: [LATER, FROZEN], 300: [LATER, begun(FROZEN)], 600: [LATER]}
LONGER: Final = "AzureScheduledEventInterruptionTooLong"
OUTAGE: Final = "Freeze in web interrupted a VM for 45m 0s, longer than expected"
SHORT: Final = "AzureScheduledEventNoticeTooShort"
ONLY_5M: Final = "Freeze in web was announced only 5m 0s ahead"
UNREACHABLE: Final = "no answer from notbefore for five minutes"
OF_BOTH: Final = [reboot(Resources=["web_0", "web_1"], NotBefore=clock(960))]

OF_EVENTS: Final[list[Case]] = [
    (
        "an event that two VMs see is one alert, and a second one from its start to its end",
        vms(LIFE, 2),
        listed({45: "", 60: LISTED, 585: LISTED, 600: OVER, 615: OVER, 630: ""}),
        started({285: "", 300: BEGUN, 585: BEGUN, 600: OVER, 630: ""}, "00:05"),
    ),
    (
        "a canceled event says so before its alerts end",
        vms({**ANNOUNCED, 700: []}, 2),
        listed({690: LISTED, 705: CANCELED, 735: ""}),
        imminent({690: "Reboot of web_0 may start in 4m 30s", 735: ""}),
        of_event("AzureScheduledEventStarted", {705: ""}),
    ),
    (
        "an end that no VM saw is neither finished nor canceled",
        vms({**ANNOUNCED, 120: [reboot(NotBefore=clock(960), EventStatus="Odd")], 300: []}, 2),
        listed({285: LISTED, 300: NOT_SEEN, 330: ""}),
    ),
    (
        "a recommendation is information until it is withdrawn, and nothing else",
        vms({0: [], 60: [recommendation()], 180: [begun(recommendation())], 600: []}),
        listed(
            {
                45: "",
                60: f"{SPOT_REBALANCE} of web_0",
                585: f"{SPOT_REBALANCE} of web_0",
                600: f"{SPOT_REBALANCE} of web_0 {WITHDRAWN_TITLE}",
                630: "",
            },
            event_type=SPOT_REBALANCE,
            severity="info",
        ),
        of_event("AzureScheduledEventImminent", {60: "", 120: "", 180: ""}),
        of_event("AzureScheduledEventStarted", {180: "", 585: ""}),
        of_event(SUDDENLY, {60: "", 180: ""}),
        of_event(LONGER, {615: ""}),
        of_event(SHORT, {60: "", 120: ""}),
    ),
    (
        "a recommendation that is listed for long does not take too long",
        vms({0: [recommendation()], 60: [begun(recommendation())], 2700: []}),
        of_event(TOO_LONG, {1920: "", 2640: ""}),
    ),
    (
        "an event has not ended while one of its VMs still lists it",
        [FleetVm("web_0", {0: OF_BOTH, 300: []}), FleetVm("web_1", {0: OF_BOTH, 400: []})],
        listed(
            {
                345: "Reboot of web_0, web_1, not before 1970-01-01 00:16 UTC",
                405: f"Reboot of web_0, web_1 {KINDS['canceled'].title}",
                435: "",
            },
            "web_0, web_1",
        ),
    ),
    (
        "an event that a user asked for names its user",
        vms({0: [reboot(NotBefore=clock(960), EventSource="User")]}),
        listed({60: LISTED}, event_source="User"),
    ),
    (
        "a short Freeze is information, and is not about to start",
        announced(200, DurationInSeconds=9),
        listed(
            {75: "Freeze of web_0, not before 1970-01-01 00:04 UTC"},
            event_type="Freeze",
            severity="info",
        ),
        of_event("AzureScheduledEventImminent", {75: "", 180: ""}),
    ),
    (
        "a longer Freeze is about to start, and not before NotBefore",
        announced(200, DurationInSeconds=10),
        imminent(
            {75: "Freeze of web_0 may start in 3m 5s"}, event_type="Freeze", severity="warning"
        ),
    ),
    (
        "an event that is late can start at any moment",
        vms({0: [reboot(NotBefore=clock(60))]}),
        overdue({75: "Reboot of web_0 may start at any moment"}),
    ),
    (
        "an alert outlasts the reboot in which its VM cannot be asked, and ends when it is back",
        vms({**DOWN_AT_300, 480: [begun(reboot())], 600: []}),
        listed({315: LISTED, 465: LISTED, 585: LISTED, 600: OVER, 630: ""}),
    ),
    (
        "an event whose VMs come and go stays one alert, and names three",
        vms(
            {
                0: [reboot(NotBefore=clock(960))],
                120: [
                    reboot(NotBefore=clock(960), Resources=[f"web_{number}" for number in range(4)])
                ],
            },
            4,
        ),
        listed({60: LISTED}),
        listed(
            {180: "Reboot of web_0, web_1, web_2 and 1 more, not before 1970-01-01 00:16 UTC"},
            "web_0, web_1, web_2 and 1 more",
        ),
    ),
    (
        "the alert of a VM that never comes back ends after a quarter of an hour",
        vms(DOWN_AT_300),
        listed({1170: LISTED, 1230: ""}),
    ),
    (
        "a neighbour that sees the end ends the alert of a VM that is down",
        [FleetVm("web_0", DOWN_AT_300), FleetVm("web_1", LIFE)],
        listed({585: LISTED, 600: OVER, 630: ""}),
    ),
    (
        "an agent that does not know its VM yet makes no second alert, and alone it makes one",
        [
            FleetVm("web_0", {0: OF_BOTH}),
            FleetVm("web_1", {0: OF_BOTH}, placed=False),
            FleetVm("web_2", {0: [freeze("E2", Description="", NotBefore="")]}, placed=False),
        ],
        listed(
            {30: "Reboot of web_0, web_1, not before 1970-01-01 00:16 UTC"},
            "web_0, web_1",
        ),
        listed(
            {30: "Freeze of web_0"},
            event_id="E2",
            event_type="Freeze",
            severity="info",
            words="nothing more",
            subscription="",
            resource_group="",
            scale_set="",
        ),
    ),
    (
        "an event of a VM that runs no agent is not ours",
        [FleetVm("web_1", LIFE)],
        listed({120: ""}),
        of_event("AzureScheduledEventImminent", {120: ""}),
    ),
    (
        "an event is about to start from five minutes before NotBefore until it has started",
        vms({**ANNOUNCED, 1020: [begun(reboot())]}, 2),
        imminent({660: "", 675: "Reboot of web_0 may start in 4m 45s", 1020: ""}),
    ),
    (
        "neighbours report a start without notice until its end while its own VM is down",
        [
            FleetVm("web_0", {0: [], 55: None}),
            FleetVm("web_1", {0: [], 60: [SUDDEN], 300: []}),
            FleetVm("web_2", {0: [], 60: [SUDDEN], 300: []}, placed=False),
        ],
        sudden({45: "", 60: WITHOUT_NOTICE, 285: WITHOUT_NOTICE, 300: "", 330: ""}),
    ),
    (
        "a start without notice that is over before the next scrape is no alert",
        [
            FleetVm(name, {0: [], 50: [SUDDEN], 55: []}, placed=name == "web_1")
            for name in ("web_1", "web_2")
        ],
        of_event(SUDDENLY, {60: "", 1020: ""}),
    ),
    (
        "a start without notice that takes its VM down after one scrape is reported with its place",
        vms({0: [], 60: [SUDDEN], 75: None}),
        sudden({60: WITHOUT_NOTICE, 75: WITHOUT_NOTICE, 600: WITHOUT_NOTICE, 1020: ""}),
    ),
    (
        "an agent reports no start without notice that it has not seen, or that was announced",
        vms(
            {
                0: [SUDDEN],
                15: [SUDDEN, reboot("E2", NotBefore=clock(900))],
                60: [SUDDEN, begun(reboot("E2"))],
            }
        ),
        of_event(SUDDENLY, {30: "", 120: ""}),
    ),
    (
        "half an hour after its start an event takes too long",
        vms({0: [reboot(NotBefore=clock(900))], 60: [begun(reboot())], 2400: []}, 2),
        of_event(TOO_LONG, {1800: "", 1920: "Reboot in web is not over after 31m 0s", 2400: ""}),
    ),
    (
        "an event that keeps its VM down takes too long while a neighbour lists it",
        [
            FleetVm("web_0", {0: [reboot(NotBefore=clock(900))], 360: None}),
            FleetVm("web_1", DOWN_FOR_LONG),
        ],
        of_event(
            TOO_LONG,
            {
                2100: "",
                2160: "Reboot in web is not over after 31m 0s",
                3600: "Reboot in web is not over after 55m 0s",
                3660: "",
            },
        ),
        listed({3600: "Reboot of web_0, not before 1970-01-01 00:15 UTC", 3660: ""}),
        of_agent("NotbeforeAgentUnreachable", {3600: "", 4020: UNREACHABLE}),
    ),
    (
        "an interruption that was longer than expected fires for half an hour after the end",
        [
            FleetVm("web_0", FREEZE, stood_still={400: 20.0}),
            FleetVm("web_1", FREEZE, stood_still={400: 4.0}),
        ],
        of_event(
            LONGER,
            {
                540: "",
                600: "Freeze in web interrupted a VM for 20s, longer than expected",
                2460: "",
            },
            event_type="Freeze",
        ),
    ),
    (
        "an interruption near the expected one does not fire",
        [
            FleetVm("web_0", FREEZE, stood_still={400: 8.0}),
            FleetVm("web_1", FREEZE, stood_still={400: 4.0}),
        ],
        of_event(LONGER, {600: "", 660: ""}),
    ),
    (
        "an outage that is longer than the alert lasts fires once the VM is back",
        [
            FleetVm(
                "web_0",
                {
                    0: [],
                    60: [freeze(NotBefore=clock(300))],
                    300: [begun(freeze())],
                    360: None,
                    3065: [begun(freeze())],
                    3090: [],  # before the first scrape
                },
                stood_still={3065: 2700.0},
            )
        ],
        of_event(LONGER, {3060: "", 3120: OUTAGE, 4740: OUTAGE, 4980: ""}, event_type="Freeze"),
    ),
    (
        "less notice than Azure promises is reported while the event is listed",
        announced(300),
        of_event(SHORT, {75: ONLY_5M}, event_type="Freeze"),
    ),
    (
        "an alert keeps its labels while the VM of its event cannot be asked",
        vms({0: [], 60: [freeze(NotBefore=clock(360))], 200: [begun(freeze())], 215: None}),
        listed(
            {300: "Freeze of web_0, not before 1970-01-01 00:06 UTC"},
            event_type="Freeze",
            severity="info",
        ),
        of_event("AzureScheduledEventImminent", {300: ""}),
        of_event(SHORT, {300: ONLY_5M}, event_type="Freeze"),
    ),
    (
        "the promised notice depends on the type",
        announced(300, EventType="Terminate"),
        of_event(SHORT, {75: ""}),
    ),
    (
        "an agent that came late knows nothing of the notice",
        vms({0: [freeze(NotBefore=clock(300))]}),
        of_event(SHORT, {60: ""}),
    ),
    (
        "many VMs of one scale set within the hour",
        reboots(3, vm_count=8),
        of_event(
            "AzureScheduledEventManyVMs",
            {30: "37.5% of the VMs of web go down within the hour"},
            **dict.fromkeys(("event_id", "event_type", "event_source"), ""),
        ),
    ),
    (
        "two VMs are not many",
        reboots(2, vm_count=4),
        of_event("AzureScheduledEventManyVMs", {30: ""}),
    ),
]

QUIET: Final[Chapters[Items | None]] = {0: []}
CANNOT_BE_READ: Final = "an event, or a part of it, cannot be read (not_before)"
EMPTY: Final = OutboxView()
DEAD: Final = OutboxView(rows={("chat", "dead"): 3})
REFUSED: Final = "the sink chat permanently refused 3 notifications"


def waiting(since: int, severity: str) -> OutboxView:
    return OutboxView(
        rows={("chat", "pending"): 1}, oldest={("chat", severity): at(since).timestamp()}
    )


OF_AGENTS: Final[list[Case]] = [
    (
        "an alert names the agent that has a problem, and ends with it",
        [
            FleetVm(
                "approving",  # at once, and in vain after two minutes
                QUIET,
                approvals=lambda now: {
                    (("rule", "freezes"), ("result", "approved")): now // 60,
                    (("rule", "freezes"), ("result", "failed")): int(now >= 120),
                },
            ),
            FleetVm("blind", QUIET, polling=lambda now: {"answering": now < 60}),
            FleetVm(
                "timing out",
                QUIET,
                polling=lambda now: {"results": {"timeout": now // 20, "unchanged": now // 5}},
            ),
            FleetVm(
                "well",
                QUIET,
                polling=lambda now: {"results": {"timeout": now // 500, "unchanged": now // 5}},
            ),
            FleetVm("late", QUIET, polling=lambda _: {"delay": 2.0}),
            FleetVm(
                "puzzled", QUIET, polling=lambda now: {"flaws": {"not_before": int(now >= 120)}}
            ),
            FleetVm("degraded", QUIET, figures=lambda now: {"store_degraded": now >= 120}),
            FleetVm("upgraded", QUIET, figures=lambda now: {"restart_needed": 120 <= now < 1200}),
            FleetVm(
                "refusing", QUIET, figures=lambda now: {"config": ConfigFigures(refused=now >= 120)}
            ),
            # a few by mistake, then two a second from the third minute to the fifth: 240, and what
            # is extrapolated
            FleetVm(
                "guessed",
                QUIET,
                figures=lambda now: {"auth_failures": 5 + 2 * max(0, min(now, 300) - 180)},
            ),
            FleetVm("gone", {0: [], 60: None, 600: []}),
            FleetVm("stuck", QUIET, outbox={0: EMPTY, 60: waiting(60, "info"), 600: EMPTY}),
            FleetVm(
                "waits",
                QUIET,
                outbox={
                    0: EMPTY,
                    60: waiting(60, "critical"),
                    180: waiting(150, "warning"),
                    400: EMPTY,
                },
            ),
            FleetVm("dead", QUIET, outbox={0: EMPTY, 60: DEAD, 600: EMPTY}),
        ],
        of_agent(
            "AzureScheduledEventApprovalFailed",
            {105: "", 120: "an approval by freezes failed", 1080: ""},
            "approving",
            rule="freezes",
        ),
        of_agent(
            "NotbeforeImdsDown", {225: "", 240: "notbefore gets no answer from IMDS"}, "blind"
        ),
        of_agent(
            "NotbeforeImdsFailing", {60: "", 900: "20% of the polls of IMDS fail"}, "timing out"
        ),
        of_agent("NotbeforePollsDelayed", {285: "", 900: "notbefore polls 2s late"}, "late"),
        of_agent(
            "NotbeforeEventUnreadable",
            {105: "", 120: CANNOT_BE_READ, 960: CANNOT_BE_READ, 1080: ""},
            "puzzled",
            reason="not_before",
        ),
        of_agent(
            "NotbeforeStoreDegraded", {120: "", 180: "notbefore cannot write its state"}, "degraded"
        ),
        of_agent(
            "NotbeforeRestartNeeded",
            {
                180: "",
                240: "the installed package is not the one that runs, and does not work",
                1260: "",
            },
            "upgraded",
        ),
        of_agent(
            "NotbeforeConfigReloadFailed",
            {105: "", 120: "notbefore could not reload its configuration"},
            "refusing",
        ),
        of_agent(
            "NotbeforeLoginsFailing",
            {180: "", 300: "245 logins failed within 10 minutes", 960: ""},
            "guessed",
        ),
        of_agent("NotbeforeAgentUnreachable", {300: "", 360: UNREACHABLE, 600: ""}, "gone"),
        of_agent(
            "NotbeforeNotificationsStuck",
            {360: "", 435: "notifications do not reach the sink chat", 600: ""},
            "stuck",
            value="6m 15s",
            sink="chat",
        ),
        of_agent(
            "NotbeforeCriticalNotificationWaits",
            {75: "", 120: "a critical notification does not reach chat", 180: ""},
            "waits",
            value="1m 0s",
            sink="chat",
        ),
        of_agent(
            "NotbeforeNotificationsDead",
            {45: "", 60: REFUSED, 600: ""},
            "dead",
            sink="chat",
            state="dead",
        ),
    ),
    (
        (
            "an agent whose VM reboots as announced is reported as missing after a quarter of an"
            " hour"
        ),
        vms({0: [reboot(NotBefore=clock(60))], 60: None}),
        of_agent("NotbeforeAgentUnreachable", {900: "", 1320: UNREACHABLE}),
    ),
    (
        "no agent at all",
        [],
        look(
            "NotbeforeNoAgents",
            {240: "", 300: "Prometheus has no notbefore agent as a target"},
            job="notbefore",
        ),
    ),
    ("agents, even if down", vms({0: None}), look("NotbeforeNoAgents", {600: ""})),
    (
        "notifications have expired",
        [
            FleetVm(
                "web_0",
                QUIET,
                outbox={
                    0: EMPTY,
                    120: OutboxView(counts={("chat", "expired"): 1, ("chat", "overflowed"): 1}),
                },
            )
        ],
        of_agent(
            "NotbeforeNotificationsExpired",
            {60: "", 180: "notifications for chat were never delivered", 3840: ""},
            sink="chat",
        ),
    ),
]


def reading(*partitions: str, late: int = 0) -> fleet.Counts:
    return {
        fleet.CONNECTED: {(): bool(partitions)},
        fleet.LAG_RECORDS: {(name,): late * 100 for name in partitions},
        fleet.LAG_SECONDS: {(name,): late for name in partitions},
        fleet.MISSING: {(): 0},
    }


ZERO: Final = reading("0")
ONE: Final = reading("1")

SILENT: Final = ("westeurope", "web", "", "")
WRONG: Final[fleet.Counts] = {
    **reading("0", late=45),
    fleet.MISSING: {(): 120},
    fleet.POISON: {("not_json",): 1},
    fleet.SILENT: {SILENT: 2},
}

GAPS: Final[fleet.Counts] = {
    **reading("1"),
    fleet.LOST_SNAPSHOTS: {(): 1},
    fleet.NEWER_SNAPSHOTS: {(): 2},
    fleet.UNKNOWN_EVENTS: {(): 3},
}

SPLIT: Final[fleet.Counts] = {**ONE, fleet.SPLIT_EVENTS: {(): 2}}
DAY: Final = 86_400


def heard_from(azure: int, vms: int) -> fleet.Counts:
    """Return the counts of an instance: messages of Azure, and new events that VMs reported."""
    return {
        **ONE,
        fleet.AZURE_MESSAGES: {("Scheduled",): azure},
        fleet.FIRST_NOTICES: {("vm",): vms},
    }


OF_FLEETS: Final[list[Case]] = [
    (
        "an alert lasts while events are in two partitions",
        [FleetInstance("one", {0: ONE, 240: SPLIT, 600: ONE})],
        of_fleet(
            "NotbeforeFleetEventsSplit",
            {
                285: "",
                300: "notbefore-fleet: 2 events are open in several partitions of the hub",
                600: "",
            },
        ),
    ),
    (
        "Azure's messages have stopped, and VMs report events",
        [
            FleetInstance(
                "one",
                {
                    0: heard_from(0, 0),
                    600: heard_from(7, 0),
                    1200: heard_from(7, 5),
                    DAY + 1200: heard_from(7, 9),
                    DAY + 2400: heard_from(8, 9),
                },
            )
        ],
        of_fleet(
            "NotbeforeFleetAzureSilent",
            {
                1800: "",
                DAY + 1800: "notbefore-fleet: VMs report events, and Azure's own messages have"
                " stopped",
                DAY + 3000: "",
            },
        ),
    ),
    (
        "a fleet that never got a message of Azure misses none",
        [FleetInstance("one", {0: heard_from(0, 0), 600: heard_from(0, 9)})],
        of_fleet("NotbeforeFleetAzureSilent", {1200: ""}),
    ),
    (
        "alerts last while the fleet lacks snapshots or events",
        [FleetInstance("one", {0: ONE, 240: GAPS, 1020: ONE})],
        of_fleet(
            "NotbeforeFleetSnapshotLost",
            {225: "", 240: "notbefore-fleet: the snapshots of 1 partitions were lost", 1020: ""},
        ),
        of_fleet(
            "NotbeforeFleetEventUnknown",
            {
                525: "",
                540: "notbefore-fleet: VMs list 3 events that the fleet does not know",
                1020: "",
            },
        ),
        of_agent(
            "NotbeforeFleetSnapshotNewer",
            {825: "", 840: "2 partitions are left to a newer version of notbefore fleet", 1020: ""},
            "one",
            "notbefore-fleet",
        ),
    ),
    (
        "an instance is killed, and another has its partition at once",
        [
            FleetInstance("one", {0: ZERO, 300: None}),
            FleetInstance("two", {0: ONE, 315: reading("0", "1")}),
        ],
        of_agent(
            "NotbeforeFleetInstanceDown",
            {585: "", 600: "no answer from notbefore fleet for five minutes"},
            "one",
            "notbefore-fleet",
        ),
        of_fleet("NotbeforeFleetPartitionUnread", {900: ""}),
        of_fleet("NotbeforeFleetHubDown", {900: ""}),
    ),
    (
        "an instance is killed, and no instance reads its partition until it is back",
        [FleetInstance("one", {0: ZERO, 300: None, 840: ZERO}), FleetInstance("two", {0: ONE})],
        of_fleet(
            "NotbeforeFleetPartitionUnread",
            {585: "", 600: "1 partitions of notbefore-fleet are read by no instance", 840: ""},
        ),
    ),
    (
        "the hub is away: that is one alert, and none for its partitions",
        [
            FleetInstance("one", {0: ZERO, 300: reading(), 900: ZERO}),
            FleetInstance("two", {0: ONE, 300: reading(), 900: ONE}),
        ],
        of_fleet(
            "NotbeforeFleetHubDown",
            {585: "", 600: "no instance of notbefore-fleet reads the hub", 900: ""},
        ),
        of_fleet("NotbeforeFleetPartitionUnread", {885: ""}),
    ),
    (
        "alerts last while instances have problems",
        [
            FleetInstance(
                "one",
                {
                    0: None,  # it counts missing records before its first scrape
                    60: {**WRONG, fleet.ERRORS: {("store",): 0}},
                    300: {**WRONG, fleet.ERRORS: {("store",): 5}},
                    450: {**WRONG, fleet.ERRORS: {("store",): 15}},
                    600: {**WRONG, **ZERO, fleet.SILENT: {}, fleet.MISSING: {(): 120}},
                },
                outbox={0: EMPTY, 60: DEAD},
            ),
            FleetInstance("two", {0: ONE, 60: {**ONE, fleet.SILENT: {SILENT: 1}}, 600: ONE}),
        ],
        of_fleet(
            "NotbeforeFleetLagging",
            {165: "", 180: "notbefore-fleet reads partition 0 45s late", 600: ""},
            partition="0",
        ),
        of_fleet(
            "NotbeforeFleetRecordsMissing",
            {45: "", 90: "notbefore-fleet: the hub deleted 120 records before they were read"},
        ),
        of_fleet(
            "NotbeforeFleetRecordsSetAside",
            {45: "", 60: "notbefore-fleet: records of the hub cannot be read (not_json)", 1080: ""},
            reason="not_json",
        ),
        of_fleet(
            "NotbeforeFleetCheckpointStoreFailing",
            {420: "", 465: "notbefore-fleet: snapshots cannot be written or read"},
        ),
        of_fleet(
            "NotbeforeFleetVmsSilent",
            {345: "", 360: "3 VMs of web are silent", 600: ""},
            region="westeurope",
            scale_set="web",
        ),
        of_agent(
            "NotbeforeNotificationsDead",
            {60: REFUSED},
            "one",
            "notbefore-fleet",
            sink="chat",
            state="dead",
        ),
    ),
]


def advised(event_type: str) -> Case:
    """Return the case of an event of this type that starts a minute after its announcement."""
    event = reboot(EventType=event_type, NotBefore=clock(960))
    severity = severity_of(event_type, 900.0, None)
    return (
        f"the alerts of a {event_type} advise as its messages do",
        vms({0: [event], 60: [begun(event)]}),
        listed(
            {45: f"{event_type} of web_0, not before 1970-01-01 00:16 UTC"},
            event_type=event_type,
            severity=severity,
        ),
        started(
            {60: f"{event_type} of web_0 has started"},
            "00:01",
            event_type=event_type,
            severity=severity,
        ),
    )


IMPACTS: Final = [name for name in (*EVENT_TYPES, "New") if not event_type_of(name).is_advice]
OF_TYPES: Final = [advised(event_type) for event_type in IMPACTS]
SHARES: Final = 8  # of the cases, each for one test, so that several processes work on them
CASES: Final = [*OF_TYPES, *OF_EVENTS, *OF_AGENTS, *OF_FLEETS]


def promtool(*words: str | Path) -> None:
    """Run promtool, which must succeed."""
    needs("promtool")
    # without GOGC, the garbage collector takes a third of the time
    result = run("promtool", *words, timeout=3 * PATIENCE, GOGC="400", GOMAXPROCS="1")
    assert result.returncode == 0, result.stdout + result.stderr


def run_tests(directory: Path, *tests: dict[str, Any], rules: Path = RULES, **options: Any) -> None:
    """Let promtool run tests of the rules; all must pass."""
    file = directory / "tests.yml"
    options = {"rule_files": [str(rules)], "evaluation_interval": "15s", **options}
    # JSON is YAML, and twenty times as fast
    file.write_text(json.dumps({**options, "tests": tests}), encoding="utf-8")
    promtool("test", "rules", file)


def test_promtool_finds_no_fault_in_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def expected_alert(look: Look, summary: str) -> dict[str, Any]:
    """Return an alert that fires with this summary, as promtool reads it."""
    annotations = {
        "summary": summary,
        "description": look.description,
        "runbook_url": f"{RUNBOOK_URL}#{look.alert.lower()}",
    }
    if "outcome" in ALERTS[look.alert]["annotations"]:
        outcomes = (outcome for end, outcome in OUTCOMES.items() if summary.endswith(end))
        annotations["outcome"] = next(outcomes, "")
    return {"exp_labels": look.labels, "exp_annotations": annotations}


def promtool_test(case: Case) -> dict[str, Any]:
    """Return the case as promtool reads it. A case of more than half an hour has fewer scrapes."""
    title, fleet, *looks = case
    firing: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for look in looks:
        for second, summary in look.says.items():
            alerts = firing[look.alert, second]  # none fires, unless there is a summary
            if summary:
                alerts.append(expected_alert(look, summary))

    last = max(second for _, second in firing)
    interval = 15 if last <= 1800 else 60
    checks = [
        {"eval_time": f"{second}s", "alertname": alert, "exp_alerts": alerts}
        for (alert, second), alerts in firing.items()
    ]
    return {
        "name": title,
        "interval": f"{interval}s",
        "input_series": input_series(fleet, last // 60 + 1, interval, WANTED),
        "alert_rule_test": checks,
    }


@pytest.mark.long
@pytest.mark.timeout(900)  # promtool takes a minute or more for the case that lasts a day
@pytest.mark.parametrize("share", range(SHARES))
def test_rules_fire_as_each_case_expects(share: int, tmp_path: Path) -> None:
    tests = [promtool_test(case) for case in CASES[share::SHARES]]
    names = [group["name"] for group in GROUPS]
    for interval in ("15s", "60s"):
        options: dict[str, Any] = {"evaluation_interval": interval}
        same_interval = [test for test in tests if test["interval"] == interval]
        # Prometheus evaluates groups in parallel, so that an alert may read the record of another
        # group before or after its evaluation
        for order in (names, names[::-1]):
            run_tests(tmp_path, *same_interval, group_eval_order=order, **options)


def test_cases_show_each_alert_firing_and_silent() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for _, _, *looks in CASES:
        for look in looks:
            summaries = look.says.values()
            if any(summaries):
                firing.add(look.alert)
            if not all(summaries):
                silent.add(look.alert)

    assert firing == set(ALERTS)
    assert silent == set(ALERTS)


def test_runbook_has_a_section_for_each_alert() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)

    assert sections == list(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_its_annotations(alert: str) -> None:
    annotations = ALERTS[alert]["annotations"]

    assert {"summary", "description", "runbook_url"} <= annotations.keys()


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_a_severity_or_that_of_its_event(alert: str) -> None:
    rule = ALERTS[alert]

    severity = rule.get("labels", {}).get("severity")

    has_that_of_its_event = "event:azure_scheduled_event:severity" in rule["expr"]
    assert severity in ("critical", "warning") or (severity is None and has_that_of_its_event)


def expected_samples(expr: str, second: int, values: dict[str, float]) -> dict[str, Any]:
    """Return the values of an expression at a second, by labels, as promtool reads them."""
    samples = [{"labels": labels, "value": value} for labels, value in values.items()]
    return {"expr": expr, "eval_time": f"{second}s", "exp_samples": samples}


def event_of(event_id: str, event_type: str, ahead: float | None, duration: int) -> dict[str, Any]:
    """Return an event that starts so many seconds ahead; ``None``: that has started."""
    event = reboot(event_id, EventType=event_type, DurationInSeconds=duration)
    if ahead is None:
        return begun(event)
    return event | {"NotBefore": clock(60 + int(ahead))}


def test_rules_and_sinks_agree_on_severities(tmp_path: Path) -> None:
    event_types = (*EVENT_TYPES, "New")
    moments = (1800, NEAR, NEAR + 1, None)
    durations = (-1, 5, 9, 10)
    events: list[dict[str, Any]] = []
    severities: dict[str, float] = {}
    for event_type, ahead, duration in product(event_types, moments, durations):
        event_id = f"{event_type}{ahead}{duration}"
        events.append(event_of(event_id, event_type, ahead, duration))
        expected_duration = duration if duration >= 0 else None
        severity = severity_of(event_type, ahead, expected_duration)
        severities[f'{{event_id="{event_id}", severity="{severity}"}}'] = 1
    expr = "group by (event_id, severity) (event:azure_scheduled_event:severity)"
    test = {
        "interval": "15s",
        "input_series": input_series(vms({0: events}), 1, 15, WANTED),
        "promql_expr_test": [expected_samples(expr, 60, severities)],
    }

    run_tests(tmp_path, test)


WEBDEVOPS: Final = RULES.with_name("webdevops.rules.yml")


def test_promtool_finds_no_fault_in_the_webdevops_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", WEBDEVOPS)


def webdevops_event(status: str) -> str:
    """Return the series that the other exporter has for the Reboot of ``web_0``."""
    labels = (
        'job="notbefore", instance="web_0", eventID="E1", eventType="Reboot",'
        f' eventStatus="{status}", eventSource="Platform", resource="web_0"'
    )
    return f"azure_scheduledevent_event{{{labels}}}"


def test_webdevops_rules_record_the_names_of_the_other_exporter(tmp_path: Path) -> None:
    text = WEBDEVOPS.read_text(encoding="utf-8")
    wanted = frozenset(re.findall(r"\b(?:notbefore|azure_scheduled_event)_\w+", text))
    event = "azure_scheduledevent_event"
    errors = "max by (job, instance) (azure_scheduledevent_request_error)"
    test = {
        "interval": "15s",
        "input_series": input_series(vms(LIFE), 10, 15, wanted),
        "promql_expr_test": [
            expected_samples(event, 45, {}),
            expected_samples(event, 90, {webdevops_event("Scheduled"): 960}),
            expected_samples(event, 330, {webdevops_event("Started"): 1}),
            expected_samples(errors, 90, {'{job="notbefore", instance="web_0"}': 0}),
        ],
    }

    run_tests(tmp_path, test, rules=WEBDEVOPS)
