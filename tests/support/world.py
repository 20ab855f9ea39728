"""A world for an agent to observe, and an account that judges its reports.

``World`` plays Azure's scheduled events, and the incidents of a machine. ``Account`` records what
IMDS showed the agent, and judges each report: is it true, and could the agent be more certain? Both
share no code with the agent.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any, NamedTuple

ORIGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
# seconds by which a duration may be off: ``Date`` counts whole seconds, polls come once a second
SLACK = 3.0
SHORTEST_START = 30.0  # seconds for which Azure lists a started event at least
LATEST_CANCELLATION = 10.0  # seconds before NotBefore; later, Azure cancels no event
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
GROUPS = {"a": ("a", "b"), "b": ("a", "b"), "c": ("c",)}  # VM -> the VMs whose events it sees
PREFIX = "azure.scheduled_event."  # of the fields of a record about an event
ENDS = ("canceled", "finished", "ended")


@dataclass
class Happening:
    """One event and its real course. Times are seconds since the beginning of the world."""

    event_id: str
    event_type: str
    resources: tuple[str, ...]
    announced: float
    not_before: float
    description: str = "planned"
    started: float | None = None  # when Azure started it
    gone: float | None = None  # when Azure ceased to list it
    starts_at: float | None = None  # the plan; ``None``: Azure will cancel it
    ends_at: float = 0.0  # the plan

    @property
    def listed(self) -> bool:
        return self.gone is None

    def item(self) -> dict[str, Any]:
        """Return the event as Azure writes it."""
        when = ORIGIN + timedelta(seconds=self.not_before)
        return {
            "EventId": self.event_id,
            "EventStatus": "Scheduled" if self.started is None else "Started",
            "EventType": self.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(self.resources),
            "NotBefore": format_datetime(when, usegmt=True) if self.started is None else "",
            "Description": self.description,
            "EventSource": "Platform",
            "DurationInSeconds": 9,
        }


class Pause(NamedTuple):
    """A time in which the VM did not run."""

    begin: float
    end: float
    put_right: bool  # whether the wall clock was corrected afterwards

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class World:
    """Azure, and the machine on which the agent runs."""

    chance: random.Random
    now: float = 0.0  # the true time, in seconds
    vm: str = "a"  # the VM that has the disk
    wall_offset: float = 0.0  # the error of the wall clock, in seconds
    booted: float = -1000.0  # when the machine booted
    stood_still: float = 0.0  # for how many seconds the clock since the boot has been paused
    boots: int = 0
    dated: bool = True  # whether IMDS's answers have a ``Date``
    incarnation: int = 1
    happenings: dict[str, Happening] = field(default_factory=dict)  # by event id
    pauses: list[Pause] = field(default_factory=list)
    last_request: float = 0.0  # when the agent last asked IMDS

    # ---- clocks

    @property
    def wall(self) -> datetime:
        return ORIGIN + timedelta(seconds=self.now + self.wall_offset)

    @property
    def uptime(self) -> float:
        return self.now - self.booted - self.stood_still

    @property
    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    @property
    def date(self) -> str:
        """The header ``Date``: IMDS's clock is right, and counts whole seconds."""
        if not self.dated:
            return ""
        return format_datetime(
            (ORIGIN + timedelta(seconds=self.now)).replace(microsecond=0), usegmt=True
        )

    # ---- time passes

    def run(self, seconds: float) -> None:
        """Let time pass; events start and end as planned."""
        until = self.now + seconds
        steps = self._planned(until)
        while steps:
            moment, _, event_id, field_name = min(steps)
            self.now = max(self.now, moment)
            setattr(self.happenings[event_id], field_name, self.now)
            self.incarnation += 1
            steps = self._planned(until)
        self.now = until

    def _planned(self, until: float) -> list[tuple[float, int, str, str]]:
        """Return the next step of each event that happens before a time.

        A step is a time, the number of the event, its id, and the field to set to that time.
        """
        steps: list[tuple[float, int, str, str]] = []
        for number, (event_id, happening) in enumerate(self.happenings.items()):
            if not happening.listed:
                continue
            moment = happening.ends_at
            field_name = "gone"
            if happening.started is None and happening.starts_at is not None:
                moment = happening.starts_at
                field_name = "started"
            if moment < until:
                steps.append((moment, number, event_id, field_name))
        return steps

    def pause(self, seconds: float, *, put_right: bool) -> None:
        """Stop the VM for some seconds; ``put_right``: the host corrects its clock afterwards."""
        begin = self.now
        self.run(seconds)
        self.stood_still += seconds
        if not put_right:
            self.wall_offset -= seconds
        self.pauses.append(Pause(begin, self.now, put_right))

    def reboot(self, seconds: float, vm: str | None = None) -> None:
        """Switch the machine off for some seconds; ``vm``: move its disk to this VM."""
        begin = self.now
        if self.pauses and self.pauses[-1].end == self.now:
            begin = self.pauses.pop().begin  # one interruption with the pause before it
        self.run(seconds)
        self.pauses.append(Pause(begin, self.now, put_right=True))
        self.boots += 1
        self.booted = self.now
        self.stood_still = 0.0
        self.vm = vm or self.vm
        if self.chance.random() < 0.5:
            self.incarnation = self.chance.randint(1, 5)

    def ask(self) -> list[dict[str, Any]]:
        """Return the events that IMDS lists for the VM now."""
        if self.now - self.last_request > 86_400:
            # Azure switches scheduled events off after a day without a request
            self.incarnation = self.chance.randint(1, 3)
        self.last_request = self.now
        return [
            happening.item()
            for happening in self.happenings.values()
            if happening.listed and self._is_visible(happening)
        ]

    def _is_visible(self, happening: Happening) -> bool:
        return any(name in GROUPS[self.vm] for name in happening.resources)

    # ---- actions of Azure

    def announce(self) -> Happening:
        """Announce a new event with a random course."""
        group = self.chance.choice([("a", "b"), ("c",)])
        notice = self.chance.choice([30.0, 60.0, 300.0, 900.0, 7200.0])
        resources = tuple(sorted(self.chance.sample(group, self.chance.randint(1, len(group)))))
        announced = self.now
        event_id = f"{len(self.happenings):08d}"
        due = float(round(announced + notice))
        course = self.chance.choice(["on time", "on time", "early", "canceled", "at once"])
        starts: float | None = due + self.chance.random()
        if course == "early":  # every VM has approved it
            starts = announced + self.chance.uniform(1, notice)
        elif course == "at once":  # hardware has failed
            starts = announced
        elif course == "canceled":
            starts = None
        lasts = self.chance.choice([SHORTEST_START, 60.0, 600.0, 3000.0])
        if starts is None:
            ends = announced + self.chance.uniform(0.5, notice - LATEST_CANCELLATION)
        else:
            ends = starts + lasts
        happening = Happening(
            event_id,
            self.chance.choice(TYPES),
            resources,
            announced,
            due,
            starts_at=starts,
            ends_at=ends,
        )
        if course == "at once":
            happening.started = announced
        self.happenings[event_id] = happening
        self.incarnation += 1
        return happening

    def start_early(self, seconds: float) -> None:
        """Start an event of this VM, as if it had just been approved, and pause the VM for it."""
        for happening in self.happenings.values():
            if happening.listed and happening.started is None and self.vm in happening.resources:
                happening.starts_at = self.now + 0.1
                happening.ends_at = happening.starts_at + SHORTEST_START + seconds
                self.pause(seconds, put_right=True)
                return

    def change(self) -> None:
        """Change the description, the NotBefore or the resources of a listed event."""
        scheduled = [
            happening
            for happening in self.happenings.values()
            if happening.listed and happening.started is None
        ]
        if not scheduled:
            return
        happening = self.chance.choice(scheduled)
        changed_field = self.chance.choice(["description", "not_before", "resources"])
        if changed_field == "description":
            happening.description += "+"
        elif changed_field == "not_before" and happening.starts_at is not None:
            seconds = float(self.chance.choice([20, 120, 900]))
            happening.not_before += seconds
            happening.starts_at += seconds
            happening.ends_at += seconds
        elif "c" not in happening.resources:
            happening.resources = self.chance.choice([("a",), ("b",), ("a", "b")])
        self.incarnation += 1


