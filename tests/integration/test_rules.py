"""The rules in ``config/prometheus``: each alert fires when it should, says what it should, and is
silent otherwise.

What the rules are given is what the core makes of a fleet's events (``support.fast_motion``), so
that a metric which is renamed breaks a test here.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
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
from support.agent import run
from support.azure import at, item
from support.fast_motion import Chapters, FleetInstance, FleetVm, Items, Target, input_series
from support.needs import needs

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "config/prometheus/notbefore.rules.yml"
RUNBOOK: Final = ROOT / "docs/runbook.md"
RUNBOOK_URL: Final = "https://github.com/notbefore/notbefore/blob/main/docs/runbook.md"
GROUPS: Final[list[dict[str, Any]]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALERTS: Final = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}
# metrics
WANTED: Final = frozenset(
    re.findall(r"\b(?:notbefore|azure)_\w+|\bup\b", RULES.read_text(encoding="utf-8"))
)


class Look(NamedTuple):
    """What is seen of an alert: the summary with which it fires at a second, or an empty one where
    it is silent.
    """

    alert: str
    says: dict[int, str]
    labels: dict[str, str]
    description: str


Case = tuple[str, Sequence[Target], *tuple[Look, ...]]  # a fleet's story, and what is alerted of it


def look(
    alert: str, says: dict[int, str], value: str = "", description: str = "", **labels: str
) -> Look:
    """Without a description, it is the rule's own with the labels and the ``value`` filled in."""
    rule = ALERTS[alert]
    every = {name: text for name, text in {**labels, **rule.get("labels", {})}.items() if text}
    filled = re.sub(
        r"{{ \$labels\.(\w+) }}",
        lambda name: every.get(name[1], ""),
        rule["annotations"]["description"],
    )
    return Look(alert, says, every, description or re.sub(r"{{ \$value .*? }}", value, filled))


def of_event(alert: str, says: dict[int, str], **more: str) -> Look:
    place = {"subscription": "s", "resource_group": "g", "scale_set": "web"}
    known = {
        "event_id": "E1",
        "event_type": "Reboot",
        "event_source": "Platform",
        "severity": "critical",
        **place,
    }
    return look(alert, says, **{**known, **more})


def recommendation(event_id: str = "E1", **fields: Any) -> dict[str, Any]:
    """A recommendation with a NotBefore that is near, and an expected interruption that is long."""
    near = {"NotBefore": clock(120), "DurationInSeconds": 600}
    return reboot(event_id, **{"EventType": SPOT_REBALANCE, **near, **fields})


def phrases_for(labels: dict[str, str]) -> TypePhrases:
    """The phrases of messages about an event with these labels of its alert."""
    is_short = labels.get("severity") == "info"
    return phrases_of(labels.get("event_type", "Reboot"), 5 if is_short else None)


def filled(advice: str) -> str:
    """The advice as in a message about several VMs."""
    return advice.format(
        the_vm="each affected VM", The_vm="Each affected VM", name_it="give the EventId"
    )


def listed(says: dict[int, str], names: str = "web_0", **more: str) -> Look:
    words = more.pop("words", item()["Description"])
    phrases = phrases_for(more)
    requested = ", as requested by a user" if more.get("event_source") == "User" else ""
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
    told = {second: f"{instance}: {text}" if text else "" for second, text in says.items()}
    return look(alert, told, job=job, instance=instance, **more)


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


