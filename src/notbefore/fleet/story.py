"""``Story``: one event, merged from the reports of many VMs and of Azure itself. Pure.

The result depends neither on the order of the reports nor on their repetition: the strongest claim
counts (``STRENGTH``). Azure is another reporter, but no VM: its word about the end counts more than
what VMs list. People are notified once of each step between two standings (``STEPS``).
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from enum import IntEnum
from sys import intern
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import LifecycleKind, Outcome
from notbefore.core.document import STARTED, Event
from notbefore.core.event_types import event_type_of
from notbefore.fleet.azure_messages import CANCELED, COMPLETED, AzureReport, AzureStatus
from notbefore.fleet.hub_records import Place, Report


class Standing(IntEnum):
    """The state of an event. If two claims differ, the greater one counts: see ``STRENGTH``."""

    NEW = 0  # nothing is known about the event, or no one was notified of it
    SCHEDULED = 1
    ENDED = 2  # gone, and no VM saw how
    CANCELED = 3
    STARTED = 4
    FINISHED = 5


STRENGTH: Final[dict[LifecycleKind, Standing]] = {
    "announced": Standing.SCHEDULED,
    "updated": Standing.SCHEDULED,
    "ended": Standing.ENDED,  # this VM saw no end: a VM that saw it knows better
    "canceled": Standing.CANCELED,  # it looks canceled: a VM that saw the start knows better
    "started": Standing.STARTED,
    "finished": Standing.FINISHED,  # it had started, and is over
}
"""Change -> the claim that a VM makes by it. The claim of the VM that saw more counts."""

AZURE_CLAIMS: Final[dict[AzureStatus, Standing]] = {
    "Scheduled": Standing.SCHEDULED,
    "Started": Standing.STARTED,
    "Completed": Standing.FINISHED,
    "Canceled": Standing.CANCELED,
}
"""Azure's status -> the claim that Azure makes by it."""

STATUS_ORDER: Final[tuple[AzureStatus, ...]] = ("Scheduled", "Started", "Canceled", "Completed")
"""Azure's statuses, the most advanced one last: an event never goes back."""

OUTCOME_OF: Final[dict[Standing, Outcome]] = {
    Standing.ENDED: "unknown",
    Standing.CANCELED: "canceled",
    Standing.FINISHED: "finished",
}
OVER: Final = frozenset(OUTCOME_OF)

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
    # only a wave is canceled after its start: the rest of its events were canceled
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

WORDING: Final = ("description", "event_source", "duration")
"""The fields of an event that are no news from Azure: it may word them differently than VMs."""

DETAILS: Final = ("resources", *WORDING)
"""The fields of an event that a VM may not know: older api-versions do not have all of them."""

EndedBy = Literal["azure", "vms", "both", "nobody"]
"""Who knows how an event has ended."""

Source = tuple[datetime, str, str]
"""Where a value is from: the time, the VM and the change id of a report. The greatest is newest."""

BEFORE_ALL_VMS: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""The time in the ``Source`` of Azure's wording: that of any VM is newer."""

# bytes of the names of the VMs that report one event: a scale set has 1,000 VMs
MAX_REPORTERS: Final = 256 * 1024


class Measures(Struct, frozen=True):
    """The seconds that one affected VM measured; ``None`` if it did not."""

    notice: float | None = None
    interruption: float | None = None


class AzureWord(Struct, array_like=True, frozen=True):
    """All that Azure itself has said about an event."""

    status: AzureStatus  # the most advanced one so far, by ``STATUS_ORDER``
    resource_id: str  # of the VM, the scale set or the availability set
    over: datetime | None = None  # when Azure said that it is over
    # the seconds between its first message and NotBefore; 0 if it had started by then
    notice: float | None = None

    @property
    def end(self) -> Standing | None:
        """The end that Azure has reported."""
        if self.status == COMPLETED:
            return Standing.FINISHED
        if self.status == CANCELED:
            return Standing.CANCELED
        return None

    def followed_by(self, report: AzureReport, time: datetime) -> "AzureWord":
        """Return what Azure has said together with another report, in whichever order."""
        over = self.over
        if AZURE_CLAIMS[report.status] in OVER:
            over = min(over or time, time)
        statuses = (self.status, report.status)
        return replace(self, status=max(statuses, key=STATUS_ORDER.index), over=over)


