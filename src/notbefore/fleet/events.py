"""``Events``: the open events of a partition, changed by reports and by the time. Pure."""

from collections import deque
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from notbefore.core.event_types import event_type_of
from notbefore.fleet.azure_messages import AzureReport
from notbefore.fleet.elsewhere import Elsewhere
from notbefore.fleet.event_bounds import EventBounds
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_records import PartitionFigures, Place, PoisonError, Report
from notbefore.fleet.silence import FORGET_SECONDS
from notbefore.fleet.snapshot import AzureVm, Closed, Snapshot, Unknown
from notbefore.fleet.story import (
    AZURE_CLAIMS,
    OVER,
    STRENGTH,
    AzureWord,
    Standing,
    Story,
    from_unix,
)
from notbefore.fleet.wave import Wave, by_progress
from notbefore.fleet.waves import Grouping, Waves

MAX_AHEAD: Final = timedelta(seconds=60)  # by which the clock of a VM may be ahead of the hub's
CLOSED_SECONDS: Final = 30 * 86_400.0  # an ended event is remembered: a VM may be off so long
MAX_CLOSED: Final = 20_000
MAX_WAITING: Final = 5_000  # events that wait for the history; any more are left out of it
MAX_UNKNOWN: Final = 1_000  # events that are listed in heartbeats and were not reported
UNKNOWN_SECONDS: Final = 3_600.0  # after which such an event is forgotten if no VM lists it
MAX_AZURE_VMS: Final = 5_000  # VMs that only Azure has named
AZURE_VM_SECONDS: Final = 30 * 86_400.0  # after which such a VM is forgotten


class _Before(NamedTuple):
    """What a story was like before a report is added."""

    resources: tuple[str, ...]
    place: Place
    is_contradicted: bool

    @classmethod
    def of(cls, story: Story) -> "_Before":
        return cls(
            resources=story.event.resources,
            place=story.place,
            is_contradicted=story.is_contradicted,
        )