def hit(count: int, of: int) -> list[FleetVm]:
    return vms(
        {0: [reboot(f"E{n}", Resources=[f"web_{n}"], NotBefore=clock(960)) for n in range(count)]},
        of,
    )


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
        (
            "an event that two VMs see is one alert, and one more from when it has started, until"
            " it is over"
        ),
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
        "an end that nobody saw is neither finished nor canceled",
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
        "it is about to start from five minutes before NotBefore until it is started",
        vms({**ANNOUNCED, 1020: [begun(reboot())]}, 2),
        imminent({660: "", 675: "Reboot of web_0 may start in 4m 45s", 1020: ""}),
    ),
    (
        (
            "a start without notice is reported by the neighbours while its own VM is down, until"
            " it is over"
        ),
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
        (
            "a start without notice that takes its VM down after one scrape is reported once, with"
            " its place"
        ),
        vms({0: [], 60: [SUDDEN], 75: None}),
        sudden({60: WITHOUT_NOTICE, 75: WITHOUT_NOTICE, 600: WITHOUT_NOTICE, 1020: ""}),
    ),
    (
        (
            "nobody claims a start without notice who came when it was started, nor of one that was"
            " announced"
        ),
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
        "an event that keeps its VM down takes too long as well, while a neighbour lists it",
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
        "an outage for longer than the alert is kept is one as well, from when the VM is back",
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
        "what was known of an event stays known while its VM cannot be asked",
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
        "what is promised goes by type",
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
        hit(3, of=8),
        of_event(
            "AzureScheduledEventManyVMs",
            {30: "37.5% of the VMs of web go down within the hour"},
            **dict.fromkeys(("event_id", "event_type", "event_source"), ""),
        ),
    ),
    ("two are not many", hit(2, of=4), of_event("AzureScheduledEventManyVMs", {30: ""})),
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
        "what is wrong with an agent is said of that agent, when it is and no longer",
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
            "an agent whose VM reboots as announced is not missed for a quarter of an hour, and"
            " then it is"
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
    """An instance that has had so many messages of Azure, and new events that VMs reported."""
    return {
        **ONE,
        fleet.AZURE_MESSAGES: {("Scheduled",): azure},
        fleet.FIRST_NOTICES: {("vm",): vms},
    }


