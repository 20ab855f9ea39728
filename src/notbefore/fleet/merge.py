"""``Story``: what the reports of many VMs make of one event. Pure.

Every VM of a scale set or availability set reports the same event, in its own time. The story is the same whatever the
order in which the reports come, and however often each of them does: what was reported is kept as a set of facts, and
the strongest claim stands (``STRENGTH``). What people are notified of is a step between two standings (``STEPS``);
each step is made once.
"""

from datetime import UTC, datetime, timedelta
from enum import IntEnum
from sys import intern
from typing import Final

from msgspec import Struct

from notbefore.core.change import LifecycleKind
from notbefore.core.document import VANISHING, Event
from notbefore.fleet.reading import NOBODY, NOWHERE, Place, Report, group_of


class Standing(IntEnum):
    """How an event stands. The order is that of ``STRENGTH``: of two claims the greater one stands."""

    NEW = 0  # nothing is known of it, or nobody was notified of it
    SCHEDULED = 1
    ENDED = 2  # gone, and nobody saw how
    CANCELED = 3
    STARTED = 4
    FINISHED = 5


NEW, SCHEDULED, ENDED, CANCELED, STARTED, FINISHED = Standing

STRENGTH: Final[dict[LifecycleKind, Standing]] = {
    "announced": SCHEDULED,
    "updated": SCHEDULED,
    "ended": ENDED,  # nobody saw it end: who did see it knows better
    "canceled": CANCELED,  # seen from outside it looks canceled; who saw it start knows better
    "started": STARTED,
    "finished": FINISHED,  # it had started, and is over
}
"""What a VM claims with a change. Of contradicting claims the one stands that takes more to have been seen."""

OVER: Final = frozenset({ENDED, CANCELED, FINISHED})

OUTCOME: Final[dict[Standing, Standing]] = {  # once the VMs say that it is over: by the strongest claim
    SCHEDULED: ENDED,  # only after the limit: nobody said how
    ENDED: ENDED,
    CANCELED: CANCELED,
    STARTED: FINISHED,  # Azure knows one way out of Started
    FINISHED: FINISHED,
}

STEPS: Final[dict[tuple[Standing, Standing], LifecycleKind | None]] = {
    (NEW, SCHEDULED): "announced",
    (NEW, STARTED): "started",
    (NEW, CANCELED): "canceled",
    (NEW, FINISHED): "finished",
    (NEW, ENDED): "ended",
    (SCHEDULED, SCHEDULED): "updated",
    (SCHEDULED, STARTED): "started",
    (SCHEDULED, CANCELED): "canceled",
    (SCHEDULED, FINISHED): "finished",
    (SCHEDULED, ENDED): "ended",
    (STARTED, STARTED): "updated",
    (STARTED, SCHEDULED): None,  # of a wave alone, which stays started: what had started is over, more is scheduled
    (STARTED, FINISHED): "finished",
    (STARTED, CANCELED): "finished",  # of a wave alone: the rest of it was canceled
    (STARTED, ENDED): "ended",
    (CANCELED, STARTED): "started",  # what looked canceled was not
    (CANCELED, FINISHED): "finished",
    (CANCELED, SCHEDULED): None,
    (CANCELED, CANCELED): None,
    (CANCELED, ENDED): None,
    (ENDED, STARTED): "started",  # as far as was known it was over, and it starts only now
    (ENDED, FINISHED): "finished",
    (ENDED, SCHEDULED): None,
    (ENDED, CANCELED): "canceled",  # learnt late
    (ENDED, ENDED): None,
} | {(FINISHED, later): None for later in (SCHEDULED, ENDED, CANCELED, STARTED, FINISHED)}
"""From what was notified last to how it stands now: what to notify of. ``None``: nothing, and the last one stays."""

CONTRADICTS: Final[dict[LifecycleKind, tuple[LifecycleKind, ...]]] = {
    "canceled": ("started", "finished"),
    "started": ("canceled",),
    "finished": ("canceled",),
}

_BITS: Final[dict[LifecycleKind, int]] = {kind: 1 << place for place, kind in enumerate(STRENGTH)}
_ENDING: Final = _BITS["ended"] | _BITS["canceled"] | _BITS["finished"]
_OPPOSED: Final = {kind: sum(_BITS[other] for other in others) for kind, others in CONTRADICTS.items()}

MAX_VMS: Final = 5_000  # VMs that are remembered of one event: several placement groups
TOGETHER: Final = timedelta(minutes=10)  # the time in which all VMs see an event come back, whatever their clocks


class Measures(Struct, array_like=True):
    """What one affected VM measured, in seconds; ``None`` where it did not."""

    notice: float | None = None
    started_for: float | None = None
    interruption: float | None = None


