"""The rules in ``config/prometheus``: each alert fires when it should, says what it should, and is silent otherwise.

What the rules are given is what the core makes of a fleet's events (``support.fast_motion``), so that a metric which is
renamed breaks a test here.
"""

import functools
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml
from msgspec.structs import replace

from notbefore.core.document import EVENT_TYPES
from notbefore.core.routing import NEAR, severity_of
from notbefore.metrics import fleet
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.process import ConfigFigures
from support.agent import run
from support.azure import at, item
from support.fast_motion import FleetInstance, FleetVm, Items, Target, scraped
from support.needs import needs

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "config/prometheus/notbefore.rules.yml"
RUNBOOK: Final = ROOT / "docs/runbook.md"
RUNBOOK_URL: Final = "https://github.com/notbefore/notbefore/blob/main/docs/runbook.md"


class Firing(NamedTuple):
    """A firing alert; without a description, it is the rule's own with the labels filled in."""

    labels: dict[str, str]
    summary: str
    description: str | None = None


class Case(NamedTuple):
    """A fleet's story, and what is alerted of it."""

    story: str
    fleet: Callable[[], Sequence[Target]]
    looks: dict[str, dict[int, list[Firing]]]  # alert -> second -> what is expected of it then
    interval: int = 15


def fires(
    alert: str, firing: Firing | None, on: Sequence[int] = (), off: Sequence[int] = ()
) -> dict[str, dict[int, list[Firing]]]:
    """One alert, which is ``firing`` at the seconds ``on``, and silent at the seconds ``off``."""
    return {alert: {second: [firing] if firing and second in on else [] for second in (*on, *off)}}


def clock(second: int) -> str:
    return f"{at(second):%Y-%m-%dT%H:%M:%SZ}"


def reboot(event_id: str = "E1", **fields: Any) -> dict[str, Any]:
    return item(event_id, **{"EventType": "Reboot", "Resources": ["web_0"], "DurationInSeconds": -1, **fields})


def freeze(event_id: str = "E1", **fields: Any) -> dict[str, Any]:
    return item(event_id, **{"Resources": ["web_0"], **fields})


def begun(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "EventStatus": "Started", "NotBefore": ""}


def story(*chapters: tuple[int, Items | None]) -> Callable[[int], Items | None]:
    """What is listed from each second on; ``None``: the VM is down."""

    def look(second: int) -> Items | None:
        return [items for since, items in chapters if since <= second][-1]

    return look


def vms(*names: str, **looks: Callable[[int], Items | None]) -> Callable[[], list[FleetVm]]:
    """VMs that see the same story, but for those that have one of their own."""
    return lambda: [FleetVm(name, looks.get(name, looks["look"])) for name in names]


def agent(change: Callable[[int, FleetVm], None]) -> Callable[[], list[FleetVm]]:
    return lambda: [FleetVm("web_0", story((0, [])), change=change)]


def of_event(event_type: str, severity: str, **more: str) -> dict[str, str]:
    place = {"subscription": "s", "resource_group": "g", "scale_set": "web"}
    labels = {"event_id": "E1", "event_type": event_type, "event_source": "Platform", "severity": severity}
    return {name: value for name, value in {**labels, **place, **more}.items() if value}


def of_agent(severity: str = "warning", **more: str) -> dict[str, str]:
    return {"job": "notbefore", "instance": "web_0", "severity": severity, **more}


def described(kind: str, names: str = "web_0", count: str = "1", says: str = item()["Description"]) -> str:
    return (
        f"Azure lists a {kind} (Platform) of VMs that run notbefore: {names} "
        f"(it affects {count} in all). Azure says: {says}"
    )


LIFE: Final = story(
    (0, []),
    (60, [reboot(NotBefore=clock(960))]),
    (300, [begun(reboot())]),
    (600, []),
)
REBOOT_OF_WEB_0: Final = Firing(
    of_event("Reboot", "critical"),
    "Reboot of web_0, not before 1970-01-01 00:16:00 +0000 UTC",
    described("Reboot"),
)
STARTED_REBOOT: Final = Firing(
    of_event("Reboot", "critical"),
    "Reboot of web_0 has started",
    "Azure started the Reboot E1 at 1970-01-01 00:05:00 +0000 UTC. Ten minutes are usual until it is over; smaller"
    " interruptions may follow the first.",
)


def severities() -> list[FleetVm]:
    listed = [
        freeze("short", NotBefore=clock(600)),
        freeze("unknown", NotBefore=clock(600), DurationInSeconds=-1),
        freeze("new", EventType="Hibernate", NotBefore=clock(600), DurationInSeconds=60),
        reboot("distant", NotBefore=clock(7200)),
        reboot("near", NotBefore=clock(3600)),
        begun(reboot("at once")),
    ]
    return [FleetVm("web_0", story((0, []), (60, listed)))]


