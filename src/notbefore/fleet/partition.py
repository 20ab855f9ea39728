"""``Partition``: the fold over the log of one partition, and its snapshot. Pure, but it logs.

The same records give the same stories, waves and notifications, whichever instance reads them. A
snapshot contains what is not over yet. It is taken between two records, so its next owner needs no
earlier ones.

The fold works in steps: it ends one overdue event, looks at the VMs of one place, or notifies of
one wave. Before a record is applied, ``add`` takes all steps that are due. They may be many, so a
caller that has other things to do takes them in chunks first (``is_due``, ``advance_chunk``).
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec

from notbefore.core.event_types import event_type_of
from notbefore.core.outbox_rows import OutboxImage
from notbefore.fleet.azure_messages import AzureMessages, AzureReport, read_record
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_records import Beat, PartitionFigures, PoisonError, Report
from notbefore.fleet.notification import Notification
from notbefore.fleet.silence import FORGET_SECONDS, Silence
from notbefore.fleet.snapshot import AzureVm, Closed, Position, Snapshot, Unknown
from notbefore.fleet.story import (
    AZURE_CLAIMS,
    OVER,
    STRENGTH,
    AzureWord,
    Standing,
    Story,
    from_unix,
)
from notbefore.fleet.wave import Wave, by_progress, copied
from notbefore.fleet.waves import Grouping, Waves

CHUNK: Final = 8  # steps that ``advance_chunk`` takes: a step of a large wave needs milliseconds
UNWATCHED: Final = 120.0  # seconds between two looks; after more, the hub was not read meanwhile
MAX_AHEAD: Final = timedelta(seconds=60)  # by which the clock of a VM may be ahead of the hub's
YEAR: Final = timedelta(days=366)  # a time that a VM reports may not be further away
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for overdue events and VMs
CLOSED_SECONDS: Final = 30 * 86_400.0  # an ended event is remembered: a VM may be off so long
MAX_CLOSED: Final = 20_000
MAX_WAITING: Final = 5_000  # events that wait for the history; any more are left out of it
MAX_OPEN: Final = 20_000  # events that are open
MAX_OPEN_OF_GROUP: Final = 5_000  # of one resource group: its VMs can report anything of each other
MAX_OPEN_OF_ONE: Final = 1_000  # of one VM that reported them first
MAX_UNKNOWN: Final = 1_000  # events that are listed in heartbeats and were not reported
UNKNOWN_SECONDS: Final = 3_600.0  # after which such an event is forgotten if no VM lists it
MAX_AZURE_VMS: Final = 5_000  # VMs that only Azure has named
AZURE_VM_SECONDS: Final = 30 * 86_400.0  # after which such a VM is forgotten
NAMES_OF_ONE: Final = 4_096  # characters of VMs' names that count as one more open event

# the results of records: of the messages in one record, the first one counts
RESULTS: Final = ("news", "poison", "late", "known", "skipped")

log = logging.getLogger("notbefore.fleet.partition")


class Events:
    """The open events of a partition, changed by reports.

    ``state``: the snapshot that keeps them, changed in place.
    """

    def __init__(self, grouping: Grouping, state: Snapshot, figures: PartitionFigures) -> None:
        self.waves = Waves(grouping, state.waves)
        self._figures = figures
        self.open: dict[str, Story] = {}  # by resource group and EventId
        self._state = state
        self._limit = grouping.over_after
        self._overdue: deque[Story] = deque()  # found by the last look, and not ended yet
        # stories that the last look has found, with the VMs to leave out of them
        self._to_judge: deque[tuple[Story, set[str]]] = deque()
        self._weights: Counter[str] = Counter()  # of open events, summed by the keys of ``_bounds``
        self._first_keys: dict[str, str] = {}  # EventId -> the key of the first event that has it
        # the key of an event of another partition -> the event key of its wave
        self._elsewhere: dict[str, str] = {}
        # keys of open events that another partition has heard of later: see ``follow``
        self.continued: set[str] = set()
        # those of ``continued`` that are over in the other partition
        self._over_elsewhere: set[str] = set()
        self._restore()

    def _restore(self) -> None:
        stories: list[Story] = []
        for wave in self._state.waves.values():
            stories += wave.stories.values()
        stories.sort(key=_newest_first)

        for story in stories:
            if story.key in self.open or story.key in self._state.closed:
                continue  # the id of an event may be back in another wave
            self._keep(story)
            if not story.shares_id:
                self._first_keys[story.event.key] = story.key

        for key, closed in self._state.closed.items():
            if closed.event_key:
                self._first_keys[closed.event_key] = key
        self._find_elsewhere()

    # ---- records

    def report(self, report: Report, now: float) -> str:
        """Apply a report; return its result (``PartitionFigures``).

        Raises ``PoisonError`` if there is no room.
        """
        key = report.place.group + report.event_id.casefold()
        story = self._open_story(key, now)
        if story is not None and _begins_again(story, report, now):
            wave = self.waves.open[story.labels]
            self._close(story, now, wave.event_key)  # the wave of the earlier event may continue
            story = None

        if story is not None:
            if story.began is not None and report.time < story.began:
                return "late"  # about the earlier event with this id
            return self._add(story, report, now, Standing.NEW)

        self._state.unknown.pop(key, None)
        closed = self._state.closed.get(key)
        if closed is None:
            story = self._begin(report)
            self._figures.first_notices["vm"] += 1
            return self._add(story, report, now, Standing.NEW)
        if not _reopens(closed, report):
            return "late"

        story = self._reopen(closed, report, now)
        if story.began is not None:
            # a new event with the id of the closed one
            return self._add(story, report, now, Standing.NEW)
        return self._add(story, report, now, closed.standing)

    def report_of_azure(self, report: AzureReport, now: float) -> str:
        """Apply a report of Azure; return its result (``PartitionFigures``).

        Raises ``PoisonError`` if there is no room.
        """
        time = from_unix(now)
        if report.time is not None:
            time = min(report.time, time)
        self._note_azure_vms(report, now)

        key = report.place.group + report.event.key
        story = self._open_story(key, now)
        if story is not None:
            return self._add_azure(story, report, time, now, Standing.NEW)

        self._state.unknown.pop(key, None)
        closed = self._state.closed.get(key)
        if closed is None:
            story = self._begin_with_azure(report, time)
            self._figures.first_notices["azure"] += 1
            return self._add_azure(story, report, time, now, Standing.NEW)
        if _is_still_to_come(closed, report, time, now):
            story = self._begin_with_azure(report, time)
            self._begin_next(story, closed, time)
            return self._add_azure(story, report, time, now, Standing.NEW)
        if not _is_corrected(closed, AZURE_CLAIMS[report.status]):
            return "late"

        story = self._begin_with_azure(report, time)
        self._resume(story, closed, time)
        story.was_over = time <= closed.over
        return self._add_azure(story, report, time, now, closed.standing)

    def _note_azure_vms(self, report: AzureReport, now: float) -> None:
        """Note the VMs of a report that have not reported anything themselves."""
        azure_vms = self._state.azure_vms
        for name in report.event.resources:
            key = report.place.group + name.casefold()
            if key in self._state.heard:
                continue
            if key in azure_vms or len(azure_vms) < MAX_AZURE_VMS:
                azure_vms[key] = AzureVm(name, report.place, now)

    def listed(self, group: str, event_ids: Iterable[str], now: float) -> None:
        """Note that a VM lists these events: they are not over."""
        for event_id in event_ids:
            key = group + event_id.casefold()
            story = self._open_story(key, now)
            if story is not None:
                story.heard_at = now
            elif key not in self._state.closed:
                self._note_unknown(key, now)

    def _open_story(self, key: str, now: float) -> Story | None:
        """Return an open event; also one that another partition has had until now."""
        if key in self._elsewhere:
            self._continue_wave(self._elsewhere[key], now)
        return self.open.get(key)

    def _note_unknown(self, key: str, now: float) -> None:
        """Note that a VM lists an event that was not reported."""
        unknown = self._state.unknown.get(key)
        if unknown is not None:
            unknown.last = now
        elif len(self._state.unknown) < MAX_UNKNOWN:
            self._state.unknown[key] = Unknown(first=now, last=now)

    def _add(self, story: Story, report: Report, now: float, notified: Standing) -> str:
        """Add a report to its story. ``notified``: the standing that people know of.

        Raises ``PoisonError`` if there is no room for more affected VMs.
        """
        weight = _weight(story.event.resources)
        if _weight(report.resources) > weight and self._is_full(story):
            raise PoisonError("too_many", f"VMs of open events of {story.sender}")

        story.heard_at = now
        place = story.place
        was_contradicted = story.is_contradicted
        is_news = story.add(report)
        if story.is_contradicted and not was_contradicted:
            self._figures.contradictions += 1
        self._count(story, _weight(story.event.resources) - weight)
        if is_news:
            return self._note_news(story, now, notified)
        if story.place != place:
            self.waves.route(story)
        return "known"

    def _add_azure(
        self, story: Story, report: AzureReport, time: datetime, now: float, notified: Standing
    ) -> str:
        """Add a report of Azure to its story. Parameters and errors are those of ``_add``."""
        weight = _weight(story.event.resources)
        if _weight(report.event.resources) > weight and self._is_full(story):
            raise PoisonError("too_many", f"VMs of open events of {story.group}")

        # a message may come hours late: the event was last heard of when Azure sent it
        story.heard_at = max(story.heard_at, time.timestamp())
        place = story.place
        was_contradicted = story.is_contradicted
        is_news = story.add_azure(report, time, now)
        if self._is_overdue(story, now):
            story.give_up()
        if story.is_contradicted and not was_contradicted:
            self._figures.contradictions += 1
        self._count(story, _weight(story.event.resources) - weight)
        if is_news:
            return self._note_news(story, now, notified)
        if story.place != place:
            self.waves.route(story)
        return "known"

    def _note_news(self, story: Story, now: float, notified: Standing) -> str:
        """Note that a report has changed its story; return the result of the report."""
        self._locate(story)
        self._note(story, now, notified)
        return "news"

    def _begin(self, report: Report) -> Story:
        """Begin a story; the caller must also add the report. Raises ``PoisonError``."""
        return self._keep_new(Story.begin(report))

    def _begin_with_azure(self, report: AzureReport, time: datetime) -> Story:
        """Begin a story; the caller must also add the report. Raises ``PoisonError``."""
        return self._keep_new(Story.begin_with_azure(report, time))

    def _keep_new(self, story: Story) -> Story:
        """Keep a new story. Raises ``PoisonError``."""
        if self._is_full(story):
            raise PoisonError("too_many", f"open events of {story.sender or story.group}")
        self._keep(story)
        first_key = self._first_keys.setdefault(story.event.key, story.key)
        story.shares_id = first_key != story.key
        return story

    def _reopen(self, closed: Closed, report: Report, now: float) -> Story:
        """Begin a story whose id was that of a closed event; the caller must also add the report.

        Raises ``PoisonError``.
        """
        story = self._begin(report)
        if report.reason == "came_back":
            self._begin_next(story, closed, min(report.time, from_unix(now)))
        else:
            self._resume(story, closed, report.time)
        return story

    def _begin_next(self, story: Story, closed: Closed, time: datetime) -> None:
        """Let a new story be about the next event with the id of a closed one.

        ``time``: when the next event was listed.
        """
        story.nth = closed.nth + 1
        story.began = time
        del self._state.closed[story.key]

    def _resume(self, story: Story, closed: Closed, time: datetime) -> None:
        """Let a new story continue an event that is closed, because of a report of ``time``."""
        story.nth = closed.nth
        story.late = time.timestamp() <= closed.at
        story.azure = closed.azure
        del self._state.closed[story.key]

    def _note(self, story: Story, now: float, notified: Standing) -> None:
        """Note that an event is new or has changed, and which VMs it has deleted."""
        is_deletion = event_type_of(story.event.event_type).vanishes
        # noted at once, because the wave of the event may continue
        has_happened = story.standing in (Standing.ENDED, Standing.FINISHED)
        if is_deletion and has_happened:
            self._state.vanished |= dict.fromkeys(story.vms, now)
        self.waves.note(story, now, notified)

    def _locate(self, story: Story) -> None:
        """Use the places in the heartbeats of affected VMs, whichever VM reports it first."""
        for name in story.vms:
            heard = self._state.heard.get(name)
            if heard is not None:
                story.locate(heard.place, affected=True)

    # ---- partitions that were added

    def expect_waves(self, others: Iterable[Snapshot]) -> None:
        """Note the events of the other partitions: their VMs may report here from now on.

        A wave continues here with the first record about one of its events, under the same event
        key. An event that is closed there is closed here.
        """
        self._state.elsewhere.clear()
        closed = dict(self._state.closed)
        for other in others:
            for wave in copied(other.waves).values():
                self._state.elsewhere[wave.event_key] = wave
            self._state.muted |= other.muted
            closed = other.closed | closed

        self._state.closed.clear()
        self._state.closed.update(sorted(closed.items(), key=_closed_at))
        self._find_elsewhere()

    def _find_elsewhere(self) -> None:
        self._elsewhere.clear()
        for event_key, wave in self._state.elsewhere.items():
            for story in wave.stories.values():
                if story.key not in self.open:
                    self._elsewhere[story.key] = event_key

    def _continue_wave(self, event_key: str, now: float) -> None:
        """Continue a wave that another partition has had."""
        wave = self._state.elsewhere.pop(event_key)
        for story in list(wave.stories.values()):
            if story.key in self.open:
                del wave.stories[story.event.key]  # its id is used by another event here

        if self.waves.continue_wave(wave, now):
            for story in wave.stories.values():
                self._keep(story)
                self._state.unknown.pop(story.key, None)
                self._first_keys.setdefault(story.event.key, story.key)
        self._find_elsewhere()

    @property
    def may_have_moved(self) -> bool:
        """Whether there are events that were last heard of before partitions were added."""
        return any(story.heard_at <= self._state.resized_at for story in self.open.values())

    @property
    def has_word_of_azure(self) -> bool:
        """Whether Azure has reported an event that is open."""
        return any(story.azure is not None for story in self.open.values())

    def follow(self, others: Iterable[Snapshot], now: float) -> set[str]:
        """Leave the events to other partitions that have heard of them later.

        An event is left once the other partition has notified of its wave. If the wave has another
        event key there, this partition ends the event once it is over there, which closes what was
        opened for it. Return the event keys that this partition sends no more reminders of.
        """
        self.continued = set()
        self._over_elsewhere = set()
        outdated: set[str] = set()
        left_waves: dict[str, Wave] = {}  # by event key
        for other in others:
            for wave in other.waves.values():
                outdated |= self._follow_wave(wave, left_waves)
                if wave.event_key in left_waves:  # an event that did not move may come back
                    self._state.elsewhere[wave.event_key] = copied({wave.labels: wave})[wave.labels]
            for key, closed in other.closed.items():
                outdated |= self._follow_closed(key, closed, now, left_waves)

        # the other partition also has those events of these waves that are over
        for event_key, wave in left_waves.items():
            for story in by_progress(wave.stories.values()).over:
                self.waves.drop(story)
                self.close([story], now, event_key)
        self._find_elsewhere()
        return outdated

    def _follow_wave(self, other_wave: Wave, left_waves: dict[str, Wave]) -> set[str]:
        """Follow the events of a wave of another partition; see ``follow``."""
        outdated: set[str] = set()
        # an event of which no VM is left to report goes with its wave
        wave = self.waves.open.get(other_wave.labels)
        goes_along = (
            wave is not None
            and wave.event_key == other_wave.event_key
            and wave.heard_at < other_wave.heard_at
        )
        for other in other_wave.stories.values():
            story = self.open.get(other.key)
            if story is None or story.heard_at > other.heard_at:
                continue
            if story.heard_at == other.heard_at and not goes_along:
                continue

            self.continued.add(story.key)
            if other.standing in OVER:
                self._over_elsewhere.add(story.key)
            wave = self.waves.open[story.labels]
            if other_wave.notified is Standing.NEW or other_wave.notified_at <= wave.notified_at:
                continue  # until then, people are reminded of what this partition has announced
            outdated.add(wave.event_key)
            if other_wave.event_key == wave.event_key:
                self._leave(story, left_waves)
        return outdated

    def _follow_closed(
        self, key: str, closed: Closed, now: float, left_waves: dict[str, Wave]
    ) -> set[str]:
        """Follow an event that is over in another partition; see ``follow``."""
        story = self.open.get(key)
        if story is None or story.heard_at >= closed.at or story.standing in OVER:
            return set()

        wave = self.waves.open[story.labels]
        if closed.wave_key == wave.event_key:
            self._leave(story, left_waves)
        else:
            story.claim = max(story.claim, closed.standing)
            story.give_up()
            self._note(story, now, Standing.NEW)
        return {wave.event_key}

    def _leave(self, story: Story, left_waves: dict[str, Wave]) -> None:
        """Forget an event that another partition has now; note its wave."""
        del self.open[story.key]
        self.continued.discard(story.key)
        self._count(story, -_weight(story.event.resources))
        wave = self.waves.drop(story)
        left_waves[wave.event_key] = wave

    # ---- the bounds

    def _keep(self, story: Story) -> None:
        self.open[story.key] = story
        self._count(story, _weight(story.event.resources))

    def _is_full(self, story: Story) -> bool:
        """Whether there is no room for more.

        What one VM invents takes no room from the events of others.
        """
        return any(self._weights[name] >= bound for name, bound in _bounds(story).items())

    def _count(self, story: Story, weight: int) -> None:
        for name in _bounds(story):
            self._weights[name] += weight
            if not self._weights[name]:
                del self._weights[name]

    # ---- time

    def look(self, now: float) -> None:
        """Find the overdue events, which ``end_overdue`` ends, and forget what is too old."""
        self._overdue.clear()
        for story in self.open.values():
            if self._is_overdue(story, now):
                self._overdue.append(story)
        self._forget_elsewhere(now)

        for vm, vanished_at in list(self._state.vanished.items()):
            if now - vanished_at >= FORGET_SECONDS:
                del self._state.vanished[vm]
        for key, azure_vm in list(self._state.azure_vms.items()):
            if now - azure_vm.at > AZURE_VM_SECONDS:
                del self._state.azure_vms[key]
        for key, unknown in list(self._state.unknown.items()):
            if now - unknown.last > UNKNOWN_SECONDS:
                del self._state.unknown[key]
        self._forget_closed(now)

    @property
    def has_overdue(self) -> bool:
        """Whether the last look has found overdue events that ``end_overdue`` has yet to end."""
        return bool(self._overdue)

    def end_overdue(self, now: float) -> None:
        """End the next overdue event: it is over as far as is known."""
        story = self._overdue.popleft()
        standing = story.standing
        story.give_up()
        if story.standing is not standing:
            self._note(story, now, Standing.NEW)

    def _is_overdue(self, story: Story, now: float) -> bool:
        if story.standing in OVER:
            return False
        if story.key in self._over_elsewhere:  # the other partition ends it first
            return now > story.deadline(2 * self._limit)
        if story.key in self.continued:
            return False
        return now > story.deadline(self._limit)

    def _forget_elsewhere(self, now: float) -> None:
        """Forget the waves of other partitions that no record here was about."""
        for event_key, wave in list(self._state.elsewhere.items()):
            if all(now > story.deadline(self._limit) for story in wave.stories.values()):
                del self._state.elsewhere[event_key]
                self._find_elsewhere()

    def look_for_gone(self, late: set[str]) -> None:
        """Find the stories that VMs have left, or come back to; ``judge_next`` judges them.

        ``late``: the VMs that were not heard from in time. A VM that an event has deleted has left
        too. One that is no longer known stays away until it is heard from.
        """
        left = late | self.deleted()
        left_by_group: dict[str, set[str]] = {}
        for vm in left:
            group, slash, name = vm.rpartition("/")
            left_by_group.setdefault(group + slash, set()).add(name)

        self._to_judge.clear()
        for story in self.open.values():
            left_names = left_by_group.get(story.group, set())
            gone = _common(left_names, story.reported)
            for name in story.gone:
                if story.group + name not in self._state.heard:
                    gone.add(name)
            if gone != story.gone:
                self._to_judge.append((story, gone))

    @property
    def has_to_judge(self) -> bool:
        """Whether the last look has found stories that ``judge_next`` has yet to judge."""
        return bool(self._to_judge)

    def judge_next(self, now: float) -> None:
        """Judge the next story without the VMs that have left."""
        story, gone = self._to_judge.popleft()
        if self.open.get(story.key) is story and story.leave_out(gone):
            self._note(story, now, Standing.NEW)

    def _forget_closed(self, now: float) -> None:
        """Forget the events that were over long ago, and the oldest of too many."""
        for key, closed in list(self._state.closed.items()):
            is_old = now - closed.at > CLOSED_SECONDS
            if not is_old and len(self._state.closed) <= MAX_CLOSED:
                break
            del self._state.closed[key]
            if self._first_keys.get(closed.event_key) == key:
                del self._first_keys[closed.event_key]

    # ---- for silence

    def deleted(self) -> set[str]:
        """Return the VMs that a Preempt or a Terminate has deleted, and that have not come back."""
        return {vm for vm in self._state.vanished if self._is_deleted(vm)}

    def _is_deleted(self, vm: str) -> bool:
        """Whether a Preempt or a Terminate of the VM is over, and the VM has not come back."""
        vanished_at = self._state.vanished.get(vm)
        if vanished_at is None:
            return False

        # its last heartbeats may reach the hub after the report of its end
        heard = self._state.heard.get(vm)
        return heard is None or heard.at <= vanished_at + heard.interval

    def explained(self, now: float) -> set[str]:
        """Return the VMs that an event under way affects."""
        vms: set[str] = set()
        for story in self.open.values():
            if _is_under_way(story, now):
                vms.update(story.vms)
        return vms

    # ---- the end

    def close(self, stories: Iterable[Story], now: float, wave_key: str = "") -> None:
        """Close these stories, which are over.

        One whose id has come back in another wave is closed already. ``wave_key``: the event key of
        their wave, if people know of it.
        """
        for story in list(stories):
            if self.open.get(story.key) is story:
                self._close(story, now, wave_key)

    def _close(self, story: Story, now: float, wave_key: str) -> None:
        del self.open[story.key]
        self._count(story, -_weight(story.event.resources))

        if len(self._state.past) < MAX_WAITING:  # the writer deletes the first ones once written
            self._state.past.append(PastEvent.closed_at(now, story))
        self._figures.ends[story.ended_by] += 1

        event_key = story.event.key
        if story.shares_id:
            event_key = ""
        self._state.closed[story.key] = Closed(
            event_key=event_key,
            standing=story.standing,
            at=now,
            nth=story.nth,
            over=_over_since(story, now),
            wave_key=wave_key,
            azure=_without_resource(story.azure),
        )


class Partition:
    """The fold. ``state``: that of the previous owner; the fold changes it in place."""

    def __init__(
        self,
        name: str,
        grouping: Grouping,
        state: Snapshot | None = None,
        figures: PartitionFigures | None = None,
    ) -> None:
        if state is None:
            state = Snapshot()
        state.looked = max(state.looked, state.position.enqueued)
        self.name = name
        self.figures = figures or PartitionFigures()
        self.state = state
        self.events = Events(grouping, state, self.figures)
        self.silence = Silence(grouping, state.silent, state.heard)
        self.missing = Silence(grouping, state.missing, state.expected, missing=True)
        self._every_waves = (self.events.waves, self.silence.waves, self.missing.waves)
        self._unwatched: float | None = None  # the argument of ``Silence.look`` if that is due

    def event_keys(self) -> set[str]:
        """Return the event keys of all waves that are open, or may continue here."""
        keys = set(self.state.elsewhere)
        for waves in self._every_waves:
            keys.update(wave.event_key for wave in waves.open.values())
        return keys

    def snapshot(self, at: float, outbox: OutboxImage | None = None) -> bytes:
        """Return all that is needed to continue from here, as MessagePack.

        ``at``: Unix seconds of the hub's clock.
        """
        self.state.at = at
        self.state.outbox = outbox or OutboxImage()
        return msgspec.msgpack.encode(self.state)

    def hub_has(self, partitions: int, others: Iterable[Snapshot] = (), now: float = 0.0) -> None:
        """Note the number of partitions; ``others``: the states of the other ones.

        If it has changed, VMs may use another partition now: forget them, and expect those of the
        others. ``now``: Unix seconds of the hub's clock.
        """
        if partitions == self.state.partitions:
            return
        if self.state.partitions:
            self.state.resized_at = now
        self.state.partitions = partitions
        self.silence.expect({}, 0.0, 0.0)
        self.events.expect_waves(others)

    # ---- the records

    def has_read(self, at: Position) -> bool:
        """Whether the record at this position was read: a snapshot may be newer than a checkpoint.

        A newer record with a smaller number was not: the hub was created again, and counts from 0.
        """
        position = self.state.position
        return at.sequence <= position.sequence and at.enqueued <= position.enqueued

    def add(self, body: bytes, at: Position) -> list[Notification]:
        """Apply one record; return the notifications that were due before it."""
        if self.has_read(at):
            return []
        self._note_gap(at)

        notifications = self.advance(at.enqueued)
        self.state.position = at
        result = self._apply(body, at)
        self.figures.records[result] += 1
        return notifications

    def _note_gap(self, at: Position) -> None:
        """Count the records that were deleted before they were read."""
        last_sequence = self.state.position.sequence
        if at.sequence <= last_sequence:
            self.state.backlog = -1  # the hub was created again
        elif last_sequence >= 0:
            self.figures.missing += at.sequence - 1 - last_sequence

    def _apply(self, body: bytes, at: Position) -> str:
        """Apply a record; return its result: see ``PartitionFigures``."""
        try:
            return self._take(read_record(body), at.enqueued)
        except PoisonError as poison:
            return self._set_aside(poison)
        except Exception as error:  # noqa: BLE001 - unforeseen: it does not stop the other records
            self.figures.errors["fold"] += 1
            detail = f"please report it: {type(error).__name__}: {error}"
            return self._set_aside(PoisonError("failed", detail), error)

    def _take(self, record: Report | Beat | AzureMessages | None, now: float) -> str:
        """Apply a decoded record; return its result. Raises ``PoisonError``."""
        if record is None:
            return "skipped"
        if isinstance(record, AzureMessages):
            return self._take_azure(record, now)

        self.silence.hear(record, now)
        self.state.azure_vms.pop(record.place.group + record.vm, None)
        if isinstance(record, Report):
            return self.events.report(_in_time(record, now), now)
        self.events.listed(record.place.group, record.listed, now)
        return "beat"

    def _take_azure(self, messages: AzureMessages, now: float) -> str:
        """Apply Azure's messages; return the result of the record, which may have several."""
        results: set[str] = set()
        if messages.skipped:
            self.figures.azure_messages["skipped"] += messages.skipped
            results.add("skipped")
        for reason in messages.unreadable:
            results.add(self._set_aside(PoisonError("wrong_shape", reason)))

        for report in messages.reports:
            self.figures.azure_messages[report.status] += 1
            if report.time is not None:
                self.figures.note_azure_delay(now - report.time.timestamp())
            try:
                results.add(self.events.report_of_azure(_azure_in_time(report, now), now))
            except PoisonError as poison:
                results.add(self._set_aside(poison))
        return min(results, key=RESULTS.index, default="skipped")

    def _set_aside(self, poison: PoisonError, error: Exception | None = None) -> str:
        """Count a record that is not used; log the first one of each partition and reason."""
        kind = (self.name, poison.reason)
        level = logging.WARNING
        if kind in self.figures.logged:
            level = logging.DEBUG
        log.log(
            level,
            "partition %s, sequence number %d: a record is not used (%s: %s); more of them are only"
            " counted",
            self.name,
            self.state.position.sequence,
            poison.reason,
            str(poison)[:200],
            exc_info=error,
        )
        self.figures.logged.add(kind)
        self.figures.poison[poison.reason] += 1
        return "poison"

    # ---- the time

    def is_due(self, now: float) -> bool:
        """Whether ``advance`` has something to do by ``now``."""
        # nothing is due before the backlog is read: later records may end its events
        if self.state.position.sequence < self.state.backlog or now < self.state.quiet_until:
            return False

        if self.state.backlog >= 0 or self._is_look_due(now):
            return True
        if self.events.has_overdue or self._unwatched is not None or self.events.has_to_judge:
            return True
        if self.silence.has_changed or self.missing.has_changed:
            return True
        return any(waves.first_due() <= now for waves in self._every_waves)

    def advance(self, now: float) -> list[Notification]:
        """Return what is due by ``now``, in Unix seconds of the hub's clock.

        No older record will come.
        """
        notifications: list[Notification] = []
        while self.is_due(now):
            notifications += self.advance_chunk(now)
        return notifications

    def advance_chunk(self, now: float) -> list[Notification]:
        """Take some steps that are due by ``now``; return their notifications.

        The caller calls this again until nothing ``is_due``, and before it adds a record.
        """
        notifications: list[Notification] = []
        for _ in range(CHUNK):
            if not self.is_due(now):
                break
            try:
                notification = self._step(now)
            except Exception:  # unforeseen: the next step continues after what has failed
                self.figures.errors["fold"] += 1
                log.exception("partition %s: unforeseen error, please report it", self.name)
                continue
            if notification is not None:
                notifications.append(notification)
        return notifications

    def _step(self, now: float) -> Notification | None:
        """Take the next step. It is no longer due when it fails, so that it is not repeated."""
        if self.state.backlog >= 0:
            self._end_backlog(now)
        elif self._is_look_due(now):
            self._look(now)
        elif self.events.has_overdue:
            self.events.end_overdue(now)
        elif self._unwatched is not None:
            self._look_at_vms(now, self._unwatched)
        elif self.events.has_to_judge:
            self.events.judge_next(now)
        elif self.silence.has_changed:
            self.silence.note_next(now)
        elif self.missing.has_changed:
            self.missing.note_next(now)
        else:
            return self._notify_next(now)
        return None

    def _end_backlog(self, now: float) -> None:
        """Forget what was over before the partition was read: no one is notified of it."""
        self.state.backlog = -1
        self.events.close(self.events.waves.forget_over(), now)

    def _is_look_due(self, now: float) -> bool:
        # before the first record, this machine's clock may be ahead of the hub's
        return abs(now - self.state.looked) >= LOOK_EVERY

    def _look(self, now: float) -> None:
        """Find overdue events. Once they have ended, the VMs are next: some are gone with them."""
        self._unwatched = 0.0
        if self.state.looked and now - self.state.looked > UNWATCHED:
            self._unwatched = now - self.state.looked
        self.state.looked = now
        self.events.look(now)

    def _look_at_vms(self, now: float, unwatched: float) -> None:
        """Find the VMs that are silent or missing."""
        self._unwatched = None
        deleted = self.events.deleted()
        explained = self.events.explained(now)
        self.silence.look(now, unwatched, deleted, explained)
        self.missing.look(now, unwatched, deleted, explained)
        self.events.look_for_gone(self.silence.late)

    def _notify_next(self, now: float) -> Notification | None:
        """Notify of the next wave that is due, and close its stories if it is over."""
        for waves in self._every_waves:
            due = waves.notify_next(now)
            if due is None:
                continue
            if due.wave.standing in OVER:
                self.events.close(due.wave.stories.values(), now, due.wave.event_key)
            return due.notification
        return None