class Story(Struct, array_like=True):
    """One event, as the VMs of one group report it. Mutable: only ``add``, ``Partition`` and ``Waves`` change it."""

    event: Event  # the newest content that was reported
    place: Place  # this and the next one: what its VMs have in common, by those that were heard from
    zone: str
    first_seen: datetime  # by the first VM
    group: str  # subscription and resource group, as ``group_of`` writes them
    sender: str  # the VM that reported it first, with its group as it was known then
    newest: tuple[datetime, str, str]  # when the content was seen, by which VM, and with which change
    dated: tuple[datetime, str, str]  # the same of NotBefore
    claim: Standing = NEW  # the strongest
    standing: Standing = NEW  # how the event stands by all reports
    reported: dict[str, int] = {}  # VM -> what it has reported, as bits
    undecided: int = 0  # VMs that have not said that it is over
    measured: dict[str, Measures] = {}  # of the VMs that it affects
    started: datetime | None = None  # the first start
    over: datetime | None = None  # the last VM's word that it is over
    not_before: datetime | None = None  # the last one known
    ids: set[str] = set()  # of the changes that began it: what comes back has another
    nth: int = 0  # how often an event of this id was over before
    began: datetime | None = None  # of an event that came back: when it was listed again
    back: dict[str, datetime] = {}  # VM -> when the event was listed there again
    in_doubt: set[str] = set()  # VMs that saw this event go and come back, while others may still list it
    contradicted: bool = False
    given_up: bool = False  # the limit has passed: over as far as is known
    heard_at: float = 0.0  # when the hub took in what was said of it last, in Unix seconds
    exercise: bool = False
    late: bool = False  # it was over as far as was known, and what is learnt now corrects that
    labels: tuple[str, ...] = ()  # the wave that it is in; it stays there, whatever becomes of it
    noted: Standing = NEW  # as which its wave counts it
    told: bool = False  # a notification of its wave has named it
    shares_id: bool = False  # an event of another resource group has its EventId: they are not mixed up
    by_affected: bool = False  # `place` and `zone` are those of affected VMs; until one is heard from, of the others

    @classmethod
    def begin(cls, report: Report) -> "Story":
        """A story that the first report of an event begins; it is to be added as well."""
        return cls(
            event=event_of(report),
            place=NOWHERE,
            zone="",
            first_seen=report.first_seen,
            group=report.group,
            sender=report.group + report.vm,
            newest=(report.time, report.vm, report.change_id),
            dated=(report.time, report.vm, report.change_id),
            exercise=report.exercise,
        )

    @property
    def affected(self) -> tuple[str, ...]:
        """The names of the VMs that it affects."""
        return self.event.resources

    @property
    def vms(self) -> list[str]:
        """The VMs that it affects, each with its group."""
        return [self.group + name for name in self.event.vms]

    def deadline(self, limit: float) -> float:
        """Unix seconds after which nobody is waited for any longer; ``limit`` in seconds."""
        times = (self.first_seen, self.not_before, self.started)
        return max(self.heard_at, *(time.timestamp() for time in times if time is not None)) + limit

    def add(self, report: Report) -> bool:
        """Take in a report; returns whether the event stands otherwise now, or its content is another one."""
        vm, kind = report.vm, report.change
        bit, known = _BITS[kind], self.reported.get(vm)
        if known is None:
            if len(self.reported) >= MAX_VMS:
                return False
            known = 0
            self.undecided += 1
        if self.place == NOWHERE:
            self.locate(report.place, report.zone, affected=report.scope != "peer")
        if known & bit:
            return (kind == "updated" or report.reason == "came_back") and self._take_content(report, vm)
        if bit & _ENDING and not known & _ENDING:
            self.undecided -= 1
        self.reported[intern(vm)] = known | bit  # many stories have the same VMs
        self.claim = max(self.claim, STRENGTH[kind])
        if kind in _OPPOSED and not self.contradicted:
            self.contradicted = any(bits & _OPPOSED[kind] for bits in self.reported.values())
        changed = self._take_content(report, vm)
        before, self.standing = self.standing, self._stands()
        return changed or before is not self.standing

    def is_of_before(self, report: Report) -> bool:
        """Whether a report is of an earlier event of this id: it comes late, or again."""
        began = self.back.get(report.vm, self.began)
        return began is not None and report.time < began

    def comes_back(self, report: Report) -> bool:
        """Whether a report shows that this event is over, and that its id is another event's now.

        One VM that lost sight of an event for a moment is no proof: more than half of those that reported it have to
        see it come back. Of a VM that the event interrupts no word is expected.
        """
        vm = report.vm
        if report.reason != "came_back" or self.is_of_before(report) or self.back.get(vm) == report.time:
            return False
        if len(self.back) >= MAX_VMS and vm not in self.back:
            return False
        ended = self.reported.get(vm, 0) & _ENDING
        self.back[vm] = report.time
        if not ended:  # so it begins there
            return False
        self.in_doubt.add(vm)
        if self.standing in OVER:
            return True
        self.reported[vm] &= ~_ENDING
        self.undecided += 1
        agree = {one for one in self.in_doubt if abs(report.time - self.back[one]) <= TOGETHER}
        asked = self.reported.keys() - (set(self.event.vms) if self.claim >= STARTED else ())
        return 2 * len(agree) > len(asked | agree)

    def begin_again(self, former: dict[str, datetime], report: Report) -> None:
        """It is not the first event of its id. ``former``: ``back`` of the one before."""
        recent = {vm: at for vm, at in former.items() if abs(report.time - at) <= TOGETHER}
        self.back = recent | {report.vm: report.time}
        self.began = min(self.back.values())

    def locate(self, place: Place, zone: str, *, affected: bool) -> None:
        """Keep what this VM has in common with those before it; affected VMs count before others."""
        if place == NOWHERE:  # IMDS has not said yet who it is
            return
        if self.group == NOBODY:
            self.group = group_of(place.subscription, place.resource_group)
        if self.place == NOWHERE or (affected and not self.by_affected):
            self.place, self.zone, self.by_affected = place, zone, affected
        elif affected == self.by_affected:
            self.place = self.place.shared(place)
            self.zone = zone if zone == self.zone else ""

    def give_up(self) -> None:
        """The limit has passed: it is over as far as is known."""
        self.given_up = True
        self.standing = OUTCOME[self.claim]

    def _stands(self) -> Standing:
        if self.given_up or self._is_over():
            return OUTCOME[self.claim]
        return STARTED if self.claim >= STARTED else SCHEDULED

    def _is_over(self) -> bool:
        """All affected VMs that are heard from say so; where none of them is, all others."""
        reported = self.reported
        if self.undecided == 0:
            return True
        if self.undecided == len(reported):
            return False
        if self.event.event_type in VANISHING:
            return True
        heard = [reported[name] for name in map(str.casefold, self.event.resources) if name in reported]
        return bool(heard) and all(bits & _ENDING for bits in heard)

    def _take_content(self, report: Report, vm: str) -> bool:
        """Take over times, measurements and content; returns whether the content is another one."""
        self.first_seen = min(self.first_seen, report.first_seen)
        kind = report.change
        begins = kind == "announced" or report.reason in ("first_seen_started", "came_back")
        if begins and len(self.ids) < MAX_VMS:
            self.ids.add(report.change_id)
        if kind == "started" and (self.started is None or report.time < self.started):
            self.started = report.time
        if STRENGTH[kind] in OVER and (self.over is None or report.time > self.over):
            self.over = report.time
        affected = report.scope != "peer"
        self.locate(report.place, report.zone, affected=affected)
        if affected:
            self._measure(report, vm)
        when = (report.time, vm, report.change_id)
        if report.not_before is not None and (self.not_before is None or when >= self.dated):
            self.not_before, self.dated = report.not_before, when
        if when < self.newest:
            return False
        self.newest = when
        before, self.event = self.event, event_of(report)
        if set(before.vms) != set(self.event.vms):
            self.by_affected = False  # other VMs are affected now
        # the status is a matter of the standing
        return self.event != before and content(self.event) != content(before) and STRENGTH[kind] not in OVER

    def _measure(self, report: Report, vm: str) -> None:
        old = self.measured.get(vm)
        if old is None:
            old = self.measured[vm] = Measures()
        if report.notice is not None:
            old.notice = report.notice if old.notice is None else min(old.notice, report.notice)
        if report.started_for is not None:
            old.started_for = max(old.started_for or 0.0, report.started_for)
        if report.interruption is not None:
            old.interruption = max(old.interruption or 0.0, report.interruption)


def event_of(report: Report) -> Event:
    """The event as a report has it."""
    return Event(
        event_id=report.event_id,
        event_type=report.event_type,
        event_status=report.event_status,
        resources=report.resources,
        not_before=report.not_before,
        description=report.description,
        event_source=report.event_source,
        duration=report.duration,
    )


def content(event: Event) -> tuple[object, ...]:
    """What of an event is worth an update: all but its status, and the order and case of its resources."""
    return (
        event.event_type,
        frozenset(event.vms),
        event.not_before,
        event.description,
        event.event_source,
        event.duration,
    )


def from_unix(seconds: float) -> datetime:
    """Unix seconds as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