OF_FLEETS: Final[list[Case]] = [
    (
        "events in two partitions are said while they are",
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
        "a fleet that Azure never spoke to misses no messages of it",
        [FleetInstance("one", {0: heard_from(0, 0), 600: heard_from(0, 9)})],
        of_fleet("NotbeforeFleetAzureSilent", {1200: ""}),
    ),
    (
        "gaps in what a fleet knows are said while they last",
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
        "an instance is killed, and its partition is read by nobody until it is back",
        [FleetInstance("one", {0: ZERO, 300: None, 840: ZERO}), FleetInstance("two", {0: ONE})],
        of_fleet(
            "NotbeforeFleetPartitionUnread",
            {585: "", 600: "1 partitions of notbefore-fleet are read by no instance", 840: ""},
        ),
    ),
    (
        "the hub is away: that is one alert, and not one more for its partitions",
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
        "what is wrong with instances is said when it is, and no longer",
        [
            FleetInstance(
                "one",
                {
                    0: None,  # it counts what is missing before its first scrape
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
    """An event of the type that is announced, and has started after a minute."""
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
CASES: Final = [*OF_TYPES, *OF_EVENTS, *OF_AGENTS, *OF_FLEETS]


def promtool(*words: str | Path) -> None:
    needs("promtool")
    # the collector takes a third of its time, else
    done = run("promtool", *words, GOGC="400", GOMAXPROCS="1")
    assert done.returncode == 0, done.stdout + done.stderr


def checked(directory: Path, *tests: dict[str, Any], rules: Path = RULES, **options: Any) -> None:
    file = directory / "tests.yml"
    options = {"rule_files": [str(rules)], "evaluation_interval": "15s", **options}
    # JSON is YAML, and twenty times as fast
    file.write_text(json.dumps({**options, "tests": tests}), encoding="utf-8")
    promtool("test", "rules", file)


def test_promtool_finds_no_fault_in_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def written(case: Case) -> dict[str, Any]:
    """The case as promtool reads it; one of more than half an hour is scraped each minute alone."""
    firing = defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    story, fleet, *looks = case
    for alert, says, labels, description in looks:
        for second, summary in says.items():
            url = f"{RUNBOOK_URL}#{alert.lower()}"
            annotations = {"summary": summary, "description": description, "runbook_url": url}
            if "outcome" in ALERTS[alert]["annotations"]:
                ends = (outcome for end, outcome in OUTCOMES.items() if summary.endswith(end))
                annotations["outcome"] = next(ends, "")
            firing[alert, second] += [
                {"exp_labels": labels, "exp_annotations": annotations}
            ] * bool(summary)
    last = max(second for _, second in firing)
    interval = 15 if last <= 1800 else 60
    return {
        "name": story,
        "interval": f"{interval}s",
        "input_series": input_series(fleet, last // 60 + 1, interval, WANTED),
        "alert_rule_test": [
            {"eval_time": f"{second}s", "alertname": alert, "exp_alerts": expected}
            for (alert, second), expected in firing.items()
        ],
    }


@pytest.mark.long
@pytest.mark.parametrize("share", range(4))
def test_rules_fire_as_each_case_expects(share: int, tmp_path: Path) -> None:
    tests = [written(case) for case in CASES[share::4]]
    names = [group["name"] for group in GROUPS]
    for interval in ("15s", "60s"):
        some = [test for test in tests if test["interval"] == interval]
        # groups are evaluated side by side: where an alert asks for what another one records,
        # either may be first
        for order in (names, names[::-1]):
            checked(tmp_path, *some, evaluation_interval=interval, group_eval_order=order)


def test_cases_show_each_alert_firing_and_silent() -> None:
    seen = {
        (look.alert, bool(text))
        for _, _, *looks in CASES
        for look in looks
        for text in look.says.values()
    }

    assert seen == {*product(ALERTS, (True, False))}


def test_alert_has_a_summary_and_its_section_of_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)

    assert sections == list(ALERTS)

    for name, rule in ALERTS.items():
        assert {"summary", "description", "runbook_url"} <= rule["annotations"].keys()
        of_the_event = {None} if "event:azure_scheduled_event:severity" in rule["expr"] else set()
        assert rule.get("labels", {}).get("severity") in {"critical", "warning"} | of_the_event, (
            name
        )


def samples(expr: str, second: int, found: dict[str, float]) -> dict[str, Any]:
    """What promtool is to find of an expression at a second."""
    wanted = [{"labels": labels, "value": value} for labels, value in found.items()]
    return {"expr": expr, "eval_time": f"{second}s", "exp_samples": wanted}


def test_rules_and_sinks_agree_on_severities(tmp_path: Path) -> None:
    events = []
    severities = dict[str, float]()
    for event_type, ahead, duration in product(
        (*EVENT_TYPES, "New"), (1800, NEAR, NEAR + 1, None), (-1, 5, 9, 10)
    ):
        event_id = f"{event_type}{ahead}{duration}"
        one = reboot(event_id, EventType=event_type, DurationInSeconds=duration)
        events.append(begun(one) if ahead is None else one | {"NotBefore": clock(60 + int(ahead))})
        severity = severity_of(event_type, ahead, duration if duration >= 0 else None)
        severities[f'{{event_id="{event_id}", severity="{severity}"}}'] = 1
    expr = "group by (event_id, severity) (event:azure_scheduled_event:severity)"
    series = input_series(vms({0: events}), 1, 15, WANTED)
    checked(
        tmp_path,
        {
            "interval": "15s",
            "input_series": series,
            "promql_expr_test": [samples(expr, 60, severities)],
        },
    )


def test_webdevops_rules_record_the_names_of_the_other_exporter(tmp_path: Path) -> None:
    webdevops = RULES.with_name("webdevops.rules.yml")
    wanted = frozenset(
        re.findall(
            r"\b(?:notbefore|azure_scheduled_event)_\w+", webdevops.read_text(encoding="utf-8")
        )
    )
    event = "azure_scheduledevent_event"
    error = "azure_scheduledevent_request_error"
    labels = (
        '{job="notbefore", instance="web_0", eventID="E1", eventType="Reboot", eventStatus="%s", '
    )
    labels += 'eventSource="Platform", resource="web_0"}'
    expected = [
        samples(event, 45, {}),
        samples(event, 90, {event + labels % "Scheduled": 960}),
        samples(event, 330, {event + labels % "Started": 1}),
        samples(
            f"max by (job, instance) ({error})", 90, {'{job="notbefore", instance="web_0"}': 0}
        ),
    ]
    promtool("check", "rules", "--lint=all", "--lint-fatal", webdevops)
    series = input_series(vms(LIFE), 10, 15, wanted)
    checked(
        tmp_path,
        {"interval": "15s", "input_series": series, "promql_expr_test": expected},
        rules=webdevops,
    )
