"""``Partition``: the fold over the log of one partition, record by record; and its snapshot. Pure, except for logging.

The same records give the same stories, waves and notifications, whichever instance reads them. A snapshot contains
what is not over yet. It is taken between two records, so whoever continues from it needs no earlier records.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final

import msgspec

from notbefore.core.document import VANISHING
from notbefore.core.outbox_rows import OutboxImage
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_records import Beat, PartitionFigures, PoisonError, Report, read
from notbefore.fleet.silence import FORGET_SECONDS, Silence
from notbefore.fleet.snapshot import Closed, Position, Snapshot
from notbefore.fleet.story import CANCELED, ENDED, FINISHED, NEW, OVER, STARTED, STRENGTH, Standing, Story, from_unix
from notbefore.fleet.waves import Grouping, Notification, Waves

UNWATCHED: Final = 120.0  # seconds between two looks; if more have passed, the hub was not read, or was unavailable
MAX_AHEAD: Final = timedelta(seconds=60)  # by which the clock of a VM may be ahead of the hub's
YEAR: Final = timedelta(days=366)  # a time that a VM reports may not be further away
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for overdue events and silent VMs
CLOSED_SECONDS: Final = 30 * 86_400.0  # how long an event that is over is remembered: a VM may be off for weeks
MAX_CLOSED: Final = 20_000
MAX_WAITING: Final = 5_000  # events that wait to be written to the history; any more are left out of it
MAX_OPEN: Final = 20_000  # events that are open
MAX_OPEN_OF_GROUP: Final = 5_000  # of them in one resource group: its VMs can report anything of each other
MAX_OPEN_OF_ONE: Final = 1_000  # of them that one VM reported first
NAMES_OF_ONE: Final = 4_096  # characters of affected VMs' names; each time as many count as one more event

log = logging.getLogger("notbefore.fleet.partition")


class Events:
    """The open events of a partition, changed by reports; ``state``: the part of them that a snapshot keeps."""

    def __init__(self, grouping: Grouping, state: Snapshot) -> None:
        self.waves = Waves(grouping, state.waves)
        self.open: dict[str, Story] = {}  # by resource group and EventId
        self._state = state
        self._limit = grouping.over_after
        self._taken: Counter[str] = Counter()  # the weights of open events, summed by the keys of ``_bounds``
        self._by_id: dict[str, str] = {}  # EventId -> the key of the first event that has it
        found = [story for wave in state.waves.values() for story in wave.stories.values()]
        for story in sorted(found, key=lambda one: -one.nth):  # the id of an event may be back in another wave
            if story.key not in self.open and story.key not in state.closed:
                self._keep(story.key, story)
                if not story.shares_id:
                    self._by_id[story.event.key] = story.key
        for key, closed in state.closed.items():
            if closed.event_key:
                self._by_id[closed.event_key] = key

    def report(self, report: Report, now: float) -> str:
        """Apply a report; return its result (``PartitionFigures``). Raises ``PoisonError`` if there is no room."""
        key = report.place.group + report.event_id.casefold()
        story = self.open.get(key)
        if story is not None and story.standing in OVER and _came_back(report, story.over or from_unix(now)):
            self._close(story, now)  # the id belongs to a new event now; the wave of the old one may go on
            story = None
        closed = self._state.closed.get(key)
        if story is None and closed is not None and not _reopens(closed, report):
            return "late"
        if story is None:
            story = self._begin(key, report, closed, now)
        elif story.began is not None and report.time < story.began:
            return "late"  # about the earlier event with this id
        before = _weight(story.event.resources)
        if _weight(report.resources) > before and self._is_full(story):
            raise PoisonError("too_many", f"VMs of open events of {story.sender}")
        story.heard_at, placed = now, story.place
        news = story.add(report)
        self._count(story, _weight(story.event.resources) - before)
        if news:
            self._locate(story)
            self._note(story, now, closed.standing if closed is not None and story.began is None else NEW)
        elif story.place != placed:
            self.waves.route(story)
        return "news" if news else "known"

    def _note(self, story: Story, now: float, notified: Standing = NEW) -> None:
        """Note that an event is new or has changed, and which VMs it has deleted: at once, as its wave may go on."""
        if story.event.event_type in VANISHING and story.standing in (ENDED, FINISHED):  # not canceled
            self._state.vanished |= dict.fromkeys(story.vms, now)
        self.waves.note(story, now, notified)

    def listed(self, group: str, event_ids: Iterable[str], now: float) -> None:
        """Note that a VM lists these events: they are not over."""
        for event_id in event_ids:
            if (story := self.open.get(group + event_id.casefold())) is not None:
                story.heard_at = now

    def _begin(self, key: str, report: Report, closed: Closed | None, now: float) -> Story:
        """Begin a story; the report must also be added. ``closed``: the event with this id that was over, if any."""
        story = Story.begin(report)
        if self._is_full(story):
            raise PoisonError("too_many", f"open events of {story.sender}")
        if closed is not None:
            if report.reason == "came_back":
                story.nth, story.began = closed.nth + 1, min(report.time, from_unix(now))
            else:
                story.nth, story.late = closed.nth, report.time.timestamp() <= closed.at
            del self._state.closed[key]
        self._keep(key, story)
        story.shares_id = self._by_id.setdefault(story.event.key, key) != key
        return story

    def _keep(self, key: str, story: Story) -> None:
        self.open[key] = story
        self._count(story, _weight(story.event.resources))

    def _is_full(self, story: Story) -> bool:
        """Whether there is no room for more. What one VM invents takes no room from the events of others."""
        return any(self._taken[one] >= bound for one, bound in _bounds(story).items())

    def _count(self, story: Story, more: int) -> None:
        for one in _bounds(story):
            self._taken[one] += more
            if not self._taken[one]:
                del self._taken[one]

    def _locate(self, story: Story) -> None:
        """Use the places in the heartbeats of the affected VMs, whichever VM reports the event first."""
        for name in story.vms:
            if (heard := self._state.heard.get(name)) is not None:
                story.locate(heard.place, affected=True)

    def look(self, now: float) -> Iterator[None]:
        """End overdue events, and forget those that were over long ago. After each step, other tasks may get a turn."""
        for story in list(self.open.values()):
            if not story.given_up and now > story.deadline(self._limit):
                before = story.standing
                story.give_up()
                if story.standing is not before:
                    self._note(story, now)
                    yield
        for vm in [vm for vm, at in self._state.vanished.items() if now - at >= FORGET_SECONDS]:
            del self._state.vanished[vm]
        for key, one in list(self._state.closed.items()):
            if now - one.at <= CLOSED_SECONDS and len(self._state.closed) <= MAX_CLOSED:
                break
            del self._state.closed[key]
            if self._by_id.get(one.event_key) == key:
                del self._by_id[one.event_key]

    def is_gone(self, vm: str) -> bool:
        """Whether a Preempt or a Terminate of the VM is over, and the VM has not come back."""
        at, heard = self._state.vanished.get(vm), self._state.heard.get(vm)
        return at is not None and (heard is None or heard.at <= at + heard.interval)

    def explained(self, now: float) -> set[str]:
        """Return the VMs that are affected by an event under way: it has started, or its NotBefore has passed."""
        return {
            vm
            for story in self.open.values()
            if story.standing is STARTED
            or (story.standing not in OVER and story.not_before and story.not_before.timestamp() < now)
            for vm in story.vms
        }

    def close(self, stories: Iterable[Story], now: float) -> None:
        """Close these stories, which are over. One whose id has come back in another wave is closed already."""
        for story in stories:
            if self.open.get(story.key) is story:
                self._close(story, now)

    def _close(self, story: Story, now: float) -> None:
        del self.open[story.key]
        self._count(story, -_weight(story.event.resources))
        if len(self._state.past) < MAX_WAITING:  # the writer deletes the first ones, which it has written
            self._state.past.append(PastEvent.closed_at(now, story))
        first = "" if story.shares_id else story.event.key
        self._state.closed[story.key] = Closed(first, story.standing, now, story.nth, story.over or from_unix(now))


class Partition:
    """The fold. ``state``: that of the previous owner; the fold changes it in place."""

    def __init__(
        self, name: str, grouping: Grouping, state: Snapshot | None = None, figures: PartitionFigures | None = None
    ) -> None:
        self.name = name
        self.figures = figures or PartitionFigures()
        self.state = state = state or Snapshot()
        self.events = events = Events(grouping, state)
        self.silence = Silence(grouping, state.silent, state.heard)
        self.missing = Silence(grouping, state.missing, state.expected, missing=True)
        self._every = events.waves, self.silence.waves, self.missing.waves
        state.looked = max(state.looked, state.position.enqueued)

    def event_keys(self) -> set[str]:
        """Return the event keys of all open waves."""
        return {wave.event_key for waves in self._every for wave in waves.open.values()}

    def snapshot(self, at: float, outbox: OutboxImage | None = None) -> bytes:
        """Return all that is needed to continue from here, as MessagePack. ``at``: Unix seconds of the hub's clock."""
        self.state.at, self.state.outbox = at, outbox or OutboxImage()
        return msgspec.msgpack.encode(self.state)

    def hub_has(self, partitions: int) -> None:
        """Note the number of partitions. If it has changed, forget the VMs: they may use another partition now."""
        if partitions != self.state.partitions:
            self.state.partitions = partitions
            self.silence.expect({}, 0.0, 0.0)

    # ---- the fold

    def add(self, body: bytes, at: Position) -> Iterator[Notification | None]:
        """Apply one record; before it, yield the notifications that were due, as ``advance`` does."""
        if at.sequence <= self.state.position.sequence:
            if at.enqueued <= self.state.position.enqueued:  # a snapshot may be newer than the checkpoint
                return
            self.state.backlog = -1  # a newer record, a smaller number: the hub was created again, and counts from 0
        elif self.state.position.sequence >= 0:
            self.figures.missing += at.sequence - 1 - self.state.position.sequence
        yield from self.advance(at.enqueued)
        self.state.position = at
        try:
            result = self._take(read(body), at.enqueued)
        except PoisonError as error:
            result = self._set_aside(error)
        except Exception as error:  # noqa: BLE001 - unforeseen: set aside, it does not stop the other records
            self.figures.errors["fold"] += 1
            result = self._set_aside(PoisonError("failed", f"please report it: {type(error).__name__}: {error}"), error)
        self.figures.records[result] += 1

    def _set_aside(self, poison: PoisonError, error: Exception | None = None) -> str:
        """Count a record that is not used; log the first one of each partition and reason."""
        said, kind = self.figures.said, (self.name, poison.reason)
        text = "partition %s, sequence number %d: a record is not used (%s: %s); more of them are only counted"
        level = logging.DEBUG if kind in said else logging.WARNING
        log.log(level, text, self.name, self.state.position.sequence, poison.reason, str(poison)[:200], exc_info=error)
        said.add(kind)
        self.figures.poison[poison.reason] += 1
        return "poison"

    def advance(self, now: float) -> Iterator[Notification | None]:
        """Yield what is due by ``now``, in Unix seconds of the hub's clock: no older record will come.

        ``None``: other tasks may get a turn.
        """
        if self.state.position.sequence < self.state.backlog:
            return
        try:
            yield from self._advance(now)
        except Exception:  # unforeseen: the next call continues after what has failed
            self.figures.errors["fold"] += 1
            log.exception("partition %s: unforeseen error, please report it", self.name)

    def _advance(self, now: float) -> Iterator[Notification | None]:
        events = self.events
        if self.state.backlog >= 0:
            self.state.backlog = -1
            events.close(events.waves.forget_over(), now)
        if abs(now - self.state.looked) >= LOOK_EVERY:  # before the first record, this machine's clock may be ahead
            unwatched = now - self.state.looked if self.state.looked and now - self.state.looked > UNWATCHED else 0.0
            self.state.looked = now
            yield from events.look(now)
            for one in (self.silence, self.missing):
                yield from one.look(now, unwatched, events.is_gone, events.explained)
        for waves in self._every:
            for wave, made in waves.flush(now):
                if wave.standing in OVER:
                    events.close(wave.stories.values(), now)
                yield made

    def _take(self, found: Report | Beat | None, now: float) -> str:
        """Apply a decoded record; return its result: see ``PartitionFigures``. Raises ``PoisonError``."""
        if found is None:
            return "skipped"
        self.silence.hear(found, now)
        if isinstance(found, Report):
            return self.events.report(_in_time(found, now), now)
        self.events.listed(found.place.group, found.listed, now)
        return "beat"