def named(event_id: str, event_type: str, severity: str, when: str) -> Firing:
    summary = f"{event_type} of web_0" + (f", not before 1970-01-01 {when} +0000 UTC" if when else "")
    return Firing(of_event(event_type, severity, event_id=event_id), summary, described(event_type))


CASES = [
    Case(
        "an event that two VMs see is one alert until it is gone",
        vms("web_0", "web_1", look=LIFE),
        fires("AzureScheduledEvent", REBOOT_OF_WEB_0, on=(60, 585), off=(45, 600)),
    ),
    Case(
        "an alert outlasts the reboot in which its VM cannot be asked, and ends when it is back",
        vms(
            "web_0",
            look=story((0, []), (60, [reboot(NotBefore=clock(960))]), (300, None), (480, [begun(reboot())]), (600, [])),
        ),
        fires("AzureScheduledEvent", REBOOT_OF_WEB_0, on=(315, 465, 585), off=(600,)),
    ),
    Case(
        "that an event has started is an alert of its own, until it is over",
        vms("web_0", "web_1", look=LIFE),
        fires("AzureScheduledEventStarted", STARTED_REBOOT, on=(300, 585), off=(285, 600)),
    ),
    Case(
        "an event whose VMs come and go stays one alert, and names three",
        vms(
            "web_0",
            "web_1",
            "web_2",
            "web_3",
            look=story(
                (0, [reboot(NotBefore=clock(960))]),
                (120, [reboot(NotBefore=clock(960), Resources=[f"web_{number}" for number in range(4)])]),
            ),
        ),
        {
            "AzureScheduledEvent": {
                60: [REBOOT_OF_WEB_0],
                180: [
                    Firing(
                        of_event("Reboot", "critical"),
                        "Reboot of web_0, web_1, web_2 (4 VMs), not before 1970-01-01 00:16:00 +0000 UTC",
                        described("Reboot", "web_0 web_1 web_2 web_3", "4"),
                    )
                ],
            }
        },
    ),
    Case(
        "the alert of a VM that never comes back ends after a quarter of an hour",
        vms("web_0", look=story((0, []), (60, [reboot(NotBefore=clock(960))]), (300, None))),
        fires("AzureScheduledEvent", REBOOT_OF_WEB_0, on=(1170,), off=(1230,)),
    ),
    Case(
        "a neighbour that sees the end ends the alert of a VM that is down",
        vms("web_0", "web_1", look=LIFE, web_0=story((0, []), (60, [reboot(NotBefore=clock(960))]), (300, None))),
        fires("AzureScheduledEvent", REBOOT_OF_WEB_0, on=(585,), off=(600,)),
    ),
    Case(
        "severity goes by type, expected interruption and notice",
        severities,
        {
            "AzureScheduledEvent": {
                60: [
                    named("short", "Freeze", "info", "00:10:00"),
                    named("unknown", "Freeze", "warning", "00:10:00"),
                    named("new", "Hibernate", "warning", "00:10:00"),
                    named("distant", "Reboot", "warning", "02:00:00"),
                    named("near", "Reboot", "critical", "01:00:00"),
                    named("at once", "Reboot", "critical", ""),
                ]
            }
        },
    ),
    Case(
        "an agent that does not know its VM yet makes no second alert, and alone it makes one",
        lambda: [
            FleetVm("web_0", story((0, [reboot(Resources=["web_0", "web_1"], NotBefore=clock(960))]))),
            FleetVm("web_1", story((0, [reboot(Resources=["web_0", "web_1"], NotBefore=clock(960))])), placed=False),
            FleetVm("web_2", story((0, [freeze("E2", Description="", NotBefore="")])), placed=False),
        ],
        {
            "AzureScheduledEvent": {
                30: [
                    Firing(
                        of_event("Reboot", "critical"),
                        "Reboot of web_0 (2 VMs), not before 1970-01-01 00:16:00 +0000 UTC",
                        described("Reboot", "a VM that does not know its name web_0", "2"),
                    ),
                    Firing(
                        {"event_id": "E2", "event_type": "Freeze", "event_source": "Platform", "severity": "info"},
                        "Freeze of a VM that does not know its name",
                        described("Freeze", "a VM that does not know its name", says="nothing more"),
                    ),
                ]
            }
        },
    ),
    Case(
        "an event of a VM that runs no agent is not ours",
        vms("web_1", look=LIFE),
        {"AzureScheduledEvent": {120: []}, "AzureScheduledEventImminent": {120: []}},
    ),
    Case(
        "it is about to start from five minutes before NotBefore until it is started",
        vms("web_0", "web_1", look=story((0, []), (60, [reboot(NotBefore=clock(960))]), (1020, [begun(reboot())]))),
        fires(
            "AzureScheduledEventImminent",
            Firing(of_event("Reboot", "critical"), "Reboot of web_0 may start in 4m 45s"),
            on=(675,),
            off=(660, 1020),
        ),
    ),
]
SUDDEN: Final = begun(reboot())
SUDDEN_DESCRIBED: Final = (
    "A Reboot started without an announcement. The usual cause is failed hardware, and Azure is already "
    "recovering the VM. "
)
SUDDEN_FIRING: Final = Firing(
    of_event("Reboot", "critical"),
    "Reboot in web started without notice",
    SUDDEN_DESCRIBED + "Its id is E1; `notbefore events` on another VM of the group names the VMs.",
)
UNSCRAPED_FIRING: Final = Firing(
    of_event("Reboot", "critical", event_id="", event_source=""),
    "Reboot in web started without notice",
    SUDDEN_DESCRIBED + "It was over before the next scrape; `notbefore history` on a VM of the group names the VMs.",
)
UNREACHABLE: Final = Firing(
    of_agent(),
    "web_0: no answer from notbefore for five minutes",
)
SUDDENLY: Final = "AzureScheduledEventStartedWithoutNotice"
TOO_LONG: Final = "AzureScheduledEventStartedTooLong"
DOWN_FOR_LONG: Final = story((0, [reboot(NotBefore=clock(900))]), (300, [begun(reboot())]), (3660, []))
CASES += [
    Case(
        "a start without notice is reported by the neighbours while its own VM is down, once, and for a while",
        lambda: [
            FleetVm("web_0", story((0, []), (55, None))),
            FleetVm("web_1", story((0, []), (60, [SUDDEN]), (300, []))),
            FleetVm("web_2", story((0, []), (60, [SUDDEN]), (300, [])), placed=False),
        ],
        fires(SUDDENLY, SUDDEN_FIRING, on=(60, 900), off=(45, 1260)),
    ),
    Case(
        "a start without notice that is over before the next scrape is not lost",
        lambda: [
            FleetVm("web_1", story((0, []), (50, [SUDDEN]), (55, []))),
            FleetVm("web_2", story((0, []), (50, [SUDDEN]), (55, [])), placed=False),
        ],
        fires(SUDDENLY, UNSCRAPED_FIRING, on=(60,), off=(45, 1020)),
    ),
    Case(
        "a start without notice that takes its VM down after one scrape is reported once, with its place",
        lambda: [FleetVm("web_0", story((0, []), (60, [SUDDEN]), (75, None)))],
        fires(SUDDENLY, SUDDEN_FIRING, on=(60, 75, 600, 960), off=(1020,)),
    ),
    Case(
        "nobody claims a start without notice who came when it was started, nor of one that was announced",
        vms(
            "web_0",
            look=story(
                (0, [SUDDEN]), (15, [SUDDEN, reboot("E2", NotBefore=clock(900))]), (60, [SUDDEN, begun(reboot("E2"))])
            ),
        ),
        fires(SUDDENLY, None, off=(30, 120)),
    ),
    Case(
        "half an hour after its start an event takes too long",
        vms("web_0", "web_1", look=story((0, [reboot(NotBefore=clock(900))]), (60, [begun(reboot())]), (2400, []))),
        fires(
            TOO_LONG,
            Firing(of_event("Reboot", "warning"), "Reboot in web is not over after 31m 0s"),
            on=(1920,),
            off=(1800, 2400),
        ),
        interval=60,
    ),
    Case(
        "an event that keeps its VM down takes too long as well, while a neighbour lists it",
        vms("web_0", "web_1", look=DOWN_FOR_LONG, web_0=story((0, [reboot(NotBefore=clock(900))]), (360, None))),
        {
            TOO_LONG: {
                2100: [],
                2160: [Firing(of_event("Reboot", "warning"), "Reboot in web is not over after 31m 0s")],
                3600: [Firing(of_event("Reboot", "warning"), "Reboot in web is not over after 55m 0s")],
                3660: [],
            },
            "AzureScheduledEvent": {3600: [named("E1", "Reboot", "critical", "00:15:00")], 3660: []},
            "NotbeforeAgentUnreachable": {3600: [], 4020: [UNREACHABLE]},
        },
        interval=60,
    ),
]


