"""A world for an agent to observe, and a judge of its reports; both share no code with the agent.

``World`` plays what Azure may do with scheduled events and what may happen to a machine.
``Account`` records what an agent was shown, and judges each report: is it true, and could the agent
be more certain?
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

ORIGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
# seconds by which a duration may be off: ``Date`` counts whole seconds, polls come once a second
SLACK = 3.0
SHORTEST_START = 30.0  # seconds for which Azure keeps a started event listed at least
LATEST_CANCELLATION = 10.0  # seconds before NotBefore after which Azure cancels nothing any more
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
GROUPS = {"a": ("a", "b"), "b": ("a", "b"), "c": ("c",)}  # VM -> the VMs whose events it is shown
PREFIX = "azure.scheduled_event."


@dataclass
class Happening:
    """One event with its real course. Times are seconds since the beginning of the world."""

    event_id: str
    event_type: str
    resources: tuple[str, ...]
    announced: float
    not_before: float
    description: str = "planned"
    started: float | None = None
    gone: float | None = None
    starts_at: float | None = None  # as planned; None: it will be canceled
    ends_at: float = 0.0

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


@dataclass
class World:
    """Azure, and the machine on which the agent runs. ``now`` is the true time, in seconds."""

    chance: random.Random
    now: float = 0.0
    vm: str = "a"  # where the disk is
    wall_offset: float = 0.0  # by how much the wall clock is wrong
    booted: float = -1000.0
    stood_still: float = 0.0  # for how long the clock since the boot was paused in all
    boots: int = 0
    dated: bool = True  # IMDS's answers have a ``Date``
    incarnation: int = 1
    happenings: dict[str, Happening] = field(default_factory=dict)
    # begin, end, was the wall clock put right?
    pauses: list[tuple[float, float, bool]] = field(default_factory=list)
    asked: float = 0.0  # when IMDS was last asked

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

    # ---- time goes by

    def run(self, seconds: float) -> None:
        """Let time go by; events start and end in it as they were planned."""
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
        """Return the next step of each event before a time.

        A step is its time, the number of the event, its id, and the field that gets the time.
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
        self.pauses.append((begin, self.now, put_right))

    def reboot(self, seconds: float, vm: str | None = None) -> None:
        """Switch the machine off for some seconds; ``vm``: its disk is another VM's afterwards."""
        begin = self.now
        if self.pauses and self.pauses[-1][1] == self.now:
            begin, _, _ = self.pauses.pop()  # one interruption with the pause before it
        self.run(seconds)
        self.pauses.append((begin, self.now, True))
        self.boots += 1
        self.booted = self.now
        self.stood_still = 0.0
        self.vm = vm or self.vm
        if self.chance.random() < 0.5:
            self.incarnation = self.chance.randint(1, 5)

    def ask(self) -> list[dict[str, Any]]:
        """Return what IMDS lists for the VM now."""
        if self.now - self.asked > 86_400:  # it was switched off, and starts again
            self.incarnation = self.chance.randint(1, 3)
        self.asked = self.now
        return [
            happening.item()
            for happening in self.happenings.values()
            if happening.listed and self._is_shown(happening)
        ]

    def _is_shown(self, one: Happening) -> bool:
        return any(name in GROUPS[self.vm] for name in one.resources)

    # ---- what Azure does

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
        if course == "early":  # approved by every VM
            starts = announced + self.chance.uniform(1, notice)
        elif course == "at once":  # hardware failed
            starts = announced
        elif course == "canceled":
            starts = None
        lasts = self.chance.choice([SHORTEST_START, 60.0, 600.0, 3000.0])
        ends = (
            starts + lasts
            if starts is not None
            else announced + self.chance.uniform(0.5, notice - LATEST_CANCELLATION)
        )
        one = Happening(
            event_id,
            self.chance.choice(TYPES),
            resources,
            announced,
            due,
            starts_at=starts,
            ends_at=ends,
        )
        if course == "at once":
            one.started = announced
        self.happenings[event_id] = one
        self.incarnation += 1
        return one

    def start_early(self, seconds: float) -> None:
        """Start an event of this VM, as if it had just been approved: the VM is paused for it."""
        for happening in self.happenings.values():
            if happening.listed and happening.started is None and self.vm in happening.resources:
                happening.starts_at = self.now + 0.1
                happening.ends_at = happening.starts_at + SHORTEST_START + seconds
                self.pause(seconds, put_right=True)
                return

    def change(self) -> None:
        """Change the description, the NotBefore or the resources of a listed event."""
        open_ = [
            happening
            for happening in self.happenings.values()
            if happening.listed and happening.started is None
        ]
        if not open_:
            return
        one = self.chance.choice(open_)
        what = self.chance.choice(["description", "not_before", "resources"])
        if what == "description":
            one.description = f"{one.description}+"
        elif what == "not_before" and one.starts_at is not None:
            by = float(self.chance.choice([20, 120, 900]))
            one.not_before = one.not_before + by
            one.starts_at = one.starts_at + by
            one.ends_at = one.ends_at + by
        elif "c" not in one.resources:
            one.resources = self.chance.choice([("a",), ("b",), ("a", "b")])
        self.incarnation += 1