def _in_time(report: Report, now: float) -> Report:
    """Correct impossible times of a report by the hub's clock, which shows ``now``."""
    latest = from_unix(now)
    earliest = latest - YEAR

    not_before = report.not_before
    if not_before is not None and abs(not_before - latest) >= YEAR:
        not_before = None

    times = (report.time, report.first_seen)
    is_possible = earliest < min(times) and max(times) <= latest + MAX_AHEAD
    if is_possible and not_before == report.not_before:
        return report

    time = max(earliest, min(report.time, latest))
    first_seen = max(earliest, min(report.first_seen, time))
    return msgspec.structs.replace(report, time=time, first_seen=first_seen, not_before=not_before)


def _azure_in_time(report: AzureReport, now: float) -> AzureReport:
    """Correct impossible times of a report of Azure by the hub's clock, which shows ``now``."""
    latest = from_unix(now)
    event = report.event
    if event.not_before is not None and abs(event.not_before - latest) >= YEAR:
        event = msgspec.structs.replace(event, not_before=None)

    time = report.time
    if time is not None and time < latest - YEAR:
        time = None
    return msgspec.structs.replace(report, event=event, time=time)


# ---- the weight of an event


def _bounds(story: Story) -> dict[str, int]:
    """Return the bounds that apply to an event.

    They are those of the partition, of its group, and of the VM that reported it first.
    """
    bounds = {"": MAX_OPEN, story.group: MAX_OPEN_OF_GROUP}
    if story.sender:
        bounds[story.sender] = MAX_OPEN_OF_ONE
    return bounds