def interrupted(seconds: float) -> Callable[[], list[FleetVm]]:
    both: dict[str, Any] = {"Resources": ["web_0", "web_1"]}
    later = freeze("E2", NotBefore=clock(9000), **both)
    look = story(
        (0, [later]),
        (60, [later, freeze(NotBefore=clock(960), **both)]),
        (300, [later, begun(freeze(**both))]),
        (600, [later]),
    )
    return lambda: [
        FleetVm("web_0", look, stood_still=lambda second: seconds if second == 400 else 0.0),
        FleetVm("web_1", look, stood_still=lambda second: 4.0 if second == 400 else 0.0),
    ]


def announced(seconds: int, **fields: Any) -> Callable[[], list[FleetVm]]:
    return vms("web_0", "web_1", look=story((0, []), (60, [freeze(NotBefore=clock(60 + seconds), **fields)])))


def hit(count: int, not_before: str, of: int = 8) -> Callable[[], list[FleetVm]]:
    listed = [reboot(f"E{n}", Resources=[f"web_{n}"], NotBefore=not_before) for n in range(count)]
    return vms(*(f"web_{n}" for n in range(of)), look=story((0, listed)))


LONGER: Final = "AzureScheduledEventInterruptionTooLong"
SHORT: Final = "AzureScheduledEventNoticeTooShort"
MANY: Final = "AzureScheduledEventManyVMs"
LONG_DOWN: Final = story(
    (0, []),
    (60, [freeze(NotBefore=clock(300))]),
    (300, [begun(freeze())]),
    (360, None),
    (3065, [begun(freeze())]),
    (3090, []),  # before the first scrape
)
OUTAGE_SEEN: Final = (
    Firing(of_event("Freeze", "warning"), "Freeze in web interrupted a VM for 45m 0s, longer than expected"),
)
CASES += [
    Case(
        "an interruption that was longer than expected fires for half an hour after the end",
        interrupted(20.0),
        fires(
            LONGER,
            Firing(of_event("Freeze", "warning"), "Freeze in web interrupted a VM for 20s, longer than expected"),
            on=(600,),
            off=(540, 2460),
        ),
        interval=60,
    ),
    Case(
        "an outage for longer than the alert is kept is one as well, from when the VM is back",
        lambda: [FleetVm("web_0", LONG_DOWN, stood_still=lambda second: 2700.0 if second == 3065 else 0.0)],
        {LONGER: {3060: [], 3120: [*OUTAGE_SEEN], 4740: [*OUTAGE_SEEN], 4980: []}},
        interval=60,
    ),
    Case("an interruption near the expected one does not fire", interrupted(8.0), fires(LONGER, None, off=(600, 660))),
    Case(
        "less notice than Azure promises is reported while the event is listed",
        announced(300),
        fires(SHORT, Firing(of_event("Freeze", "warning"), "Freeze in web was announced only 5m 0s ahead"), on=(75,)),
    ),
    Case(
        "what was known of an event stays known while its VM cannot be asked",
        vms("web_0", look=story((0, []), (60, [freeze(NotBefore=clock(360))]), (200, [begun(freeze())]), (215, None))),
        {
            "AzureScheduledEvent": {300: [named("E1", "Freeze", "info", "00:06:00")]},
            "AzureScheduledEventImminent": {300: []},
            SHORT: {300: [Firing(of_event("Freeze", "warning"), "Freeze in web was announced only 5m 0s ahead")]},
        },
    ),
    Case(
        "what is promised goes by type",
        announced(300, EventType="Terminate"),
        fires(SHORT, None, off=(75,)),
    ),
    Case(
        "an agent that came late knows nothing of the notice",
        vms("web_0", look=story((0, [freeze(NotBefore=clock(300))]))),
        fires(SHORT, None, off=(60,)),
    ),
    Case(
        "many VMs of one scale set within the hour",
        hit(3, clock(960)),
        fires(
            MANY,
            Firing(
                {"severity": "critical", "subscription": "s", "resource_group": "g", "scale_set": "web"},
                "37.5% of the VMs of web go down within the hour",
            ),
            on=(30,),
        ),
    ),
    Case("two are not many", hit(2, clock(960), of=4), fires(MANY, None, off=(30,))),
]


