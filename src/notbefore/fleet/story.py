"""``Story``: one event, merged from the reports of many VMs. Pure.

The result depends neither on the order of the reports nor on their repetition: the strongest claim
counts (``STRENGTH``). People are notified once of each step between two standings (``STEPS``).
"""

from datetime import UTC, datetime
from enum import IntEnum
from sys import intern
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import LifecycleKind, Outcome
from notbefore.core.document import Event
from notbefore.core.event_types import event_type_of
from notbefore.fleet.hub_records import Place, Report


class Standing(IntEnum):
    """The state of an event. If two claims differ, the greater one counts: see ``STRENGTH``."""

    NEW = 0  # nothing is known about it, or no one was notified of it
    SCHEDULED = 1
    ENDED = 2  # gone, and no VM saw how
    CANCELED = 3
    STARTED = 4
    FINISHED = 5


STRENGTH: Final[dict[LifecycleKind, Standing]] = {
    "announced": Standing.SCHEDULED,
    "updated": Standing.SCHEDULED,
    "ended": Standing.ENDED,  # this VM saw no end: one that did knows better
    "canceled": Standing.CANCELED,  # it looks canceled: a VM that saw the start knows better
    "started": Standing.STARTED,
    "finished": Standing.FINISHED,  # it had started, and is over
}
"""Change -> the claim that a VM makes by it. Of two claims, that of the VM that saw more counts."""

OUTCOMES: Final[dict[Standing, Outcome]] = {
    Standing.ENDED: "unknown",
    Standing.CANCELED: "canceled",
    Standing.FINISHED: "finished",
}
OVER: Final = frozenset(OUTCOMES)

ENDS_AS: Final = {Standing.SCHEDULED: Standing.ENDED, Standing.STARTED: Standing.FINISHED}
"""The standing of an event that is over although no VM claims an end.

After Started, Azure has only one next step.
"""

_ENDS: Final[dict[Standing, LifecycleKind]] = {
    Standing.CANCELED: "canceled",
    Standing.FINISHED: "finished",
    Standing.ENDED: "ended",
}
STEPS: Final[dict[Standing, dict[Standing, LifecycleKind]]] = {
    Standing.NEW: {Standing.SCHEDULED: "announced", Standing.STARTED: "started", **_ENDS},
    Standing.SCHEDULED: {Standing.SCHEDULED: "updated", Standing.STARTED: "started", **_ENDS},
    # only a wave goes from started to canceled: the rest of its events were canceled
    Standing.STARTED: {Standing.STARTED: "updated", **_ENDS, Standing.CANCELED: "finished"},
    # it looked canceled, and was not
    Standing.CANCELED: {Standing.STARTED: "started", Standing.FINISHED: "finished"},
    # a VM reported its end late
    Standing.ENDED: {
        Standing.STARTED: "started",
        Standing.FINISHED: "finished",
        Standing.CANCELED: "canceled",
    },
    Standing.FINISHED: {},
}
"""Last notified standing -> standing now -> the change to notify of. Other pairs have none."""

DETAILS: Final = ("resources", "description", "event_source", "duration")
"""The fields of an event that a VM may not know: older api-versions do not have all of them."""

Source = tuple[datetime, str, str]
"""Where a value is from: the time, the VM and the change id of a report. The greatest is newest."""

# bytes of the names of the VMs that report one event: a scale set has 1,000 VMs
MAX_REPORTERS: Final = 256 * 1024


class Measures(Struct, frozen=True):
    """The seconds that one affected VM measured; ``None`` if it did not."""

    notice: float | None = None
    interruption: float | None = None


