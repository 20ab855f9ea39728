"""``Story``: one event, merged from the reports of many VMs. Pure.

The result does not depend on the order of the reports, nor on how often each one comes: the strongest claim counts
(``STRENGTH``). People are notified of each step between two standings (``STEPS``) once.
"""

from datetime import UTC, datetime
from enum import IntEnum
from sys import intern
from typing import Final

from msgspec import Struct, convert
from msgspec.structs import replace

from notbefore.core.change import LifecycleKind, Outcome
from notbefore.core.document import VANISHING, Event
from notbefore.fleet.hub_records import Place, Report


class Standing(IntEnum):
    """The state of an event. If two claims differ, the greater one counts: see ``STRENGTH``."""

    NEW = 0  # nothing is known about it, or nobody was notified of it
    SCHEDULED = 1
    ENDED = 2  # gone, and nobody saw how
    CANCELED = 3
    STARTED = 4
    FINISHED = 5


NEW, SCHEDULED, ENDED, CANCELED, STARTED, FINISHED = Standing

STRENGTH: Final[dict[LifecycleKind, Standing]] = {
    "announced": SCHEDULED,
    "updated": SCHEDULED,
    "ended": ENDED,  # nobody saw how: a VM that did see it knows better
    "canceled": CANCELED,  # it looks canceled: a VM that saw the start knows better
    "started": STARTED,
    "finished": FINISHED,  # it had started, and is over
}
"""Change -> what the VM claims by it. If claims contradict each other, that of the VM that has seen more counts."""

OUTCOMES: Final[dict[Standing, Outcome]] = {ENDED: "unknown", CANCELED: "canceled", FINISHED: "finished"}
OVER: Final = frozenset(OUTCOMES)

ENDS_AS: Final = {SCHEDULED: ENDED, STARTED: FINISHED}
"""The standing of an event that is over, if its claim is not an end. After Started, Azure has only one next step."""

_ENDS: Final[dict[Standing, LifecycleKind]] = {CANCELED: "canceled", FINISHED: "finished", ENDED: "ended"}
STEPS: Final[dict[Standing, dict[Standing, LifecycleKind]]] = {
    NEW: {SCHEDULED: "announced", STARTED: "started", **_ENDS},
    SCHEDULED: {SCHEDULED: "updated", STARTED: "started", **_ENDS},
    STARTED: {STARTED: "updated", **_ENDS, CANCELED: "finished"},  # only of a wave: the rest of it was canceled
    CANCELED: {STARTED: "started", FINISHED: "finished"},  # what looked canceled was not
    ENDED: {STARTED: "started", FINISHED: "finished", CANCELED: "canceled"},  # reported late
    FINISHED: {},
}
"""Last notified standing -> standing now -> the change to notify of. There is none for other pairs."""

MAX_REPORTERS: Final = 256 * 1024  # bytes of the names of the VMs that report one event: a scale set has 1,000 VMs


class Measures(Struct, frozen=True):
    """What one affected VM measured, in seconds; ``None`` if it did not."""

    notice: float | None = None
    interruption: float | None = None