class Events:
    """The open events of a partition, changed by reports.

    ``state``: the snapshot that keeps them, changed in place.
    """

    def __init__(self, grouping: Grouping, state: Snapshot, figures: PartitionFigures) -> None:
        self.waves = Waves(grouping, state.waves)
        self.open: dict[str, Story] = {}  # by resource group and EventId: see ``Story.key``
        self._bounds = EventBounds()
        self._elsewhere = Elsewhere(state.elsewhere, self.open)
        self._figures = figures
        self._state = state
        self._limit = grouping.over_after
        self._overdue: deque[Story] = deque()  # found by the last look, and not ended yet
        # stories that the last look has found, with the VMs to leave out of them
        self._to_judge: deque[tuple[Story, set[str]]] = deque()
        self._first_keys: dict[str, str] = {}  # EventId -> the key of the first event that has it
        # keys of open events that another partition has heard of later: see ``follow``
        self.continued: set[str] = set()
        # those of them that are over in the other partition
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
        self._elsewhere.index()

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
        wave = self._elsewhere.take(key)
        if wave is not None:
            self._continue_wave(wave, now)
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
        self._check_room(story, report.resources)
        before = _Before.of(story)
        story.heard_at = now
        is_news = story.add(report)
        return self._note_added(story, before, now, notified, is_news=is_news)

    def _add_azure(
        self, story: Story, report: AzureReport, time: datetime, now: float, notified: Standing
    ) -> str:
        """Add a report of Azure to its story. Parameters and errors are those of ``_add``."""
        self._check_room(story, report.event.resources)
        before = _Before.of(story)
        # a message may come hours late: the event was last heard of when Azure sent it
        story.heard_at = max(story.heard_at, time.timestamp())
        is_news = story.add_azure(report, time, now)
        if self._is_overdue(story, now):
            story.give_up()
        return self._note_added(story, before, now, notified, is_news=is_news)

    def _check_room(self, story: Story, resources: tuple[str, ...]) -> None:
        """Raise ``PoisonError`` if there is no room for these affected VMs of an open event."""
        if not self._bounds.may_affect(story, resources):
            raise PoisonError("too_many", f"VMs of open events of {story.sender or story.group}")

    def _note_added(
        self, story: Story, before: _Before, now: float, notified: Standing, *, is_news: bool
    ) -> str:
        """Note that a report was added to its story; return the result of the report."""
        if story.is_contradicted and not before.is_contradicted:
            self._figures.contradictions += 1
        self._bounds.resize(story, before.resources)

        if is_news:
            self._locate(story)
            self._note(story, now, notified)
            return "news"
        if story.place != before.place:
            self.waves.route(story)
        return "known"

    def _keep(self, story: Story) -> None:
        self.open[story.key] = story
        self._bounds.add(story)

    def _begin(self, report: Report) -> Story:
        """Begin a story; the caller must also add the report. Raises ``PoisonError``."""
        return self._keep_new(Story.begin(report))

    def _begin_with_azure(self, report: AzureReport, time: datetime) -> Story:
        """Begin a story; the caller must also add the report. Raises ``PoisonError``."""
        return self._keep_new(Story.begin_with_azure(report, time))

    def _keep_new(self, story: Story) -> Story:
        """Keep a new story. Raises ``PoisonError``."""
        if self._bounds.is_full(story):
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

    def expect_waves(self, others: Collection[Snapshot]) -> None:
        """Expect the events of the other partitions: their VMs may report here from now on.

        A wave continues here with the first record about one of its events, under the same event
        key. An event that is closed there is closed here.
        """
        self._elsewhere.expect(others)
        closed = dict(self._state.closed)
        for other in others:
            self._state.muted |= other.muted
            closed = other.closed | closed

        self._state.closed.clear()
        self._state.closed.update(sorted(closed.items(), key=_closed_at))

    def _continue_wave(self, wave: Wave, now: float) -> None:
        """Continue a wave that another partition has had."""
        if self.waves.continue_wave(wave, now):
            for story in wave.stories.values():
                self._keep(story)
                self._state.unknown.pop(story.key, None)
                self._first_keys.setdefault(story.event.key, story.key)
        self._elsewhere.index()

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
        left_waves: dict[str, Wave] = {}  # by event key: the waves of the events that are left
        for other in others:
            for wave in other.waves.values():
                outdated |= self._follow_wave(wave, left_waves)
                if wave.event_key in left_waves:  # an event that did not move may come back
                    self._elsewhere.add(wave)
            for key, closed in other.closed.items():
                outdated |= self._follow_closed(key, closed, now, left_waves)

        # the other partition also has those events of these waves that are over
        for event_key, wave in left_waves.items():
            for story in by_progress(wave.stories.values()).over:
                self.waves.drop(story)
                self.close([story], now, event_key)
        self._elsewhere.index()
        return outdated

    def _follow_wave(self, other_wave: Wave, left_waves: dict[str, Wave]) -> set[str]:
        """Follow the events of a wave of another partition; see ``follow``."""
        outdated: set[str] = set()
        goes_along = self._goes_along(other_wave)
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

    def _goes_along(self, other_wave: Wave) -> bool:
        """Whether another partition has heard of this wave later.

        Then an event of which no VM is left to report goes there with its wave.
        """
        wave = self.waves.open.get(other_wave.labels)
        if wave is None or wave.event_key != other_wave.event_key:
            return False
        return wave.heard_at < other_wave.heard_at

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
        self._bounds.remove(story)
        wave = self.waves.drop(story)
        left_waves[wave.event_key] = wave

    # ---- time

    def look(self, now: float) -> None:
        """Find the overdue events, which ``end_overdue`` ends, and forget what is too old."""
        self._overdue.clear()
        for story in self.open.values():
            if self._is_overdue(story, now):
                self._overdue.append(story)

        self._elsewhere.forget(now, self._limit)
        self._forget_closed(now)
        for vm, vanished_at in list(self._state.vanished.items()):
            if now - vanished_at >= FORGET_SECONDS:
                del self._state.vanished[vm]
        for key, azure_vm in list(self._state.azure_vms.items()):
            if now - azure_vm.at > AZURE_VM_SECONDS:
                del self._state.azure_vms[key]
        for key, unknown in list(self._state.unknown.items()):
            if now - unknown.last > UNKNOWN_SECONDS:
                del self._state.unknown[key]

    @property
    def has_overdue(self) -> bool:
        """Whether the last look has found overdue events that ``end_overdue`` has yet to end."""
        return bool(self._overdue)

    def end_overdue(self, now: float) -> None:
        """End the next overdue event, as no one has reported its end."""
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

    def look_for_gone(self, late: set[str]) -> None:
        """Find the stories that VMs have left or come back to; ``judge_next`` judges them.

        ``late``: the VMs that were not heard from in time, which have left. So has a VM that an
        event has deleted. A VM that is no longer known comes back only when it is heard from.
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
        self._bounds.remove(story)

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