@dataclass
class Sight:
    """What an agent was shown of one event."""

    at: float
    item: dict[str, Any]
    first: float  # when it was shown first
    # when the observer had looked before that; None: not, or it could not read it then
    looked_before: float | None
    first_started: float | None = None  # when it was first shown Started
    looked_before_start: float | None = None
    partial: bool = False  # a part of it could not be read yet
    # a clock was set, the VM paused or the agent stopped since it was shown last
    perturbed: bool = False


class Account:
    """What the agent of one disk in one VM was shown, and which reports of it are true."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.false: list[str] = []
        self.timid: list[str] = []
        self.memories: dict[str, dict[str, Sight]] = {}
        self.move(world.vm)

    def move(self, vm: str) -> None:
        """Move the disk to this VM, which was shown nothing in the meantime."""
        self.sights = self.memories.setdefault(vm, {})
        self.last_look: float | None = None
        self.unread_before = set[str]()
        self.same_boot = True

    def perturb(self, *, rebooted: bool = False) -> None:
        """Note an incident after which an agent may be uncertain."""
        for sight in self.sights.values():
            sight.perturbed = True
        if rebooted:
            self.same_boot = False

    def judge(self, records: list[dict[str, Any]], name: str | None) -> None:
        """Compare the reports after the last answer with what happened."""
        for record in records:
            trouble = self._trouble(record, name)
            if trouble:
                self.false.append(f"{self.world.now:.1f}: {trouble}: {record}")
            if record.get(PREFIX + "outcome") == "unknown" and (known := self._certain(record)):
                self.timid.append(f"{self.world.now:.1f}: {known}: {record}")

    def shown(self, items: list[dict[str, Any]], unread: dict[str, bool]) -> None:
        """Note what the agent has been shown.

        ``unread``: by EventId, whether the whole event was unreadable.
        """
        now = self.world.now
        for item in items:
            key = item["EventId"]
            if unread.get(key):
                continue
            looked = (
                self.last_look
                if "" not in self.unread_before and key not in self.unread_before
                else None
            )
            sight = self.sights.get(key)
            if sight is None:
                sight = self.sights[key] = Sight(now, item, now, looked)
            if item["EventStatus"] == "Started" and sight.first_started is None:
                sight.first_started = now
                sight.looked_before_start = looked if sight.at == self.last_look else None
                if sight.first == now:
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

    # ---- is it true?

    def _trouble(self, record: dict[str, Any], name: str | None) -> str:
        key = str(record[PREFIX + "id"])
        kind = str(record[PREFIX + "change"])
        truth = self.world.happenings[key]
        sight = self.sights.get(key)
        scope = record[PREFIX + "scope"]
        mine = self.world.vm in record[PREFIX + "resources"]
        checks = {
            "it says that this VM is affected": scope == "self" and not mine,
            "it says that another VM is affected": scope == "peer" and mine,
            "it does not know whom it affects": scope == "unknown"
            and name is not None
            and record[PREFIX + "resources"],
            "it is listed no longer": kind in ("announced", "updated", "started")
            and not truth.listed,
            "it is listed": kind in ("canceled", "finished", "ended") and truth.listed,
            "it has not started": kind in ("started", "finished") and truth.started is None,
            "it had started": kind in ("canceled", "announced") and truth.started is not None,
            "it never finished": record.get(PREFIX + "outcome") == "finished"
            and truth.started is None,
            "this VM never saw it": kind not in ("announced", "started") and sight is None,
            "nothing changed": kind == "updated" and sight is not None and self._same(truth, sight),
            "another VM reports": record.get("host.name", self.world.vm) != self.world.vm,
        }
        wrong = [words for words, is_wrong in checks.items() if is_wrong]
        return "; ".join(wrong + list(self._wrong_durations(record, truth, sight)))

    def _same(self, truth: Happening, sight: Sight) -> bool:
        return truth.item() == sight.item and not sight.partial

    def _wrong_durations(
        self, record: dict[str, Any], truth: Happening, sight: Sight | None
    ) -> Iterator[str]:
        now = self.world.now
        first = sight.first if sight is not None else now
        looked = sight.looked_before if sight is not None else self.last_look
        notice = record.get(PREFIX + "notice_seconds")
        if notice is not None:
            if looked is None or first - looked > 15 + SLACK:
                yield f"notice {notice} though nobody saw when it began"
            given = record.get(PREFIX + "not_before")
            at_once = (
                sight.first_started == first if sight is not None else truth.started is not None
            )
            due = (
                first
                if at_once or not given
                else (datetime.fromisoformat(given) - ORIGIN).total_seconds()
            )
            expected = max(0.0, due - first)
            if abs(notice - expected) > SLACK:
                yield f"notice {notice}, not {expected}"
        started = now if sight is None or sight.first_started is None else sight.first_started
        for which, begin, end in (("scheduled", first, started), ("started", started, now)):
            value = record.get(f"{PREFIX}{which}_seconds")
            if value is not None and abs(value - (end - begin)) > SLACK:
                yield f"{which} {value}, not {end - begin}"
        value = record.get(PREFIX + "interruption_seconds")
        if value is not None:
            before = (sight.looked_before_start if sight is not None else None) or -1e9
            longest = max(
                [end - begin for begin, end, _ in self.world.pauses if end >= before], default=0.0
            )
            if not 0 <= value <= longest + 1.0:
                yield f"interruption {value}, at most {longest}"
            if truth.started is not None and value < self._paused_in(truth) - SLACK:
                yield f"interruption {value}, at least {self._paused_in(truth)}"

    def _paused_in(self, truth: Happening) -> float:
        """Return the longest pause of the VM while an event was Started."""
        paused = [0.0]
        for begin, end, _ in self.world.pauses:
            has_started = truth.started is not None and truth.started < end
            if has_started and (truth.gone is None or end <= truth.gone):
                paused.append(end - max(begin, truth.started or begin))
        return max(paused)

    # ---- was more certain?

    def _certain(self, record: dict[str, Any]) -> str:
        """Return why an outcome that is called unknown is certain; empty if it is not."""
        sight = self.sights.get(str(record[PREFIX + "id"]))
        if sight is None:
            return ""
        if sight.item["EventStatus"] == "Started":
            return "it was last shown Started"
        if (
            sight.perturbed
            or sight.first_started is not None
            or not self.same_boot
            or not self.world.dated
        ):
            return ""
        silence = self.world.now - sight.at
        not_before = datetime.strptime(sight.item["NotBefore"], "%a, %d %b %Y %H:%M:%S %Z").replace(
            tzinfo=UTC
        )
        if silence <= 4.0 or (
            silence <= 14.0 and (not_before - ORIGIN).total_seconds() > self.world.now + SLACK
        ):
            return f"the silence was {silence:.1f} s"
        return ""