class Story(Struct, array_like=True):
    """One event, as the VMs of one group report it.

    Mutable: only ``add``, ``Partition`` and ``Waves`` change it.
    """

    event: Event  # the newest content that was reported
    place: Place  # what its VMs have in common, as far as they were heard from
    first_seen: datetime  # by the first VM that saw it
    group: str  # subscription and resource group, as ``Place.group`` writes them
    sender: str  # the VM that reported it first, after its group
    newest: Source  # where the content is from
    dated: Source  # the same for NotBefore
    claim: Standing = Standing.NEW  # the strongest claim
    standing: Standing = Standing.NEW  # the event's state by all reports
    reported: dict[str, int] = {}  # VM -> its last word about the end: see ``_last_word``
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
    shares_id: bool = False  # another resource group's event had its EventId first
    by_affected: bool = False  # ``place`` is that of affected VMs, no longer that of others
    older: dict[str, Source] = {}  # of ``DETAILS``: where those are from that ``newest`` has not
    gone: set[str] = set()  # VMs that have vanished or fallen silent: their last words do not count
    joined: set[str] = set()  # affected VMs, in one case, that no notification has named here

    @classmethod
    def begin(cls, report: Report) -> "Story":
        """Begin a story with the first report of an event; the caller must also ``add`` it."""
        group = report.place.group
        source = _source_of(report)
        return cls(
            event=_event_of(report),
            place=Place(),
            first_seen=report.first_seen,
            group=group,
            sender=group + report.vm,
            newest=source,
            dated=source,
            exercise=report.exercise,
        )

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
        latest = max(self.heard_at, self.first_seen.timestamp())
        if self.not_before is not None:
            latest = max(latest, self.not_before.timestamp())
        if self.started is not None:
            latest = max(latest, self.started.timestamp())
        return latest + limit

    def add(self, report: Report) -> bool:
        """Apply a report; return whether it has changed the event's standing or content."""
        if not self._reserve_room(report.vm):
            return False

        self._take_word(report)
        self._take_claim(report)
        self._take_times(report)
        self._take_place(report)
        self._take_measures(report)
        content_changed = self._take_content(report)
        self.gone.discard(report.vm)

        standing_changed = self._judge_again()
        return content_changed or standing_changed

    def leave_out(self, vms: set[str]) -> bool:
        """Leave out these VMs, and no others; return whether the standing has changed."""
        self.gone = vms
        return self._judge_again()

    def locate(self, place: Place, *, affected: bool) -> None:
        """Keep what this VM's place has in common with the places before.

        Once the place of an affected VM is known, only those of affected VMs count.
        """
        place = place.completed_by(self.place)
        self.place = self.place.completed_by(place)
        is_first = self.place == Place()
        is_first_affected = affected and not self.by_affected
        if is_first or is_first_affected:
            self.place = place
            self.by_affected = affected
        elif affected == self.by_affected:
            self.place = self.place.shared(place)

    def give_up(self) -> None:
        """End the event, as its limit has passed: it is over as far as is known."""
        self.given_up = True
        self._judge_again()

    # ---- judging the event

    def _judge_again(self) -> bool:
        """Judge the event by all reports so far; return whether its standing has changed."""
        standing_before = self.standing
        is_over = self._is_over()
        if is_over:
            self.given_up = False  # the VMs know it
        self.standing = self._judge(is_over=is_over)
        return self.standing is not standing_before

    def _judge(self, *, is_over: bool) -> Standing:
        # an event that is over has the strongest end that a VM claimed, else the likely one
        if is_over or self.given_up:
            return ENDS_AS.get(self.claim, self.claim)

        # a VM that counts still lists it: a claim of the end proves no more than the start
        if self.claim >= Standing.STARTED:
            return Standing.STARTED

        # a VM that saw it canceled may have lost sight of it: the others still list it
        return Standing.SCHEDULED

    def _is_over(self) -> bool:
        """Whether the VMs that count have reported the end.

        A VM that is gone without a word about the end does not count.
        """
        affected_words: list[int] = []
        for vm in self.event.vms:
            word = self.reported.get(vm)
            if word is not None and (word > 0 or vm not in self.gone):
                affected_words.append(word)

        # affected VMs know better than the others, and all of them have to agree
        if affected_words and all(word > 0 for word in affected_words):
            return True

        # no affected VM is left to report, or the event deletes them: all others have to agree
        vanishes = event_type_of(self.event.event_type).vanishes
        if vanishes or not affected_words:
            return self._others_agree()
        return False

    def _others_agree(self) -> bool:
        """Whether VMs that are not affected have reported the end, and none still lists it."""
        affected = set(self.event.vms)
        has_end = False
        for vm, word in self.reported.items():
            if vm in affected:
                continue
            if word > 0:
                has_end = True
            elif vm not in self.gone:
                return False
        return has_end

    # ---- the parts of a report

    def _reserve_room(self, vm: str) -> bool:
        """Reserve room for the name of a VM that reports; return whether there is enough."""
        if vm in self.reported:
            return True
        self.room -= len(vm.encode())
        return self.room >= 0

    def _take_word(self, report: Report) -> None:
        before = self.reported.get(report.vm)
        word = _last_word(before or 0, report)
        self.reported[intern(report.vm)] = word  # many stories have the same VMs
        if word == before:
            return

        last_end = max(self.reported.values())
        if last_end > 0:
            self.over = from_unix(last_end / 1000)
        else:
            self.over = None

    def _take_claim(self, report: Report) -> None:
        claim = STRENGTH[report.change]
        self.claim = max(self.claim, claim)
        if claim not in OVER:
            self.given_up = False  # this VM still lists the event

    def _take_times(self, report: Report) -> None:
        self.first_seen = min(self.first_seen, report.first_seen)
        if report.change == "started":
            self.started = min(self.started or report.time, report.time)

        source = _source_of(report)
        if report.not_before is None:
            return
        if self.not_before is None or source >= self.dated:
            self.not_before = report.not_before
            self.dated = source

    def _take_place(self, report: Report) -> None:
        self.locate(report.place, affected=_is_affected(report))

    def _take_measures(self, report: Report) -> None:
        """Keep the shortest notice and the longest interruption that an affected VM measured."""
        if not _is_affected(report):
            return

        measures = self.measured.get(report.vm, Measures())
        notices = [measures.notice, report.notice_seconds]
        interruptions = [measures.interruption, report.interruption_seconds]
        self.measured[report.vm] = Measures(
            notice=min((notice for notice in notices if notice is not None), default=None),
            interruption=max((gap for gap in interruptions if gap is not None), default=None),
        )

    def _take_content(self, report: Report) -> bool:
        """Keep the newest content; return whether it differs in a way that is worth an update.

        A missing value never replaces a known one: the VMs may use different api-versions.
        """
        source = _source_of(report)
        before = self.event
        reported = _event_of(report)

        details = self._newest_details(reported, source)
        if source >= self.newest:
            self.newest = source
            self.event = replace(reported, not_before=self.not_before, **details)
        else:
            self.event = replace(before, not_before=self.not_before, **details)
        if self.event == before:
            return False

        vms_before = set(before.vms)
        vms_now = set(self.event.vms)
        if vms_now != vms_before:
            self.by_affected = False  # other VMs are affected now
            self.joined = (self.joined | (vms_now - vms_before)) & vms_now
        if STRENGTH[report.change] in OVER:
            return False  # the step itself is the news

        if report.change != "updated":
            before = _completed(before, self.event)
        return content(self.event) != content(before)

    def _newest_details(self, reported: Event, source: Source) -> dict[str, Any]:
        """Return the newest known value of each of ``DETAILS``; note where it is from."""
        details: dict[str, Any] = {}
        for name in DETAILS:
            known = getattr(self.event, name)
            value = getattr(reported, name)
            known_source = self.older.get(name, self.newest)
            is_newer = _is_missing(known) or source >= known_source
            if not _is_missing(value) and is_newer:
                details[name] = value
                value_source = source
            else:
                details[name] = known
                value_source = known_source

            if _is_missing(details[name]) or value_source >= max(source, self.newest):
                self.older.pop(name, None)
            else:
                self.older[name] = value_source
        return details


