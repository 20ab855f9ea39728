"""``Story``: what the reports of many VMs make of one event. Pure.

The story is the same whatever the order in which the reports come, and however often each of them does: the strongest
claim stands (``STRENGTH``). What people are notified of is a step between two standings (``STEPS``), made once.
"""

from datetime import UTC, datetime
from enum import IntEnum
from sys import intern
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import LifecycleKind, Outcome
from notbefore.core.document import VANISHING, Event
from notbefore.fleet.hub_records import Place, Report


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

OUTCOMES: Final[dict[Standing, Outcome]] = {ENDED: "unknown", CANCELED: "canceled", FINISHED: "finished"}
OVER: Final = frozenset(OUTCOMES)

ENDS_AS: Final = {SCHEDULED: ENDED, STARTED: FINISHED}
"""Once it is over: of an event that nobody has seen ending. Azure knows one way out of Started. Else as is claimed."""

_ENDS: Final[dict[Standing, LifecycleKind]] = {CANCELED: "canceled", FINISHED: "finished", ENDED: "ended"}
STEPS: Final[dict[Standing, dict[Standing, LifecycleKind]]] = {
    NEW: {SCHEDULED: "announced", STARTED: "started", **_ENDS},
    SCHEDULED: {SCHEDULED: "updated", STARTED: "started", **_ENDS},
    STARTED: {STARTED: "updated", **_ENDS, CANCELED: "finished"},  # of a wave: the rest of it was canceled
    CANCELED: {STARTED: "started", FINISHED: "finished"},  # what looked canceled was not
    ENDED: {STARTED: "started", FINISHED: "finished", CANCELED: "canceled"},  # learnt late
    FINISHED: {},
}
"""From what was notified last to how it stands now: what to notify of. Of other pairs nobody is notified."""

REPORTED: Final = [name for name in Event.__struct_fields__ if name in Report.__struct_fields__]  # of an event
MAX_REPORTERS: Final = 256 * 1024  # bytes of the names of the VMs that report one event: a scale set has 1,000 VMs


class Measures(Struct, frozen=True):
    """What one affected VM measured, in seconds; ``None`` where it did not."""

    notice: float | None = None
    interruption: float | None = None