def _weight(resources: tuple[str, ...]) -> int:
    """Return how many open events an event with these affected VMs counts as."""
    characters = sum(len(name) for name in resources)
    return 1 + characters // NAMES_OF_ONE


# ---- judging an event


def _common(names: set[str], reported: dict[str, int]) -> set[str]:
    """Return the names that have reported; the shorter collection is searched."""
    if len(names) < len(reported):
        return {name for name in names if name in reported}
    return {name for name in reported if name in names}


def _closed_at(item: tuple[str, Closed]) -> float:
    _, closed = item
    return closed.at


def _newest_first(story: Story) -> int:
    return -story.nth


def _over_since(story: Story, now: float) -> datetime:
    """Return the last VM's report of the end; without one, the event is over since ``now``."""
    return story.over or from_unix(now)


def _is_under_way(story: Story, now: float) -> bool:
    """Whether an event may be interrupting its VMs: it has started, or its NotBefore has passed."""
    if story.standing is Standing.STARTED:
        return True

    # what is over interrupts no VM
    if story.standing in OVER:
        return False

    # Azure may start it from NotBefore on, and the VM can no longer report that
    return story.not_before is not None and story.not_before.timestamp() < now


def _begins_again(story: Story, report: Report, now: float) -> bool:
    """Whether a report is about a new event that has the id of an open one."""
    # an event that is not over is still the same one
    if story.standing not in OVER:
        return False
    return _came_back(report, _over_since(story, now))