class Story(Struct, array_like=True):
    """One event, as the VMs of one group report it. Mutable: only ``add``, ``Partition`` and ``Waves`` change it."""

    event: Event  # the newest content that was reported
    place: Place  # what its VMs have in common, as far as they were heard from
    first_seen: datetime  # by the first VM that saw it
    group: str  # subscription and resource group, as ``Place.group`` writes them
    sender: str  # the VM that reported it first, after its group
    newest: tuple[datetime, str, str]  # where the content is from: time, VM and change id
    dated: tuple[datetime, str, str]  # the same for NotBefore
    claim: Standing = NEW  # the strongest claim
    standing: Standing = NEW  # the event's state by all reports
    reported: dict[str, int] = {}  # VM -> its last report of the end: see ``_last_word``
    room: int = MAX_REPORTERS  # bytes left for the names of more VMs
    measured: dict[str, Measures] = {}  # by affected VM
    started: datetime | None = None  # the first start
    over: datetime | None = None  # the last VM's report of the end
    not_before: datetime | None = None  # the last one known
    nth: int = 0  # the number of earlier events with this id
    began: datetime | None = None  # if there was an earlier one: when the id was listed again
    given_up: bool = False  # the limit has passed: over as far as is known
    heard_at: float = 0.0  # when the hub accepted the last record about it, in Unix seconds
    exercise: bool = False
    late: bool = False  # it was over as far as was known, and a late report corrects that
    labels: tuple[str, ...] = ()  # the key of its wave, which it never leaves
    named: bool = False  # a notification of its wave has named it
    shares_id: bool = False  # another resource group's event had its EventId first: the two are kept apart
    by_affected: bool = False  # ``place`` is that of affected VMs; until one is heard from, that of others

    @classmethod
    def begin(cls, report: Report) -> "Story":
        """Begin a story with the first report of an event; the caller must also ``add`` the report."""
        when = (report.time, report.vm, report.change_id)
        event, group = convert(report, Event, from_attributes=True), report.place.group
        sender = group + report.vm
        return cls(event, Place(), report.first_seen, group, sender, when, when, exercise=report.exercise)

    @property
    def key(self) -> str:
        """Identifies the event: its resource group and EventId."""
        return self.group + self.event.key

    @property
    def vms(self) -> list[str]:
        """The affected VMs, each after its group."""
        return [self.group + name for name in self.event.vms]

    def deadline(self, limit: float) -> float:
        """Return when to stop waiting for more reports, in Unix seconds; ``limit`` in seconds."""
        times = (self.first_seen, self.not_before, self.started)
        return max(self.heard_at, *(time.timestamp() for time in times if time is not None)) + limit

    def add(self, report: Report) -> bool:
        """Apply a report; return whether it has changed the event's standing or content."""
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
        self.given_up = self.given_up and STRENGTH[report.change] in OVER  # a VM that still lists it knows better
        changed = self._take_content(report)
        stood, self.standing = self.standing, self._stands()
        return changed or stood is not self.standing

    def locate(self, place: Place, *, affected: bool) -> None:
        """Keep what this VM's place has in common with those before. Once one is affected, only affected ones count."""
        if self.place == Place() or (affected and not self.by_affected):
            self.place, self.by_affected = place, affected
        elif affected == self.by_affected:
            self.place = self.place.shared(place)

    def give_up(self) -> None:
        """End the event, as its limit has passed: it is over as far as is known."""
        self.given_up = True
        self.standing = self._stands()

    def _stands(self) -> Standing:
        if self.given_up or self._is_over():
            return ENDS_AS.get(self.claim, self.claim)
        return STARTED if self.claim >= STARTED else SCHEDULED

    def _is_over(self) -> bool:
        """Whether all affected VMs that report it say so, or else all others; for a Preempt or Terminate, any VM."""
        reported = self.reported
        if all(word > 0 for word in reported.values()):
            return True
        if self.event.event_type in VANISHING:
            return any(word > 0 for word in reported.values())
        heard = [reported[name] > 0 for name in self.event.vms if name in reported]
        return bool(heard) and all(heard)

    def _take_content(self, report: Report) -> bool:
        """Apply times, measurements and content; return whether the content has changed."""
        self.first_seen = min(self.first_seen, report.first_seen)
        if report.change == "started":
            self.started = min(self.started or report.time, report.time)
        affected = report.scope != "peer"
        self.locate(report.place, affected=affected)
        if affected:
            old = self.measured.get(report.vm, Measures())
            notice = [one for one in (old.notice, report.notice_seconds) if one is not None]
            gaps = [one for one in (old.interruption, report.interruption_seconds) if one is not None]
            self.measured[report.vm] = Measures(min(notice, default=None), max(gaps, default=None))
        when = (report.time, report.vm, report.change_id)
        if report.not_before is not None and (self.not_before is None or when >= self.dated):
            self.not_before, self.dated = report.not_before, when
        if when < self.newest:
            return False
        self.newest = when
        before, self.event = self.event, convert(report, Event, from_attributes=True)
        if before == self.event:
            return False
        if set(before.vms) != set(self.event.vms):
            self.by_affected = False  # other VMs are affected now
        return content(self.event) != content(before) and STRENGTH[report.change] not in OVER


def _last_word(before: int, report: Report) -> int:
    """Return when a VM last reported that the event is over, or, negative, that it lists the event again.

    In Unix milliseconds of its clock, as in records; 0: neither. A repeated or late report changes nothing.
    """
    when = round(report.time.timestamp() * 1000)
    if report.reason == "came_back":
        word = -when
    elif STRENGTH[report.change] in OVER:
        word = when
    else:
        return before
    return max(before, word, key=lambda one: (abs(one), one))


def content(event: Event) -> str:
    """Return a digest of the content that is worth an update: all but the status, which the standing replaces."""
    return replace(event, event_status="").digest()


def from_unix(seconds: float) -> datetime:
    """Convert Unix seconds to a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