@dataclass
class Sight:
    """The last look of an agent at one event, and its first looks."""

    at: float  # when the agent last saw the event
    item: dict[str, Any]  # the event at that time
    first: float  # when the agent first saw it
    # the look before that; ``None``: there was none, or the event was unreadable in it
    looked_before: float | None
    first_started: float | None = None  # when the agent first saw it Started
    looked_before_start: float | None = None  # the look before that, as ``looked_before``
    partial: bool = False  # whether a field of it has been unreadable so far
    # whether a clock was set, the VM paused or the agent stopped since the agent last saw it
    perturbed: bool = False


class Account:
    """Records what IMDS shows the agent of one disk in one VM, and judges the agent's reports.

    ``false``: reports that are not true, in words. ``uncertain``: true reports with an unknown
    outcome although the agent could have known it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.false: list[str] = []
        self.uncertain: list[str] = []
        self.sights_by_vm: dict[str, dict[str, Sight]] = {}
        self.move(world.vm)

    def move(self, vm: str) -> None:
        """Move the disk to this VM, on which no agent has looked in the meantime."""
        self.sights = self.sights_by_vm.setdefault(vm, {})  # by event id
        self.last_look: float | None = None
        self.unread_before: set[str] = set()  # ids of events that the last look could not read
        self.same_boot = True

    def perturb(self, *, rebooted: bool = False) -> None:
        """Note an incident after which the agent may be uncertain."""
        for sight in self.sights.values():
            sight.perturbed = True
        if rebooted:
            self.same_boot = False

    def judge(self, records: list[dict[str, Any]], name: str | None) -> None:
        """Compare the reports after the last answer with the world.

        ``name``: the name of the VM, if IMDS has told it to the agent.
        """
        for record in records:
            for fault in self._faults(record, name):
                self.false.append(f"{self.world.now:.1f}: {fault}: {record}")
            if record.get(PREFIX + "outcome") == "unknown":
                evidence = self._evidence(record)
                if evidence:
                    self.uncertain.append(f"{self.world.now:.1f}: {evidence}: {record}")

    def shown(self, items: list[dict[str, Any]], unread: dict[str, bool]) -> None:
        """Note that the agent has seen these events.

        ``unread``: the ids of events that were not or only partly readable. ``True``: the whole
        event was unreadable. The id ``""`` stands for an event without a readable id.
        """
        now = self.world.now
        for item in items:
            key = item["EventId"]
            if unread.get(key):
                continue
            looked = self.last_look
            if "" in self.unread_before or key in self.unread_before:
                looked = None
            sight = self.sights.get(key)
            if sight is None:
                sight = Sight(now, item, now, looked)
                self.sights[key] = sight
            if item["EventStatus"] == "Started" and sight.first_started is None:
                sight.first_started = now
                if sight.at == self.last_look or sight.first == now:
                    sight.looked_before_start = looked
            sight.at = now
            sight.item = item
            sight.partial = key in unread
            sight.perturbed = False
        listed = {item["EventId"] for item in items}
        for key, sight in self.sights.items():
            if key not in listed or unread.get(key):
                sight.perturbed = True
        self.unread_before = {key for key, whole in unread.items() if whole}
        self.last_look = now
        self.same_boot = True

    # ---- is the report true?

    def _faults(self, record: dict[str, Any], name: str | None) -> Iterator[str]:
        """Yield the faults of a report in words."""
        key = str(record[PREFIX + "id"])
        truth = self.world.happenings[key]
        sight = self.sights.get(key)
        yield from self._wrong_vm(record, name)
        yield from self._wrong_change(record, truth, sight)
        yield from self._wrong_notice(record, truth, sight)
        yield from self._wrong_durations(record, sight)
        yield from self._wrong_interruption(record, truth, sight)

    def _wrong_vm(self, record: dict[str, Any], name: str | None) -> Iterator[str]:
        scope = record[PREFIX + "scope"]
        resources = record[PREFIX + "resources"]
        affects_this_vm = self.world.vm in resources
        if scope == "self" and not affects_this_vm:
            yield "this VM is not affected"
        if scope == "peer" and affects_this_vm:
            yield "this VM is affected"
        if scope == "unknown" and name is not None and resources:
            yield "the scope is known"
        if record.get("host.name", self.world.vm) != self.world.vm:
            yield "another VM is named as the reporter"

    def _wrong_change(
        self, record: dict[str, Any], truth: Happening, sight: Sight | None
    ) -> Iterator[str]:
        kind = str(record[PREFIX + "change"])
        is_open = kind in ("announced", "updated", "started")
        has_started = truth.started is not None
        if is_open and not truth.listed:
            yield "the event is no longer listed"
        if kind in ENDS and truth.listed:
            yield "the event is listed"
        if kind in ("started", "finished") and not has_started:
            yield "the event has not started"
        if kind in ("canceled", "announced") and has_started:
            yield "the event had started"
        if record.get(PREFIX + "outcome") == "finished" and not has_started:
            yield "the event never finished"

        if sight is None and kind not in ("announced", "started"):
            yield "this VM never saw the event"
        if kind == "updated" and sight is not None and self._is_unchanged(truth, sight):
            yield "nothing changed"

    def _is_unchanged(self, truth: Happening, sight: Sight) -> bool:
        return truth.item() == sight.item and not sight.partial

    def _wrong_notice(
        self, record: dict[str, Any], truth: Happening, sight: Sight | None
    ) -> Iterator[str]:
        notice = record.get(PREFIX + "notice_seconds")
        if notice is None:
            return
        if sight is None:
            first = self.world.now
            looked = self.last_look
            started_at_once = truth.started is not None
        else:
            first = sight.first
            looked = sight.looked_before
            started_at_once = sight.first_started == first
        if looked is None or first - looked > 15 + SLACK:
            yield f"notice {notice}, but the agent did not see when the event was announced"

        expected = 0.0
        not_before = record.get(PREFIX + "not_before")
        if not_before and not started_at_once:
            due = (datetime.fromisoformat(not_before) - ORIGIN).total_seconds()
            expected = max(0.0, due - first)
        if abs(notice - expected) > SLACK:
            yield f"notice {notice}, not {expected}"

    def _wrong_durations(self, record: dict[str, Any], sight: Sight | None) -> Iterator[str]:
        now = self.world.now
        first = now
        started = now
        if sight is not None:
            first = sight.first
            if sight.first_started is not None:
                started = sight.first_started
        for status, expected in (("scheduled", started - first), ("started", now - started)):
            value = record.get(f"{PREFIX}{status}_seconds")
            if value is not None and abs(value - expected) > SLACK:
                yield f"{status} {value}, not {expected}"

    def _wrong_interruption(
        self, record: dict[str, Any], truth: Happening, sight: Sight | None
    ) -> Iterator[str]:
        value = record.get(PREFIX + "interruption_seconds")
        if value is None:
            return
        measured_from = -1e9
        if sight is not None and sight.looked_before_start is not None:
            measured_from = sight.looked_before_start
        pauses = [pause.seconds for pause in self.world.pauses if pause.end >= measured_from]
        longest = max(pauses, default=0.0)
        if not 0 <= value <= longest + 1.0:
            yield f"interruption {value}, at most {longest}"
        shortest = self._longest_pause_in(truth)
        if value < shortest - SLACK:
            yield f"interruption {value}, at least {shortest}"

    def _longest_pause_in(self, truth: Happening) -> float:
        """Return the longest pause of the VM while an event was Started."""
        if truth.started is None:
            return 0.0
        longest = 0.0
        for pause in self.world.pauses:
            ended_in_time = truth.gone is None or pause.end <= truth.gone
            if truth.started < pause.end and ended_in_time:
                longest = max(longest, pause.end - max(pause.begin, truth.started))
        return longest

    # ---- could the agent be more certain?

    def _evidence(self, record: dict[str, Any]) -> str:
        """Return why the agent could know an outcome that it calls unknown; empty if it cannot."""
        sight = self.sights.get(str(record[PREFIX + "id"]))
        if sight is None:
            return ""
        if sight.item["EventStatus"] == "Started":
            return "the agent last saw the event Started"
        was_disturbed = sight.perturbed or not self.same_boot
        if was_disturbed or sight.first_started is not None or not self.world.dated:
            return ""
        silence = self.world.now - sight.at
        not_before = parsedate_to_datetime(sight.item["NotBefore"])
        is_before = (not_before - ORIGIN).total_seconds() > self.world.now + SLACK
        if silence <= 4.0 or (silence <= 14.0 and is_before):
            return f"the silence was {silence:.1f} s"
        return ""