class Story(Struct, array_like=True):
    """One event, as Azure and the VMs of one group report it.

    Mutable: only ``add``, ``add_azure``, ``Partition`` and ``Waves`` change it.
    """

    event: Event  # the newest content that was reported
    place: Place  # what its VMs have in common, as far as they were heard from
    first_seen: datetime  # by the first VM that saw it, or by Azure
    group: str  # subscription and resource group, as ``Place.group`` writes them
    sender: str  # the VM that reported it first, after its group; empty: Azure did
    newest: Source  # where the content is from
    dated: Source  # the same for NotBefore
    claim: Standing = Standing.NEW  # the strongest claim
    standing: Standing = Standing.NEW  # the event's state by all reports
    reported: dict[str, int] = {}  # VM -> its last word about the end: see ``_last_word``
    room: int = MAX_REPORTERS  # bytes left for the names of more VMs
    measured: dict[str, Measures] = {}  # by affected VM
    started: datetime | None = None  # the first start
    over: datetime | None = None  # the last VM's report of the end; without one, Azure's
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
    # where the values of ``DETAILS`` are from that are older than ``newest``
    older: dict[str, Source] = {}
    # VMs that have vanished or fallen silent: what they reported about the end does not count
    gone: set[str] = set()
    joined: set[str] = set()  # affected VMs, in one case, that no notification has named here
    azure: AzureWord | None = None
    by_azure: bool = False  # ``place`` is Azure's: the place of any VM says more
    was_over: bool = False  # VMs reported its end before it was closed, and then opened again

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

    @classmethod
    def begin_with_azure(cls, report: AzureReport, time: datetime) -> "Story":
        """Begin a story with Azure's first report; the caller must also ``add_azure`` it."""
        source = (BEFORE_ALL_VMS, "", "")
        return cls(
            event=report.event,
            place=Place(),
            first_seen=time,
            group=report.place.group,
            sender="",
            newest=source,
            dated=source,
            older=dict.fromkeys(WORDING, source),
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

        was_awaiting = self.awaits_reports
        self._take_word(report)
        self._take_claim(report)
        self._take_times(report)
        self._take_place(report)
        self._take_measures(report)
        content_changed = self._take_content(report)
        self.gone.discard(report.vm)

        standing_changed = self._judge_again()
        return content_changed or standing_changed or was_awaiting is not self.awaits_reports

    def add_azure(self, report: AzureReport, time: datetime, now: float) -> bool:
        """Apply a report of Azure; return whether it has changed the standing or content.

        ``time``: when Azure sent it. ``now``: when the hub accepted it, in Unix seconds.
        """
        was_awaiting = self.awaits_reports
        if self.azure is None:
            self.azure = AzureWord(
                status=report.status,
                resource_id=report.resource_id,
                notice=_notice_of(report, now),
            )
        self.azure = self.azure.followed_by(report, time)
        claim = AZURE_CLAIMS[report.status]
        self.claim = max(self.claim, claim)
        if claim not in OVER:
            self.given_up = False  # unless it is overdue by this report too

        self.first_seen = min(self.first_seen, time)
        if report.status == STARTED:
            self.started = min(self.started or time, time)
        if self.place == Place():
            self.place = report.place
            self.by_azure = True
        content_changed = self._take_content_of_azure(report, time)
        self._find_over()

        standing_changed = self._judge_again()
        return content_changed or standing_changed or was_awaiting is not self.awaits_reports

    def leave_out(self, vms: set[str]) -> bool:
        """Leave out exactly these VMs; return whether the standing has changed."""
        self.gone = vms
        return self._judge_again()

    def locate(self, place: Place, *, affected: bool) -> None:
        """Keep what this VM's place has in common with the places before.

        Once the place of an affected VM is known, only those of affected VMs count.
        """
        place = place.completed_by(self.place)
        if self.by_azure:
            self.place = Place()
            self.by_azure = False
        self.place = self.place.completed_by(place)
        is_first = self.place == Place()
        is_first_affected = affected and not self.by_affected
        if is_first or is_first_affected:
            self.place = place
            self.by_affected = affected
        elif affected == self.by_affected:
            self.place = self.place.shared(place)

    @property
    def awaits_reports(self) -> bool:
        """Whether the event is over, and a report about its end is still expected.

        After Azure's report, those of the VMs bring the interruption. If the VMs do not know how
        the event ended, Azure's report may say it.
        """
        if self.azure is None or self.given_up:
            return False
        if self.azure.end is None:
            return self.standing is Standing.ENDED
        return any(word <= 0 and vm not in self.gone for vm, word in self.reported.items())

    @property
    def is_contradicted(self) -> bool:
        """Whether Azure says that the event was canceled, after its start was seen."""
        if self.azure is None or self.azure.end is not Standing.CANCELED:
            return False
        return self.standing is Standing.FINISHED

    @property
    def ended_by(self) -> EndedBy:
        """Who knows how the event, which is over, has ended."""
        by_azure = self.azure is not None and self.azure.end is not None
        by_vms = self._is_over() and self.standing is not Standing.ENDED
        if self.was_over:  # VMs did not know how: Azure has said more since
            return "azure"
        if by_azure and by_vms:
            return "both"
        if by_azure:
            return "azure"
        if by_vms:
            return "vms"
        return "nobody"

    def give_up(self) -> None:
        """End the event because its limit has passed: no one knows more about it."""
        self.given_up = True
        self._judge_again()

    # ---- judging the event

    def _judge_again(self) -> bool:
        """Judge the event by all reports so far; return whether its standing has changed."""
        standing_before = self.standing
        has_azure_end = self.azure is not None and self.azure.end is not None
        is_over = has_azure_end or self._is_over()
        if is_over:
            self.given_up = False  # Azure or the VMs know it
        self.standing = self._judge(is_over=is_over)
        return self.standing is not standing_before

    def _judge(self, *, is_over: bool) -> Standing:
        # an event that is over has the strongest end that was claimed, else the likely one
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
        if self.was_over:
            return True

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

        self._find_over()

    def _find_over(self) -> None:
        """Find when the event was over: by the VMs, or by Azure if none has reported it."""
        last_end = max(self.reported.values(), default=0)
        if last_end > 0:
            self.over = from_unix(last_end / 1000)
        elif self.azure is not None:
            self.over = self.azure.over
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

        self._take_not_before(report.not_before, _source_of(report))

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
        worded_by_azure = [name for name in WORDING if self._source_of(name)[0] == BEFORE_ALL_VMS]

        details = self._newest_details(reported, dict.fromkeys(DETAILS, source), source)
        if source >= self.newest:
            self.newest = source
            self.event = replace(reported, not_before=self.not_before, **details)
        else:
            self.event = replace(before, not_before=self.not_before, **details)
        if self.event == before:
            return False

        self._note_vms(before)
        if STRENGTH[report.change] in OVER:
            return False  # the step itself is the news

        if report.change != "updated":
            before = _completed(before, self.event)
        before = _with_details(before, self.event, worded_by_azure)
        return self._is_update(before)

    def _take_content_of_azure(self, report: AzureReport, time: datetime) -> bool:
        """Keep Azure's newest content; return whether it differs in a way that is worth an update.

        Azure's wording counts only until a VM has reported one, and is no news.
        """
        source = (time, "", report.status)
        wording_source = (BEFORE_ALL_VMS, "", f"{time.isoformat()} {report.status}")
        sources = dict.fromkeys(DETAILS, source) | dict.fromkeys(WORDING, wording_source)
        before = self.event
        reported = report.event

        self._take_not_before(reported.not_before, source)
        details = self._newest_details(reported, sources, source)
        event = before
        if source >= self.newest:
            self.newest = source
            event = replace(event, event_type=reported.event_type)
            if report.status != CANCELED:
                event = replace(event, event_status=reported.event_status)
        self.event = replace(event, not_before=self.not_before, **details)

        self._note_vms(before)
        if AZURE_CLAIMS[report.status] in OVER:
            return False  # the step itself is the news
        before = _with_details(_completed(before, self.event), self.event, WORDING)
        return self._is_update(before)

    def _take_not_before(self, not_before: datetime | None, source: Source) -> None:
        """Keep the newest NotBefore that is known."""
        if not_before is None:
            return
        if self.not_before is None or source >= self.dated:
            self.not_before = not_before
            self.dated = source

    def _newest_details(
        self, reported: Event, sources: Mapping[str, Source], source: Source
    ) -> dict[str, Any]:
        """Return the newest known value of each of ``DETAILS``, and note where it is from.

        ``sources``: where each of the reported values is from. ``source``: where the report itself
        is from.
        """
        newest = max(source, self.newest)
        details: dict[str, Any] = {}
        older: dict[str, Source] = {}
        for name in DETAILS:
            value = getattr(self.event, name)
            value_source = self._source_of(name)
            reported_value = getattr(reported, name)
            is_newer = _is_missing(value) or sources[name] >= value_source
            if is_newer and not _is_missing(reported_value):
                value = reported_value
                value_source = sources[name]

            details[name] = value
            if value_source < newest and not _is_missing(value):
                older[name] = value_source
        self.older = older
        return details

    def _source_of(self, name: str) -> Source:
        """Return where the value of one of ``DETAILS`` is from."""
        return self.older.get(name, self.newest)

    def _is_update(self, before: Event) -> bool:
        """Whether the event differs from what it was before in a way that is worth an update."""
        has_started = self.claim >= Standing.STARTED
        if has_started and before.not_before is None:
            before = replace(before, not_before=self.not_before)  # too late to prepare for it
        return content(self.event) != content(before)

    def _note_vms(self, before: Event) -> None:
        """Note which VMs were not affected by the event as it was before."""
        vms_before = set(before.vms)
        vms_now = set(self.event.vms)
        if vms_now != vms_before:
            self.by_affected = False  # other VMs are affected now
            self.joined = (self.joined | (vms_now - vms_before)) & vms_now


def _is_missing(value: object) -> bool:
    """Whether a report does not know a detail of its event."""
    return value is None or value in ("", ())


def _completed(event: Event, other: Event) -> Event:
    """Return an event with the details of another one where it has none."""
    details = {name: getattr(event, name) for name in DETAILS}
    missing = [name for name, value in details.items() if _is_missing(value)]
    return _with_details(event, other, missing)


def _with_details(event: Event, other: Event, names: Collection[str]) -> Event:
    """Return an event with these details of another one."""
    return replace(event, **{name: getattr(other, name) for name in names})


def _notice_of(report: AzureReport, now: float) -> float | None:
    """Return the seconds of notice in Azure's first report; ``None`` if it names no time."""
    if report.status in (STARTED, COMPLETED):
        return 0.0
    if report.event.not_before is None:
        return None
    return max(0.0, report.event.not_before.timestamp() - now)


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