def _in_time(report: Report, now: float) -> Report:
    """Correct impossible times of a report by the hub's clock, which shows ``now`` in Unix seconds."""
    latest, due = from_unix(now), report.not_before
    earliest = latest - YEAR
    if due is not None and abs(due - latest) >= YEAR:
        due = None
    elif earliest < min(report.time, report.first_seen) and max(report.time, report.first_seen) <= latest + MAX_AHEAD:
        return report
    time = max(earliest, min(report.time, latest))
    first_seen = max(earliest, min(report.first_seen, time))
    return msgspec.structs.replace(report, time=time, first_seen=first_seen, not_before=due)


def _bounds(story: Story) -> dict[str, int]:
    """Return the bounds that apply to an event: of the partition, of its group, of the VM that reported it first."""
    return {"": MAX_OPEN, story.group: MAX_OPEN_OF_GROUP, story.sender: MAX_OPEN_OF_ONE}


def _weight(resources: tuple[str, ...]) -> int:
    """Return how many open events an event with these affected VMs counts as."""
    return 1 + sum(map(len, resources)) // NAMES_OF_ONE


def _came_back(report: Report, over: datetime) -> bool:
    """Whether the EventId is listed again, for a new event. Repeated or late reports are about the first one."""
    return report.reason == "came_back" and report.time > over


def _reopens(closed: Closed, report: Report) -> bool:
    """Whether a report reopens an event: it was not canceled, its end was unknown, or the EventId is a new event's."""
    if report.reason == "came_back":
        return _came_back(report, closed.over)
    return closed.standing in (CANCELED, ENDED) and STRENGTH[report.change] > closed.standing