def silent_from(begin: int) -> Callable[[int, FleetVm], None]:
    def change(second: int, vm: FleetVm) -> None:
        vm.polled(answering=second < begin)

    return change


def failing(share: int) -> Callable[[int, FleetVm], None]:
    """One poll in ``share`` fails."""

    def change(second: int, vm: FleetVm) -> None:
        vm.figures.polling.results["timeout" if second // 5 % share == 0 else "unchanged"] += 1

    return change


def degrading(second: int, vm: FleetVm) -> None:
    vm.figures = replace(vm.figures, store_degraded=second >= 120)


def upgraded(second: int, vm: FleetVm) -> None:
    vm.figures = replace(vm.figures, package_replaced="9.9.9" if 120 <= second < 1200 else "")


def refusing(second: int, vm: FleetVm) -> None:
    vm.figures = replace(vm.figures, config=ConfigFigures(refused=second >= 120))


def guessed(second: int, vm: FleetVm) -> None:
    """A few by mistake, then two a second from the third minute to the fifth: 240, and what Prometheus extrapolates."""
    vm.figures = replace(vm.figures, auth_failures=5 + 2 * max(0, min(second, 300) - 180))


def approving(second: int, vm: FleetVm) -> None:
    """Made at once, and failed after two minutes."""
    found = {"approved": second // 60, "failed": int(second >= 120)}
    counts = {(("rule", "freezes"), ("result", result)): count for result, count in found.items()}
    vm.totals = replace(vm.totals, approvals=counts)


def unreadable(second: int, vm: FleetVm) -> None:
    vm.figures.polling.flaws["not_before"] = int(second >= 120)


def holding(*views: tuple[int, OutboxView]) -> Callable[[], list[FleetVm]]:
    def outbox(second: int) -> OutboxView:
        return [view for since, view in views if since <= second][-1]

    return lambda: [FleetVm("web_0", story((0, [])), outbox=outbox, sinks=("chat",))]


WAITED: Final = (
    "The oldest notification for chat has waited for 6m 15s. It is tried again until it is delivered or has expired."
    " A token or an address may be wrong: `notbefore outbox list` has the reason."
)
CRITICAL_WAITS: Final = "NotbeforeCriticalNotificationWaits"
UNREADABLE: Final = "NotbeforeEventUnreadable"
CANNOT_BE_READ: Final = "an event, or a part of it, cannot be read (not_before)"
BLIND: Final = Firing(
    of_agent(),
    "web_0: notbefore gets no answer from IMDS",
)
CASES += [
    Case(
        "an agent that cannot be scraped",
        vms("web_0", "web_1", look=story((0, []), (60, None), (600, [])), web_1=story((0, []))),
        fires("NotbeforeAgentUnreachable", UNREACHABLE, on=(360,), off=(300, 600)),
    ),
    Case(
        "an agent whose VM reboots as announced is not missed for a quarter of an hour, and then it is",
        vms("web_0", look=story((0, [reboot(NotBefore=clock(60))]), (60, None))),
        fires("NotbeforeAgentUnreachable", UNREACHABLE, on=(1320,), off=(900,)),
    ),
    Case(
        "no agent at all",
        list,
        fires(
            "NotbeforeNoAgents",
            Firing({"job": "notbefore", "severity": "critical"}, "Prometheus has no notbefore agent as a target"),
            on=(300,),
            off=(240,),
        ),
    ),
    Case("agents, even if down", vms("web_0", look=story((0, None))), fires("NotbeforeNoAgents", None, off=(600,))),
    Case(
        "notifications are stuck until they are delivered",
        holding(
            (0, OutboxView()),
            (60, OutboxView(rows={("chat", "pending"): 2}, oldest={("chat", "info"): at(60).timestamp()})),
            (600, OutboxView()),
        ),
        fires(
            "NotbeforeNotificationsStuck",
            Firing(of_agent(sink="chat"), "web_0: notifications do not reach the sink chat", WAITED),
            on=(435,),
            off=(360, 600),
        ),
    ),
    Case(
        "a critical notification waits",
        holding(
            (0, OutboxView()),
            (60, OutboxView(rows={("chat", "pending"): 1}, oldest={("chat", "critical"): at(60).timestamp()})),
            (180, OutboxView(rows={("chat", "pending"): 1}, oldest={("chat", "warning"): at(150).timestamp()})),
        ),
        fires(
            CRITICAL_WAITS,
            Firing(
                of_agent(sink="chat", severity="critical"),
                "web_0: a critical notification does not reach chat",
                "It has waited for 1m 0s. It is tried again, and goes to the sinks of `fallback` if its route"
                " has one. The readers of chat are not notified yet.",
            ),
            on=(120,),
            off=(75, 180),
        ),
    ),
    Case(
        "notifications are dead until somebody sees to them",
        holding((0, OutboxView()), (60, OutboxView(rows={("chat", "dead"): 3})), (600, OutboxView())),
        fires(
            "NotbeforeNotificationsDead",
            Firing(of_agent(sink="chat", state="dead"), "web_0: the sink chat permanently refused 3 notifications"),
            on=(60,),
            off=(45, 600),
        ),
    ),
    Case(
        "notifications have expired",
        holding((0, OutboxView()), (120, OutboxView(counts={("chat", "expired"): 1, ("chat", "overflowed"): 1}))),
        fires(
            "NotbeforeNotificationsExpired",
            Firing(of_agent(sink="chat"), "web_0: notifications for chat were never delivered"),
            on=(180,),
            off=(60, 3840),
        ),
        interval=60,
    ),
]


def late(_: int, vm: FleetVm) -> None:
    vm.polled(delay=2.0)


# each of an agent of its own: what is wrong with it, the alert, and what it says at which second, or nothing
OF_AGENTS: Final[tuple[tuple[Callable[[int, FleetVm], None], str, dict[str, str], dict[int, str]], ...]] = (
    (
        approving,
        "AzureScheduledEventApprovalFailed",
        of_agent(rule="freezes"),
        {105: "", 120: "an approval by freezes failed", 1080: ""},
    ),
    (silent_from(60), "NotbeforeImdsDown", of_agent(), {225: "", 240: "notbefore gets no answer from IMDS"}),
    (failing(4), "NotbeforeImdsFailing", of_agent(), {60: "", 900: "25% of the polls of IMDS fail"}),
    (failing(100), "NotbeforePollsDelayed", of_agent(), {}),
    (late, "NotbeforePollsDelayed", of_agent(), {285: "", 900: "notbefore polls 2s late"}),
    (
        unreadable,
        UNREADABLE,
        of_agent(reason="not_before"),
        {105: "", 120: CANNOT_BE_READ, 960: CANNOT_BE_READ, 1080: ""},
    ),
    (degrading, "NotbeforeStoreDegraded", of_agent("critical"), {120: "", 180: "notbefore cannot write its state"}),
    (
        upgraded,
        "NotbeforeRestartNeeded",
        of_agent("critical"),
        {180: "", 240: "another package is installed than the one that runs, and does not work", 1260: ""},
    ),
    (
        refusing,
        "NotbeforeConfigReloadFailed",
        of_agent(),
        {105: "", 120: "notbefore could not reload its configuration"},
    ),
    (guessed, "NotbeforeLoginsFailing", of_agent(), {180: "", 300: "245 logins failed within 10 minutes", 960: ""}),
)


def said_of(number: int, labels: dict[str, str], text: str) -> list[Firing]:
    name = f"web_{number}"
    return [Firing({**labels, "instance": name}, f"{name}: {text}")] if text else []


CASES += [
    Case(
        "what is wrong with an agent is said of that agent, when it is and no longer",
        lambda: [FleetVm(f"web_{n}", story((0, [])), change=change) for n, (change, *_) in enumerate(OF_AGENTS)],
        {
            alert: {second: said_of(n, labels, text) for second, text in says.items()}
            for n, (_, alert, labels, says) in enumerate(OF_AGENTS)
            if says
        },
    )
]

# ---- `notbefore fleet`

Counts = fleet.Counts
READING: Final[Counts] = {
    fleet.CONNECTED: {(): 1},
    fleet.PARTITIONS: {(): 1},
    fleet.LAG_RECORDS: {("0",): 0},
    fleet.LAG_SECONDS: {("0",): 0},
    fleet.MISSING: {(): 0},
}
FLEET: Final = {"job": "notbefore-fleet"}


def instances(**chapters: tuple[tuple[int, Counts | None], ...]) -> Callable[[], list[FleetInstance]]:
    """Instances, and what each has to show from each second on; ``None``: it is down."""

    def looking(own: tuple[tuple[int, Counts | None], ...]) -> Callable[[int], Counts | None]:
        return lambda second: [view for since, view in own if since <= second][-1]

    return lambda: [FleetInstance(name, looking(own)) for name, own in chapters.items()]


def reading(values: Counts, base: Counts = READING) -> Counts:
    return {**base, **values}


def lagging(**lag: tuple[float, float]) -> Counts:
    """``lag``: records and seconds of each partition, whose name has a letter before it."""
    return {
        metric: {(name[1:],): one[number] for name, one in lag.items()}
        for number, metric in enumerate((fleet.LAG_RECORDS, fleet.LAG_SECONDS))
    }


OTHER: Final = reading(lagging(p1=(0, 0)))
AWAY: Final = reading({fleet.CONNECTED: {(): 0}, fleet.PARTITIONS: {(): 0}}, reading(lagging()))
UNREAD: Final = "NotbeforeFleetPartitionUnread"
LAGGING: Final = "NotbeforeFleetLagging"
CASES += [
    Case(
        "an instance is killed, and another has its partition at once",
        instances(one=((0, READING), (300, None)), two=((0, OTHER), (315, reading(lagging(p0=(0, 0), p1=(0, 0)))))),
        {
            "NotbeforeFleetInstanceDown": {
                585: [],
                600: [
                    Firing(
                        {**FLEET, "instance": "one", "severity": "warning"},
                        "one: no answer from notbefore fleet for five minutes",
                    )
                ],
            },
            UNREAD: {900: []},
            "NotbeforeFleetHubDown": {900: []},
        },
    ),
    Case(
        "an instance is killed, and its partition is read by nobody until it is back",
        instances(one=((0, READING), (300, None), (840, READING)), two=((0, OTHER),)),
        fires(
            UNREAD,
            Firing({**FLEET, "severity": "critical"}, "1 partitions of notbefore-fleet are read by no instance"),
            on=(600,),
            off=(585, 840),
        ),
    ),
    Case(
        "the hub is away: that is one alert, and not one more for its partitions",
        instances(one=((0, READING), (300, AWAY), (900, READING)), two=((0, OTHER), (300, AWAY), (900, OTHER))),
        {
            "NotbeforeFleetHubDown": {
                585: [],
                600: [Firing({**FLEET, "severity": "critical"}, "no instance of notbefore-fleet reads the hub")],
                900: [],
            },
            UNREAD: {885: []},
        },
    ),
    Case(
        "a partition is read late for two minutes",
        instances(one=((0, READING), (60, reading(lagging(p0=(5000, 45)))), (600, READING)), two=((0, OTHER),)),
        fires(
            LAGGING,
            Firing({**FLEET, "partition": "0", "severity": "warning"}, "notbefore-fleet reads partition 0 45s late"),
            on=(180,),
            off=(165, 600),
        ),
    ),
    Case(
        "the hub deleted records before they were read",
        instances(one=((0, READING), (60, reading({fleet.MISSING: {(): 120}})))),
        fires(
            "NotbeforeFleetRecordsMissing",
            Firing(
                {**FLEET, "severity": "critical"}, "notbefore-fleet: the hub deleted 120 records before they were read"
            ),
            on=(90,),
            off=(45,),
        ),
    ),
    Case(
        "records cannot be read, also the first ones",
        instances(one=((0, READING), (60, reading({fleet.POISON: {("not_json",): 1}})))),
        fires(
            "NotbeforeFleetRecordsSetAside",
            Firing(
                {**FLEET, "reason": "not_json", "severity": "warning"},
                "notbefore-fleet: records of the hub cannot be read (not_json)",
            ),
            on=(60,),
            off=(45, 1080),
        ),
    ),
    Case(
        "the checkpoint store fails again and again",
        lambda: [FleetInstance("one", lambda now: reading({fleet.ERRORS: {("store",): max(0, now - 300) // 15}}))],
        fires(
            "NotbeforeFleetCheckpointStoreFailing",
            Firing({**FLEET, "severity": "warning"}, "notbefore-fleet: snapshots cannot be written or read"),
            on=(600,),
            off=(300,),
        ),
    ),
    Case(
        "VMs are silent in the partitions of two instances",
        instances(
            one=((0, READING), (60, reading({fleet.SILENT: {("westeurope", "web", "", ""): 2}})), (600, READING)),
            two=((0, OTHER), (60, reading({fleet.SILENT: {("westeurope", "web", "", ""): 1}}, OTHER)), (600, OTHER)),
        ),
        fires(
            "NotbeforeFleetVmsSilent",
            Firing(
                {**FLEET, "region": "westeurope", "scale_set": "web", "severity": "warning"}, "3 VMs of web are silent"
            ),
            on=(360,),
            off=(345, 600),
        ),
    ),
    Case(
        "what an instance cannot deliver is alerted as an agent's is",
        lambda: [FleetInstance("one", lambda _: READING, lambda _: OutboxView(rows={("chat", "dead"): 3}))],
        fires(
            "NotbeforeNotificationsDead",
            Firing(
                {**FLEET, "instance": "one", "sink": "chat", "state": "dead", "severity": "warning"},
                "one: the sink chat permanently refused 3 notifications",
            ),
            on=(60,),
        ),
    ),
]


@functools.cache
def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


@functools.cache
def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    needs("promtool")
    return run("promtool", *words, GOGC="400", GOMAXPROCS="1")  # the collector takes a third of its time, else


def test_promtool_finds_nothing_to_say_of_the_rules() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert checked.returncode == 0, checked.stderr


def filled_in(alert: str, labels: dict[str, str]) -> str:
    description: str = alerts()[alert]["annotations"]["description"]
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda name: labels[name[1]], description)


def wanted() -> frozenset[str]:
    """The metrics that the rules ask for."""
    return frozenset(re.findall(r"\b(?:notbefore|azure)_\w+|\bup\b", RULES.read_text(encoding="utf-8")))


def written(case: Case) -> dict[str, Any]:
    """The case as promtool reads it."""
    last = max(second for seconds in case.looks.values() for second in seconds)
    looks = [
        {
            "eval_time": f"{second}s",
            "alertname": alert,
            "exp_alerts": [
                {
                    "exp_labels": one.labels,
                    "exp_annotations": {
                        "summary": one.summary,
                        "description": one.description or filled_in(alert, one.labels),
                        "runbook_url": f"{RUNBOOK_URL}#{alert.lower()}",
                    },
                }
                for one in expected
            ],
        }
        for alert, seconds in case.looks.items()
        for second, expected in seconds.items()
    ]
    return {
        "name": case.story,
        "interval": f"{case.interval}s",
        "input_series": scraped(case.fleet(), last // 60 + 1, case.interval, wanted()),
        "alert_rule_test": looks,
    }


@pytest.mark.long
@pytest.mark.parametrize("share", range(4))
def test_alerts(share: int, tmp_path: Path) -> None:
    names, files = [group["name"] for group in groups()], list[Path]()
    for interval in (15, 60):
        cases = [case for case in CASES[share::4] if case.interval == interval]
        ours = [case for case in cases if any(alert.startswith("Azure") for alert in case.looks)]
        # groups are evaluated side by side: where an alert asks for what another one records, either may be first
        for some, order in ((cases, names), (ours, names[::-1])):
            test = {"rule_files": [str(RULES)], "evaluation_interval": f"{interval}s", "group_eval_order": order}
            files.append(tmp_path / f"{len(files)}.yml")
            # JSON is YAML, and twenty times as fast
            files[-1].write_text(json.dumps({**test, "tests": [*map(written, some)]}), encoding="utf-8")
    tested = promtool("test", "rules", *files)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_is_seen_firing_and_silent() -> None:
    looks = [(alert, expected) for case in CASES for alert, seen in case.looks.items() for expected in seen.values()]
    assert {alert for alert, expected in looks if expected} == set(alerts())
    assert {alert for alert, expected in looks if not expected} == set(alerts())


def test_each_alert_says_what_it_is_and_has_its_section_of_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == list(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK_URL}#{name.lower()}"
        assert "severity" in rule.get("labels", {}) or "event:azure_scheduled_event:severity" in rule["expr"], name


def test_the_rules_and_the_sinks_have_one_severity(tmp_path: Path) -> None:
    listed, severities = [], []
    for event_type, ahead, duration in product((*EVENT_TYPES, "New"), (1800, NEAR, NEAR + 1, None), (-1, 5, 8, 9)):
        event_id = f"{event_type}{ahead}{duration}"
        one = reboot(event_id, EventType=event_type, DurationInSeconds=duration)
        listed.append(begun(one) if ahead is None else one | {"NotBefore": clock(60 + int(ahead))})
        severity = severity_of(event_type, ahead, duration if duration >= 0 else None)
        severities.append({"labels": f'{{event_id="{event_id}", severity="{severity}"}}', "value": 1})
    test = {
        "interval": "15s",
        "input_series": scraped(vms("web_0", look=lambda _: listed)(), 1, 15, wanted()),
        "promql_expr_test": [
            {
                "expr": "group by (event_id, severity) (event:azure_scheduled_event:severity)",
                "eval_time": "60s",
                "exp_samples": severities,
            }
        ],
    }
    file = tmp_path / "severity.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}))
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_names_of_webdevops_are_recorded_for_those_who_switch(tmp_path: Path) -> None:
    webdevops = RULES.with_name("webdevops.rules.yml")
    wanted = frozenset(re.findall(r"\b(?:notbefore|azure_scheduled_event)_\w+", webdevops.read_text(encoding="utf-8")))
    event = 'azure_scheduledevent_event{job="notbefore", instance="%s", eventID="E1", eventType="Reboot", '
    event += 'eventStatus="%s", eventSource="Platform", resource="web_0"}'
    expected = [
        (45, "azure_scheduledevent_event", []),
        (90, "azure_scheduledevent_event", [(event % ("web_0", "Scheduled"), 960)]),
        (330, "azure_scheduledevent_event", [(event % ("web_0", "Started"), 1)]),
        (90, "azure_scheduledevent_request_error", [(f'{{job="notbefore", instance="web_{n}"}}', 0) for n in (0, 1)]),
    ]
    test = {
        "interval": "15s",
        "input_series": scraped(vms("web_0", "web_1", look=LIFE)(), 10, 15, wanted),
        "promql_expr_test": [
            {"expr": f"max by (job, instance, eventID, eventType, eventStatus, eventSource, resource) ({name})"
             if name.endswith("error") else name,
             "eval_time": f"{second}s", "exp_samples": [{"labels": labels, "value": value} for labels, value in found]}
            for second, name, found in expected
        ],
    }  # fmt: skip
    file = tmp_path / "webdevops.yml"
    file.write_text(json.dumps({"rule_files": [str(webdevops)], "evaluation_interval": "15s", "tests": [test]}))
    for words in (("check", "rules", "--lint=all", "--lint-fatal", webdevops), ("test", "rules", file)):
        done = promtool(*words)
        assert done.returncode == 0, done.stdout + done.stderr