def _came_back(report: Report, over: datetime) -> bool:
    """Whether an EventId is listed again, for a new event."""
    # other reports are about the first event
    if report.reason != "came_back":
        return False

    # it came back before the end of the last event: the report is late, or repeated
    return report.time > over


def _reopens(closed: Closed, report: Report) -> bool:
    """Whether a report reopens a closed event, or is about a new one with its id."""
    if report.reason == "came_back":
        return not _has_azure_end(closed.azure) and _came_back(report, closed.over)
    return _is_corrected(closed, STRENGTH[report.change])


def _is_corrected(closed: Closed, claim: Standing) -> bool:
    """Whether a claim knows more of a closed event than the reports of its end."""
    # a finished event stays finished
    if closed.standing not in (Standing.CANCELED, Standing.ENDED):
        return False
    return claim > closed.standing


def _without_resource(azure: AzureWord | None) -> AzureWord | None:
    """Return what Azure has said of an event that is over, as short as possible."""
    if azure is None:
        return None
    return msgspec.structs.replace(azure, resource_id="")


def _is_still_to_come(closed: Closed, report: AzureReport, time: datetime, now: float) -> bool:
    """Whether Azure still announces an event that was over as far as was known."""
    not_before = report.event.not_before
    if closed.standing is not Standing.ENDED or not_before is None:
        return False
    is_newer = time > from_unix(closed.at) + MAX_AHEAD  # the clocks may differ
    return is_newer and not_before.timestamp() > now


def _has_azure_end(azure: AzureWord | None) -> bool:
    """Whether Azure has said how an event ended: then it is over for good."""
    return azure is not None and azure.end is not None
