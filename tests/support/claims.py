"""What is claimed of events whose lives are not simple: the table in docs/how-it-works.md, made by playing them."""

from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from notbefore.core.change import Change
from notbefore.core.lifecycle import as_another_vm, diff
from notbefore.core.tracked import Tracked
from support.azure import ME, PEER, STARTED, at, document, item, now

LATER: Final = {"NotBefore": "Sun, 01 Mar 2026 12:25:00 GMT"}
REBOOT: Final = {"EventType": "Reboot"}


class Answer(Struct):
    """One answer of IMDS: when (seconds), what it lists, and what happened before it."""

    seconds: float
    items: tuple[dict[str, Any], ...] = ()
    since: dict[str, Any] = {}
    by: int = 1  # by how much DocumentIncarnation went up
    to_another_vm: bool = False  # the disk was moved


def restarted(silence: float) -> dict[str, Any]:
    """The agent was started again; it had been away for so many seconds."""
    return {"silence": silence, "gap": None}


def booted(silence: float, down: float, **more: Any) -> dict[str, Any]:
    """The machine was booted; it went down at ``down`` seconds."""
    return {"silence": silence, "rebooted": True, "last": at(down - 2), "down": at(down), **more}


EMPTY: Final = Answer(0)
ONE: Final = Answer(1, (item(),))
BEGUN: Final = Answer(901, (item(**STARTED),))
STORIES: Final[dict[str, tuple[Answer, ...]]] = {
    "Scheduled, Started, gone": (EMPTY, ONE, BEGUN, Answer(1500)),
    "Scheduled, gone": (EMPTY, ONE, Answer(300)),
    "Started at first sight, gone": (EMPTY, Answer(1, (item(**STARTED),)), Answer(600)),
    "already Started when the agent first looked": (Answer(0, (item(**STARTED),), {"silence": None}), Answer(60)),
    "Scheduled; 3 polls fail while NotBefore passes; gone": (
        EMPTY,
        Answer(898, (item(),)),
        Answer(902, (), {"silence": 4.0}, 2),
    ),
    "Scheduled; 8 s without an answer, NotBefore ahead; gone": (EMPTY, ONE, Answer(9, (), {"silence": 8.0}, 2)),
    "Scheduled; 8 s without an answer, NotBefore passes; gone": (
        EMPTY,
        Answer(895, (item(),)),
        Answer(903, (), {"silence": 8.0}, 2),
    ),
    "Scheduled; 5 min without an answer; gone, incarnation up by 1": (EMPTY, ONE, Answer(301, (), {"silence": 300.0})),
    "Scheduled; 5 min without an answer; gone, incarnation up by 2": (
        EMPTY,
        ONE,
        Answer(301, (), {"silence": 300.0}, 2),
    ),
    "Started; an hour without an answer; gone": (EMPTY, ONE, BEGUN, Answer(4500, (), {"silence": 3599.0}, 9)),
    "Scheduled; the agent is restarted in 5 s; gone": (
        EMPTY,
        ONE,
        Answer(300, (item(),)),
        Answer(306, (), restarted(6.0), 2),
    ),
    "Started; the agent is restarted in 5 s; gone": (EMPTY, ONE, BEGUN, Answer(907, (), restarted(6.0), 2)),
    "Reboot of this VM, Started; the VM boots; gone": (
        EMPTY,
        Answer(1, (item(**REBOOT),)),
        Answer(901, (item(**REBOOT, **STARTED),)),
        Answer(960, (), booted(59.0, 910), 4),
    ),
    "Reboot of this VM, Scheduled; the VM goes down after NotBefore and boots; gone": (
        EMPTY,
        Answer(899, (item(**REBOOT),)),
        Answer(960, (), booted(61.0, 905), 4),
    ),
    "Reboot of this VM, Scheduled; the VM boots before NotBefore; gone": (
        EMPTY,
        Answer(600, (item(**REBOOT),)),
        Answer(960, (), booted(360.0, 700), 4),
    ),
    "Reboot of this VM, in an unknown status; the VM goes down after NotBefore and boots; gone": (
        EMPTY,
        Answer(899, (item(**REBOOT, EventStatus="Pondered"),)),
        Answer(960, (), booted(61.0, 905), 4),
    ),
    "Freeze, Scheduled; the VM boots; gone": (EMPTY, ONE, Answer(960, (), booted(959.0, 905), 4)),
    "the disk is moved to another VM, which boots; gone": (
        EMPTY,
        ONE,
        Answer(960, (), booted(959.0, 905, vm=PEER), 4, to_another_vm=True),
    ),
    "the disk is moved to another VM, which is listed as well": (
        EMPTY,
        Answer(1, (item(Resources=[ME, PEER]),)),
        Answer(60, (item(Resources=[ME, PEER]),), booted(59.0, 30, vm=PEER), to_another_vm=True),
    ),
    "gone, then listed again under the same EventId, gone": (
        EMPTY,
        ONE,
        Answer(300),
        Answer(400, (item(),)),
        Answer(500),
    ),
    "gone while the agent is down, then listed again": (
        EMPTY,
        ONE,
        Answer(900, (), restarted(898.0), 2),
        Answer(901, (item(),)),
    ),
    "NotBefore moves there and back": (EMPTY, ONE, Answer(10, (item(**LATER),)), Answer(20, (item(),)), Answer(30)),
    "NotBefore moves there, the agent is restarted, and back": (
        EMPTY,
        ONE,
        Answer(10, (item(**LATER),)),
        Answer(16, (item(),), restarted(6.0)),
        Answer(30),
    ),
    "Started goes back to Scheduled, gone": (EMPTY, ONE, BEGUN, Answer(910, (item(**LATER),)), Answer(920)),
    "Started goes back to Scheduled, Started, gone": (
        EMPTY,
        ONE,
        BEGUN,
        Answer(910, (item(**LATER),)),
        Answer(1500, (item(**STARTED),)),
        Answer(2000),
    ),
    "a field cannot be read once": (EMPTY, ONE, Answer(2, (item(Resources=17),)), Answer(3, (item(),)), Answer(4)),
    "the event cannot be read for 30 s; gone": (
        EMPTY,
        ONE,
        *(Answer(second, (item(EventStatus=""),)) for second in range(2, 32)),
        Answer(32),
    ),
    "listed twice under the same EventId, Scheduled and Started; gone": (
        EMPTY,
        Answer(1, (item(), item(**STARTED))),
        Answer(2),
    ),
    "the first answer of another endpoint or api-version lists nothing, nor does the second": (
        EMPTY,
        ONE,
        Answer(2, (), {"silence": None, "elsewhere": True}),
        Answer(3),
    ),
    "the VM's Resources change to another VM's": (EMPTY, ONE, Answer(10, (item(Resources=[PEER]),)), Answer(20)),
}


def played(answers: tuple[Answer, ...]) -> Iterator[Change]:
    """The changes that an agent reports."""
    tracked, incarnation = Tracked(), 0
    for answer in answers:
        incarnation += answer.by
        tracked = as_another_vm(tracked) if answer.to_another_vm else tracked
        step = diff(tracked, document(*answer.items, incarnation=incarnation), now(answer.seconds, **answer.since))
        tracked = step.tracked
        yield from step.changes


def claim(change: Change) -> str:
    """One change as the table names it."""
    outcome = f", outcome {change.outcome}" if change.outcome is not None and change.outcome != change.kind else ""
    return f"{change.kind} (`{change.reason}`{outcome})"


def table() -> str:
    """The table in Markdown."""
    rows = (f"| {words} | {', '.join(map(claim, played(answers)))} |" for words, answers in STORIES.items())
    return "\n".join(["| what IMDS shows | what is reported |", "|---|---|", *rows])