class Story(Struct, array_like=True):
    """One event, as the VMs of one group report it. Mutable: only ``add``, ``Partition`` and ``Waves`` change it."""

    event: Event  # the newest content that was reported
    place: Place  # what its VMs have in common, by those that were heard from
    first_seen: datetime  # by the first VM
    group: str  # subscription and resource group, as ``Place.group`` writes them
    sender: str  # the VM that reported it first, with its group as it was known then
    newest: tuple[datetime, str, str]  # when the content was seen, by which VM, and with which change
    dated: tuple[datetime, str, str]  # the same of NotBefore
    claim: Standing = NEW  # the strongest
    standing: Standing = NEW  # how the event stands by all reports
    reported: dict[str, int] = {}  # VM -> its last word of the end: see ``_last_word``
    room: int = MAX_REPORTERS  # bytes: for the names of more VMs
    measured: dict[str, Measures] = {}  # of the VMs that it affects
    started: datetime | None = None  # the first start
    over: datetime | None = None  # the last VM's word that it is over
    not_before: datetime | None = None  # the last one known
    nth: int = 0  # how often an event of this id was over before
    began: datetime | None = None  # of an event that came back: when it was listed again
    given_up: bool = False  # the limit has passed: over as far as is known
    heard_at: float = 0.0  # when the hub took in what was said of it last, in Unix seconds
    exercise: bool = False
    late: bool = False  # it was over as far as was known, and what is learnt now corrects that
    labels: tuple[str, ...] = ()  # the wave that it is in; it stays there, whatever becomes of it
    named: bool = False  # a notification of its wave has named it
    shares_id: bool = False  # an event of another resource group has its EventId: they are not mixed up
    by_affected: bool = False  # `place` is that of affected VMs; until one is heard from, of the others

    @classmethod
    def begin(cls, report: Report) -> "Story":
        """A story that the first report of an event begins; it is to be added as well."""
        when = (report.time, report.vm, report.change_id)
        event, group = event_of(report), report.place.group
        sender = group + report.vm
        return cls(event, Place(), report.first_seen, group, sender, when, when, exercise=report.exercise)

    @property
    def key(self) -> str:
        """It is known by its resource group and EventId."""
        return self.group + self.event.key

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
        vm = report.vm
        before = self.reported.get(vm)
        if before is None:
            self.room -= len(vm.encode())
            if self.room < 0:
                return False
        self.reported[intern(vm)] = word = _last_word(before or 0, report)  # many stories have the same VMs
        if word != before:
            last = max(self.reported.values())
            self.over = from_unix(last / 1000) if last > 0 else None
        self.claim = max(self.claim, STRENGTH[report.change])
        changed = self._take_content(report)
        stood, self.standing = self.standing, self._stands()
        return changed or stood is not self.standing

    def locate(self, place: Place, *, affected: bool) -> None:
        """Keep what this VM has in common with those before it; affected VMs count before others."""
        if self.place == Place() or (affected and not self.by_affected):
            self.place, self.by_affected = place, affected
        elif affected == self.by_affected:
            self.place = self.place.shared(place)

    def give_up(self) -> None:
        """The limit has passed: it is over as far as is known."""
        self.given_up = True
        self.standing = self._stands()

    def _stands(self) -> Standing:
        if self.given_up or self._is_over():
            return ENDS_AS.get(self.claim, self.claim)
        return STARTED if self.claim >= STARTED else SCHEDULED

    def _is_over(self) -> bool:
        """All affected VMs that are heard from say so; where none of them is, all others."""
        reported = self.reported
        if all(word > 0 for word in reported.values()):
            return True
        if self.event.event_type in VANISHING:
            return any(word > 0 for word in reported.values())
        heard = [reported[name] > 0 for name in self.event.vms if name in reported]
        return bool(heard) and all(heard)

    def _take_content(self, report: Report) -> bool:
        """Take over times, measurements and content; returns whether the content is another one."""
        self.first_seen = min(self.first_seen, report.first_seen)
        if report.change == "started":
            self.started = min(self.started or report.time, report.time)
        affected = report.scope != "peer"
        self.locate(report.place, affected=affected)
        if affected:
            old = self.measured.get(report.vm, Measures())
            notice = [one for one in (old.notice, report.notice) if one is not None]
            gaps = [one for one in (old.interruption, report.interruption) if one is not None]
            self.measured[report.vm] = Measures(min(notice, default=None), max(gaps, default=None))
        when = (report.time, report.vm, report.change_id)
        if report.not_before is not None and (self.not_before is None or when >= self.dated):
            self.not_before, self.dated = report.not_before, when
        if when < self.newest:
            return False
        self.newest = when
        before, self.event = self.event, event_of(report)
        if before == self.event:
            return False
        if set(before.vms) != set(self.event.vms):
            self.by_affected = False  # other VMs are affected now
        return content(self.event) != content(before) and STRENGTH[report.change] not in OVER


def _last_word(before: int, report: Report) -> int:
    """What a VM said last of the end, by its own clock: that it is over, or, negative, that it lists the event again.

    In Unix milliseconds, as records have them; 0: neither. What is repeated, or comes late, is no newer word.
    """
    when = round(report.time.timestamp() * 1000)
    if report.reason == "came_back":
        word = -when
    elif STRENGTH[report.change] in OVER:
        word = when
    else:
        return before
    return max(before, word, key=lambda one: (abs(one), one))


def event_of(report: Report) -> Event:
    """The event as a report has it."""
    return Event(**{name: getattr(report, name) for name in REPORTED})


def content(event: Event) -> str:
    """What of an event is worth an update: all but its status, which is a matter of the standing."""
    return replace(event, event_status="").digest()


def from_unix(seconds: float) -> datetime:
    """Unix seconds as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
