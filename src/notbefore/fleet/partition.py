"""``Partition``: what one partition's log says, folded record by record; and its snapshot. Pure.

The state is a fold over the log: the same records give the same stories, waves and notifications, whoever reads them.
A snapshot holds what is not over yet, and is taken between two records: who goes on from it needs nothing before it.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.document import VANISHING
from notbefore.core.outbox import OutboxImage
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_records import NOBODY, Beat, Poison, Report, one_place, read
from notbefore.fleet.room import Room, weight
from notbefore.fleet.silence import Silence
from notbefore.fleet.snapshot import FORM, Closed, Snapshot
from notbefore.fleet.story import CANCELED, ENDED, NEW, OVER, STARTED, STRENGTH, Story, from_unix
from notbefore.fleet.waves import Grouping, Notification, Waves
from notbefore.metrics.fleet import Measured

CLOSED_SECONDS: Final = 86_400.0  # how long an event that is over is remembered: for late and repeated records
MAX_CLOSED: Final = 20_000
MAX_WAITING: Final = 5_000  # events that wait for the disk of the history; what is over then is not in it
UNWATCHED: Final = 120.0  # seconds between two looks, above which nobody read the hub, or it was away
MAX_AHEAD: Final = 60.0  # seconds by which the clock of a VM may be ahead of the hub's
YEAR: Final = timedelta(days=366)  # no time that a VM reports is further away
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for stories beyond their limit

RESULTS: Final = ("news", "known", "late", "beat", "skipped", "poison")
"""What a record was: it changed a story; it did not; its event is over; a sign of life; of no use here; unreadable."""


class Item(Struct, frozen=True):
    """One record of the hub."""

    body: bytes
    sequence: int
    offset: str
    enqueued: float  # Unix seconds, by the hub's clock


class Unread(Struct, frozen=True):
    """A record that could not be used, and where it is in the hub."""

    partition: str
    sequence: int
    poison: Poison


class PartitionFigures(Struct):
    """What was counted since the start, of all partitions that this instance has had."""

    records: Counter[str] = msgspec.field(default_factory=Counter)  # by RESULTS
    poison: Counter[str] = msgspec.field(default_factory=Counter)  # by reason
    given_up: int = 0
    missing: int = 0  # records that were gone before they were read
    unread: list[Unread] = []  # until somebody logs them
    failures: list[str] = []  # errors that nobody foresaw, with their tracebacks, until somebody logs them
    measured: Measured = msgspec.field(default_factory=Measured)


class Partition:
    """The fold.

    ``partitions``: how many the hub has. ``backlog``: the last record that the hub had before it was read for the first
    time: what is over by then is history, and no news; -1 without one.
    """

    def __init__(
        self,
        name: str,
        grouping: Grouping,
        *,
        partitions: int = 0,
        backlog: int = -1,
        figures: PartitionFigures | None = None,
    ) -> None:
        self.name = name
        self.partitions = partitions
        self.figures = figures or PartitionFigures()
        self.past: list[PastEvent] = []  # events that are over, and not in the history yet
        self.muted: set[str] = set()  # event keys of open waves that nobody was notified of
        self.sequence = -1  # of the last record
        self.offset = ""
        self.enqueued = 0.0
        self.waves = Waves(grouping)
        self.stories: dict[str, Story] = {}  # by resource group and EventId
        self.silence = Silence(grouping, self._is_gone, self._explained)
        self.missing = Silence(grouping, self._is_gone, self._explained, missing=True)
        self.closed: dict[str, Closed] = {}
        self._backlog = backlog
        self._limit = grouping.over_after
        self._looked = 0.0
        self._vanished: dict[str, float] = {}  # VM -> when it was deleted, by an event
        self._by_id: dict[str, str] = {}  # EventId -> the key of the first event that has it
        self._room = Room()

    # ---- snapshots

    def event_keys(self) -> set[str]:
        """What the notifications of all that is open are known by."""
        return {wave.event_key for waves in self._every for wave in waves.open.values()}

    @property
    def _every(self) -> tuple[Waves, ...]:
        return self.waves, self.silence.waves, self.missing.waves

    def snapshot(self, at: float, outbox: OutboxImage | None = None) -> bytes:
        """All that is needed to go on from here, as MessagePack: see ``read_snapshot``."""
        waves, silent, missing = (list(one.open.values()) for one in self._every)
        found = Snapshot(
            form=FORM,
            at=at,
            sequence=self.sequence,
            offset=self.offset,
            enqueued=self.enqueued,
            partitions=self.partitions,
            backlog=self._backlog,
            waves=waves,
            silent=silent,
            missing=missing,
            closed=self.closed,
            vanished=self._vanished,
            heard=self.silence.heard,
            expected=self.missing.heard,
            outbox=outbox or OutboxImage(),
            past=self.past,
            muted=list(self.muted),
        )
        return msgspec.msgpack.encode(found)

    def restore(self, found: Snapshot) -> None:
        """Go on from a snapshot.

        Where the hub was given more partitions since, its VMs may send their heartbeats to another one.
        """
        self.silence.restore(found.silent, found.heard if found.partitions == self.partitions else {})
        self.missing.restore(found.missing, found.expected)
        self.sequence, self.offset, self.enqueued = found.sequence, found.offset, found.enqueued
        self._looked, self._backlog = found.enqueued, found.backlog
        self.waves.restore(found.waves)
        for wave in found.waves:
            for story in wave.stories.values():
                self._room.take(story.sender, weight(story.event.resources))
                self._keep(story.group + story.event.key, story)
        self.closed, self._vanished = found.closed, found.vanished
        self.past, self.muted = found.past, set(found.muted)
        for key, closed in found.closed.items():
            self._by_id.setdefault(closed.event_key, key)

    def hub_has(self, partitions: int) -> None:
        """Note how many partitions the hub has by now: see ``restore``."""
        if partitions != self.partitions:
            self.partitions = partitions
            self.silence.forget_all()

    def begin_anew(self) -> None:
        """The log is another one: its sequence numbers start again. What is open stays open."""
        self.sequence, self.offset, self._backlog = -1, "", -1

    # ---- the fold

    def add(self, item: Item) -> Iterator[Notification | None]:
        """Take in one record; yields the notifications that were due before it, as ``advance`` does."""
        if item.sequence <= self.sequence:
            if item.enqueued <= self.enqueued:  # a snapshot may be newer than the checkpoint
                return
            self.begin_anew()  # newer than all that was read: the hub was made anew, and counts from 0 again
        if 0 <= self.sequence < item.sequence - 1:
            self.figures.missing += item.sequence - 1 - self.sequence
        if item.enqueued >= self.next_due:
            yield from self.advance(item.enqueued)
        self.sequence, self.offset, self.enqueued = item.sequence, item.offset, item.enqueued
        try:
            found = read(item.body)
            result = self._take(_in_time(found, item.enqueued) if isinstance(found, Report) else found, item)
        except Exception as error:  # noqa: BLE001 - nobody foresaw it: set aside, it keeps no other record waiting
            self.figures.failures.append(f"partition {self.name}: {traceback.format_exc()}")
            result = self._set_aside(Poison("failed", f"{type(error).__name__}: {error}"), item)
        self.figures.records[result] += 1

    @property
    def next_due(self) -> float:
        """Unix seconds of the hub's clock: before, ``advance`` has nothing to do."""
        return min(self._looked + LOOK_EVERY, *(waves.next_due for waves in self._every))

    def advance(self, now: float) -> Iterator[Notification | None]:
        """Nothing older than ``now``, in Unix seconds of the hub's clock, will come; yields what is due by then.

        ``None``: others may have their turn.
        """
        if self.sequence < self._backlog:
            return
        try:
            yield from self._advance(now)
        except Exception:  # noqa: BLE001 - nobody foresaw it: the next call goes on with what comes after it
            self.figures.failures.append(f"partition {self.name}: {traceback.format_exc()}")

    def _advance(self, now: float) -> Iterator[Notification | None]:
        if self._backlog >= 0:
            self._backlog = -1
            self._close_all(self.waves.forget_over(), now)
        if now - self._looked >= LOOK_EVERY:
            yield from self._look(now)
        for wave, made in self.waves.flush(now):
            if wave.key not in self.waves.open:  # it is over
                self._close_all(wave.stories.values(), now)
            if made is not None:
                yield made
        yield from self.silence.flush(now)
        yield from self.missing.flush(now)

    def _take(self, found: Report | Beat | Poison | None, item: Item) -> str:
        if found is None:
            return "skipped"
        if isinstance(found, Poison):
            return self._set_aside(found, item)
        if not self.silence.hear(found, item.enqueued):
            return self._set_aside(Poison("too_many", f"VMs in the group {found.group}"), item)
        if isinstance(found, Report):
            return self._report(found, item)
        for event_id in found.listed:  # so it is not over
            if (story := self.stories.get(self._key_of(found.group, event_id))) is not None:
                story.heard_at = item.enqueued
        return "beat"

    def _set_aside(self, poison: Poison, item: Item) -> str:
        self.figures.poison[poison.reason] += 1
        self.figures.unread.append(Unread(self.name, item.sequence, poison))
        return "poison"

    def _key_of(self, group: str, event_id: str) -> str:
        """Of an event. A VM that does not know yet where it is reports the one that has this id."""
        event_key = event_id.casefold()
        first = self._by_id.get(event_key)
        joins = first is not None and (group == NOBODY or first.startswith(NOBODY))
        return first if first is not None and joins else group + event_key

    def _report(self, report: Report, item: Item) -> str:
        now, key = item.enqueued, self._key_of(report.group, report.event_id)
        story = self.stories.get(key)
        if story is not None and story.standing in OVER and report.reason == "came_back":
            self._close(key, story, now)  # the id is another event's now; its wave may go on
            story = None
        if story is None:
            return self._begin(key, report, item)
        if story.began is not None and report.time < story.began:
            return "late"  # of the event before
        before = weight(story.event.resources)
        reserved = max(0, weight(report.resources) - before)
        if not self._room.take(story.sender, reserved):
            return self._set_aside(Poison("too_many", f"VMs of open events of {story.sender}"), item)
        story.heard_at = now
        news = story.add(report)
        self._room.take(story.sender, weight(story.event.resources) - before - reserved)
        if news:
            if not story.by_affected:
                self._locate(story)
            self.waves.note(story, now)
        return "news" if news else "known"

    def _begin(self, key: str, report: Report, item: Item) -> str:
        """A report of an event that is not open."""
        closed = self.closed.get(key)
        if closed is not None and not _reopens(closed, report):
            return "late"
        sender = report.group + report.vm
        if not self._room.take(sender, weight(report.resources)):
            return self._set_aside(Poison("too_many", f"open events of {sender}"), item)
        story, notified = Story.begin(report), NEW
        story.heard_at = item.enqueued
        if closed is not None:
            if report.reason == "came_back":
                story.nth, story.began = closed.nth + 1, min(report.time, from_unix(item.enqueued))
            else:
                story.nth = closed.nth
                notified, story.late = closed.standing, report.time.timestamp() <= closed.at
            del self.closed[key]
        self._keep(key, story)
        story.add(report)
        self._locate(story)
        story.place = one_place(story.place)
        self.waves.note(story, item.enqueued, notified)
        return "news"

    def _keep(self, key: str, story: Story) -> None:
        self.stories[key] = story
        story.shares_id = self._by_id.setdefault(story.event.key, key) != key

    def _locate(self, story: Story) -> None:
        """The affected VMs are where their heartbeats say, whoever reports the event first."""
        for name in story.vms:
            heard = self.silence.heard.get(name)
            if heard is not None:
                story.locate(heard.place, affected=True)

    def _look(self, now: float) -> Iterator[None]:
        """End what is long overdue, and forget what is long over."""
        unwatched = now - self._looked if self._looked and now - self._looked > UNWATCHED else 0.0
        self._looked = now
        for story in list(self.stories.values()):
            if not story.given_up and now > story.deadline(self._limit):
                before = story.standing
                story.give_up()
                if story.standing is not before:
                    self.figures.given_up += 1
                    self.waves.note(story, now)
                    yield
        yield from self.silence.look(now, unwatched)
        yield from self.missing.look(now, unwatched)
        forgotten = [key for key, one in self.closed.items() if now - one.at > CLOSED_SECONDS]
        self._vanished = {vm: at for vm, at in self._vanished.items() if now - at < CLOSED_SECONDS}
        for key in forgotten + list(self.closed)[: max(0, len(self.closed) - MAX_CLOSED)]:
            closed = self.closed.pop(key, None)
            if closed is not None and self._by_id.get(closed.event_key) == key:
                del self._by_id[closed.event_key]

    def _is_gone(self, vm: str) -> bool:
        """A Preempt or a Terminate of the VM is over, and it has not come back."""
        at, heard = self._vanished.get(vm), self.silence.heard.get(vm)
        return at is not None and (heard is None or heard.at <= at + heard.interval)

    def _explained(self) -> set[str]:
        """The VMs that an event affects which has started, or was due to."""
        return {
            vm
            for story in self.stories.values()
            if story.standing is STARTED or (story.not_before and story.not_before.timestamp() < self._looked)
            for vm in story.vms
        }

    def _close_all(self, stories: Iterable[Story], now: float) -> None:
        for story in stories:
            key = self._key_of(story.group, story.event.event_id)
            if self.stories.get(key) is story:  # else it came back, in another wave
                self._close(key, story, now)

    def _close(self, key: str, story: Story, now: float) -> None:
        self.stories.pop(key, None)
        self._room.take(story.sender, -weight(story.event.resources))
        if len(self.past) < MAX_WAITING:  # who writes them deletes what is written, the first ones
            self.past.append(PastEvent.of(story, now))
        for one in story.measured.values():
            self.figures.measured.add((story.event.event_type, story.place.region), one.notice, one.interruption)
        if story.event.event_type in VANISHING and story.standing is not CANCELED:
            self._vanished |= dict.fromkeys(story.vms, now)
        self.closed[key] = Closed(story.event.key, story.standing, now, story.nth, story.over or from_unix(now))


def _reopens(closed: Closed, report: Report) -> bool:
    """What looked canceled was not; how it ended was not known; or the EventId was listed again, as another event."""
    if report.reason == "came_back":
        return report.time > closed.over
    return closed.standing in (CANCELED, ENDED) and STRENGTH[report.change] > closed.standing


def _in_time(report: Report, now: float) -> Report:
    """As reported; times that cannot be are replaced by the hub's, which says ``now`` in Unix seconds."""
    latest, earliest = from_unix(now), from_unix(now) - YEAR
    due = report.not_before
    possible = max(report.time, report.first_seen).timestamp() <= now + MAX_AHEAD
    if possible and min(report.time, report.first_seen) > earliest and (due is None or abs(due - latest) < YEAR):
        return report
    time = max(earliest, min(report.time, latest))
    return msgspec.structs.replace(
        report,
        time=time,
        first_seen=max(earliest, min(report.first_seen, time)),
        not_before=due if due is not None and abs(due - latest) < YEAR else None,
    )