def _is_missing(value: object) -> bool:
    """Whether a report does not know a detail of its event."""
    return value is None or value in ("", ())


def _completed(event: Event, other: Event) -> Event:
    """Return an event with the details of another one where it has none."""
    details = {name: getattr(event, name) for name in DETAILS}
    missing = [name for name, value in details.items() if _is_missing(value)]
    return replace(event, **{name: getattr(other, name) for name in missing})


def _is_affected(report: Report) -> bool:
    """Whether the event affects the VM that reports it, as far as that VM knows."""
    return report.scope != "peer"


def _source_of(report: Report) -> Source:
    return report.time, report.vm, report.change_id


def _event_of(report: Report) -> Event:
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


def _last_word(before: int, report: Report) -> int:
    """Return when a VM last reported the end of the event, or, negative, that it lists it again.

    In Unix milliseconds of its clock, as in records; 0: neither. A repeated or late report changes
    nothing.
    """
    reported_at = round(report.time.timestamp() * 1000)
    if report.reason == "came_back":
        word = -reported_at
    elif STRENGTH[report.change] in OVER:
        word = reported_at
    else:
        return before

    # the later word counts; of two in one millisecond, the end
    if abs(word) > abs(before):
        return word
    if abs(word) == abs(before):
        return max(word, before)
    return before


def content(event: Event) -> str:
    """Return a digest of the content that is worth an update.

    The status does not count: the standing replaces it.
    """
    return replace(event, event_status="").digest()


def from_unix(seconds: float) -> datetime:
    """Convert Unix seconds to a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
