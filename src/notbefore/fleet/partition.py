"""``Partition``: what one partition's log says, folded record by record; and its snapshot. Pure.

The state is a fold over the log: the same records give the same stories, waves and notifications, whoever reads them.
A snapshot holds what is not over yet, and is taken between two records: who goes on from it needs nothing before it.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.core.delivery import Delivery, SinkThread
from notbefore.fleet.merge import CANCELED, ENDED, NEW, OVER, STARTED, STRENGTH, VANISHING, Standing, Story, from_unix
from notbefore.fleet.reading import Beat, Place, Poison, Report, read
from notbefore.fleet.silence import Heard, Silence
from notbefore.fleet.waves import Grouping, Notification, Wave, Waves

FORM: Final = 1  # of a snapshot
CLOSED_SECONDS: Final = 86_400.0  # how long an event that is over is remembered: for late and repeated records
MAX_CLOSED: Final = 20_000
UNWATCHED: Final = 120.0  # seconds between two looks, above which nobody read the hub, or it was away
MAX_AHEAD: Final = 60.0  # seconds by which the clock of a VM may be ahead of the hub's
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for stories beyond their limit

RESULTS: Final = ("news", "known", "late", "beat", "skipped", "poison")
"""What a record was: it changed a story; it did not; its event is over; a sign of life; of no use here; unreadable."""


class Item(Struct, frozen=True):
    """One record of the hub."""

    body: bytes
    sequence: int
    offset: str
    enqueued: float  # Unix seconds, by the hub's clock
    properties: dict[Any, Any] | None = None


class Closed(Struct):
    """An event that is over."""

    standing: Standing  # its own, whatever the rest of its wave did
    at: float  # Unix seconds of the hub's clock
    nth: int
    ids: set[str]
    back: dict[str, datetime] = {}  # as the story had it


class Snapshot(Struct):
    """What goes on after a restart. ``unsettled``: deliveries that no receiver has accepted yet.

    ``threads``: what the sinks have said of the events that are open.
    """

    form: int
    sequence: int
    offset: str
    enqueued: float
    waves: list[Wave] = []
    silent: list[Wave] = []
    missing: list[Wave] = []
    closed: dict[str, Closed] = {}
    unsettled: list[Delivery] = []
    threads: list[SinkThread] = []
    partitions: int = 0  # of the hub, as long as all that is open here had its records come here
    vanished: dict[str, float] = {}  # VMs that an event has deleted, and when
    configured: str = ""  # see ``Grouping``


class PartitionFigures(Struct):
    """What was counted since the last look."""

    records: Counter[str] = msgspec.field(default_factory=Counter)  # by RESULTS
    poison: Counter[str] = msgspec.field(default_factory=Counter)  # by reason
    contradictions: int = 0
    given_up: int = 0
    fell_silent: int = 0
    missing: int = 0  # records that were gone before they were read
    failures: list[str] = []  # errors that nobody foresaw, with their tracebacks
    closed: list[tuple[Story, float]] = []  # events that are over, and since when: Unix seconds of the hub's clock


class Partition:
    """The fold. ``limit``: seconds after NotBefore, or the start, until which it is over, whoever says so."""

    def __init__(
        self,
        name: str,
        grouping: Grouping,
        limit: float,
        on_poison: Callable[[str, Item, Poison], None],
        partitions: int = 0,
    ) -> None:
        self.name = name
        self.partitions = partitions  # see ``Snapshot``
        self._configured = grouping.configured
        self.figures = PartitionFigures()
        self.sequence = -1  # of the last record
        self.offset = ""
        self.enqueued = 0.0
        self.waves = Waves(grouping)
        self.stories: dict[str, Story] = {}
        self.silence = Silence(grouping, self._is_gone, self._is_explained)
        self.missing = Silence(grouping, self._is_gone, self._is_explained, missing=True)
        self.closed: dict[str, Closed] = {}
        self._limit = limit
        self._on_poison = on_poison
        self._looked = 0.0
        self._vanished: dict[str, float] = {}  # VM -> when it was deleted, by an event

    # ---- snapshots

    def event_keys(self) -> set[str]:
        """What the notifications of all that is open are known by."""
        every = (self.waves, self.silence.waves, self.missing.waves)
        return {wave.event_key for waves in every for wave in waves.open.values()}

    def snapshot(self, unsettled: list[Delivery], threads: list[SinkThread]) -> bytes:
        """All that is needed to go on from here, as JSON."""
        return msgspec.json.encode(
            Snapshot(
                FORM,
                self.sequence,
                self.offset,
                self.enqueued,
                list(self.waves.open.values()),
                list(self.silence.waves.open.values()),
                list(self.missing.waves.open.values()),
                self.closed,
                unsettled,
                threads,
                self.partitions,
                self._vanished,
                self._configured,
            )
        )

    def restore(self, found: Snapshot, heard: Iterable[Heard] = ()) -> None:
        """Go on from a snapshot; ``heard``: the VMs as they were written down, which may be some minutes older."""
        heard = list(heard)
        self.silence.restore(found.silent, heard)
        self.missing.restore(found.missing, heard)
        self.sequence, self.offset, self.enqueued = found.sequence, found.offset, found.enqueued
        self._looked = found.enqueued
        self.partitions = found.partitions or self.partitions
        self.waves.restore(found.waves)
        for wave in found.waves:
            self.stories.update(wave.stories)
        self.closed, self._vanished = found.closed, found.vanished

    def begin_anew(self) -> None:
        """The log is another one: its sequence numbers start again. What is open stays open."""
        self.sequence, self.offset = -1, ""

    def vms(self) -> bytes:
        """The VMs that were heard from, as JSON; see ``read_vms``."""
        return msgspec.json.encode([*self.silence.heard.values(), *self.missing.heard.values()])

    # ---- what moves to another partition: see ``fleet.moves``

    def unknown(self, items: Iterable[Item]) -> dict[str, Report]:
        """The events of which nothing is known here, with the first report of each."""
        found: dict[str, Report] = {}
        for item in items:
            one = read(item.body, item.properties)
            if isinstance(one, Report):
                key = one.event_id.casefold()
                if key not in self.stories and key not in self.closed:
                    found.setdefault(key, one)
        return found

    def give(self, report: Report) -> Wave | None:
        """Give up what the event of a report belongs to: of its wave all that comes from the same place."""
        story = Story.begin(report)
        story.add(report)
        wave = wave_of(self.waves.open.values(), report, self.waves.key_of(story))
        return None if wave is None else self.leave({key for key in wave.stories if from_place(wave, key, report)})

    def leave(self, keys: Collection[str]) -> Wave | None:
        """Give up events of one wave: their records come in another partition now. Returns the wave that they are."""
        wave = next((one for one in self.waves.open.values() if one.stories.keys() & keys), None)
        for key in keys:
            self.stories.pop(key, None)
        return None if wave is None else self.waves.split(wave, keys)

    def adopt(self, wave: Wave, now: float) -> None:
        """Go on with a wave of another partition; ``now``: Unix seconds of the hub's clock."""
        for story in wave.stories.values():
            story.heard_at = max(now, story.heard_at + 0.001)  # later than where it was, whatever the clocks
        self.waves.add(wave)
        self.stories |= wave.stories

    def settle(self, partitions: int, since: float) -> None:
        """Say that nothing moves away from here any more, once nothing was last heard of before ``since``.

        ``partitions`` of the hub, ``since`` in Unix seconds of the hub's clock.
        """
        at = [story.heard_at for story in self.stories.values()]
        at += [one.at for one in self.silence.heard.values()]
        if min(at, default=since) >= since:
            self.partitions = partitions

    # ---- the fold

    def add(self, item: Item) -> Iterator[Notification]:
        """Take in one record; yields the notifications that were due before it."""
        if item.sequence <= self.sequence:
            if item.enqueued <= self.enqueued:  # a snapshot may be newer than the checkpoint
                return
            self.begin_anew()  # newer than all that was read: the hub was made anew, and counts from 0 again
        if 0 <= self.sequence < item.sequence - 1:
            self.figures.missing += item.sequence - 1 - self.sequence
        next_due = min(
            self.waves.next_due, self.silence.waves.next_due, self.missing.waves.next_due, self._looked + LOOK_EVERY
        )
        if item.enqueued >= next_due:
            yield from self.advance(item.enqueued)
        self.sequence, self.offset, self.enqueued = item.sequence, item.offset, item.enqueued
        try:
            found = read(item.body, item.properties)
            if isinstance(found, Report):
                found = _in_time(found, item.enqueued)
                yield from self._end_if_back(found, item.enqueued)
            result = self._take(found, item)
        except Exception as error:  # noqa: BLE001 - nobody foresaw it: set aside, it keeps no other record waiting
            self.figures.failures.append(traceback.format_exc())
            result = self._set_aside(Poison("failed", f"{type(error).__name__}: {error}"), item)
        self.figures.records[result] += 1

    def advance(self, now: float) -> Iterator[Notification]:
        """Nothing older than ``now``, in Unix seconds of the hub's clock, will come; yields what is due by then."""
        try:
            yield from self._advance(now)
        except Exception:  # noqa: BLE001 - nobody foresaw it: the next call goes on with what comes after it
            self.figures.failures.append(traceback.format_exc())

    def _advance(self, now: float) -> Iterator[Notification]:
        if now - self._looked >= LOOK_EVERY:
            self._look(now)
        for wave, made in self.waves.flush(now):
            if wave.key not in self.waves.open:  # it is over
                for key, story in wave.stories.items():
                    if self.stories.get(key) is story:  # else it came back, in another wave
                        self._close(key, story, now)
            if made is not None:
                yield made
        yield from self.silence.flush(now)
        yield from self.missing.flush(now)

    def _take(self, found: Report | Beat | Poison | None, item: Item) -> str:
        if isinstance(found, Report):
            self.silence.hear(found, item.enqueued)
            return self._report(found, item.enqueued)
        if isinstance(found, Beat):
            self.silence.hear(found, item.enqueued)
            for event_id in found.listed:  # so it is not over
                if (story := self.stories.get(event_id.casefold())) is not None:
                    story.heard_at = item.enqueued
            return "beat"
        if found is None:
            return "skipped"
        return self._set_aside(found, item)

    def _set_aside(self, poison: Poison, item: Item) -> str:
        self.figures.poison[poison.reason] += 1
        self._on_poison(self.name, item, poison)
        return "poison"

    def _end_if_back(self, report: Report, now: float) -> Iterator[Notification]:
        """End an open event whose id is another event's now; its wave may go on."""
        key = report.event_id.casefold()
        story = self.stories.get(key)
        if story is None or not story.comes_back(report):
            return
        story.ids.discard(report.change_id)  # those that came back earlier have added it
        if story.standing not in OVER:
            story.give_up()
            self.figures.given_up += 1
        self.waves.note(story, now)
        yield from self.advance(now)
        if key in self.stories:
            self._close(key, story, now)

    def _report(self, report: Report, now: float) -> str:
        key = report.event_id.casefold()
        story = self.stories.get(key)
        if story is not None and story.is_of_before(report):
            return "late"
        if story is not None:
            story.heard_at = now
            contradicted = story.contradicted
            news = story.add(report)
            self.figures.contradictions += story.contradicted > contradicted
            if news:
                if not story.by_affected:
                    self._locate(story)
                self.waves.note(story, now)
            return "news" if news else "known"
        closed = self.closed.get(key)
        if closed is not None and not _reopens(closed, report):
            return "late"
        story = Story.begin(report)
        story.heard_at = now
        notified = NEW
        if closed is not None:
            came_back = report.reason == "came_back"
            story.nth, story.ids = closed.nth + came_back, closed.ids
            if came_back:
                story.begin_again(closed.back, report)
            notified = NEW if came_back else closed.standing
            self.figures.contradictions += closed.standing is CANCELED and not came_back
            del self.closed[key]
        self.stories[key] = story
        story.add(report)
        self._locate(story)
        story.place = self.silence.one_of(story.place)
        self.waves.note(story, now, notified)
        return "news"

    def _locate(self, story: Story) -> None:
        """The affected VMs are where their heartbeats say, whoever reports the event first."""
        for name in map(str.casefold, story.affected):
            heard = self.silence.heard.get(name)
            if heard is not None:
                story.locate(heard.place, heard.zone, affected=True)

    def _look(self, now: float) -> None:
        """End what is long overdue, and forget what is long over."""
        unwatched = now - self._looked if self._looked and now - self._looked > UNWATCHED else 0.0
        self._looked = now
        for story in self.stories.values():
            if not story.given_up and now > story.deadline(self._limit):
                before = story.standing
                story.give_up()
                if story.standing is not before:
                    self.figures.given_up += 1
                    self.waves.note(story, now)
        self.silence.look(now, unwatched)
        self.missing.look(now, unwatched)
        self.figures.fell_silent += self.silence.fell_silent
        self.silence.fell_silent = 0
        forgotten = [key for key, one in self.closed.items() if now - one.at > CLOSED_SECONDS]
        self._vanished = {vm: at for vm, at in self._vanished.items() if now - at < CLOSED_SECONDS}
        for key in forgotten + list(self.closed)[: max(0, len(self.closed) - MAX_CLOSED)]:
            self.closed.pop(key, None)

    def _is_gone(self, vm: str) -> bool:
        """A Preempt or a Terminate of the VM is over, and it has not come back."""
        at, heard = self._vanished.get(vm), self.silence.heard.get(vm)
        return at is not None and (heard is None or heard.at <= at + heard.interval)

    def _is_explained(self, vm: str) -> bool:
        """An event that has started, or was due to, affects the VM."""
        return any(
            vm in map(str.casefold, story.affected)
            for story in self.stories.values()
            if story.standing is STARTED or (story.not_before and story.not_before.timestamp() < self._looked)
        )

    def _close(self, key: str, story: Story, now: float) -> None:
        self.stories.pop(key, None)
        self.figures.closed.append((story, now))
        if story.event.event_type in VANISHING and story.standing is not CANCELED:
            self._vanished |= dict.fromkeys(map(str.casefold, story.affected), now)
        self.closed[key] = Closed(story.standing, now, story.nth, story.ids, story.back)


def _reopens(closed: Closed, report: Report) -> bool:
    """What looked canceled was not; it starts only now; or the EventId was listed again, under an unknown change."""
    if report.change_id in closed.ids:
        return False
    if closed.standing is CANCELED and STRENGTH[report.change] >= STARTED:
        return True
    if closed.standing is ENDED and report.change == "started" and report.time.timestamp() > closed.at:
        return True
    return report.reason == "came_back"


def _in_time(report: Report, now: float) -> Report:
    """As reported; a clock that is far ahead of the hub's, which says ``now`` in Unix seconds, does not count."""
    if max(report.time, report.first_seen).timestamp() <= now + MAX_AHEAD:
        return report
    latest = from_unix(now)
    return msgspec.structs.replace(
        report, time=min(report.time, latest), first_seen=min(report.first_seen, report.time, latest)
    )


def wave_of(waves: Iterable[Wave], report: Report, key: tuple[str, ...]) -> Wave | None:
    """The wave that has the event of a report, else the one of this key with events of the same place."""
    waves = list(waves)
    event = report.event_id.casefold()
    found = next((wave for wave in waves if event in wave.stories), None)
    return found or next(
        (wave for wave in waves if wave.key == key and any(from_place(wave, one, report) for one in wave.stories)), None
    )


def from_place(wave: Wave, key: str, report: Report) -> bool:
    """Whether an event of a wave goes where the report goes: the hub keeps together what comes from one place."""
    return key == report.event_id.casefold() or _group(wave.stories[key].place) == _group(report.place)


def _group(place: Place) -> tuple[str, ...]:
    """What the hub sends to one partition: see ``core.record.partition_key``."""
    return place.subscription, place.resource_group, place.scale_set


def mark_of(delivery_id: str) -> str:
    """What a delivery is known by among those that were accepted: 64 of its 128 bits."""
    return delivery_id[:16]


def read_snapshot(body: bytes) -> Snapshot:
    """Read a snapshot; raises ``msgspec.MsgspecError`` or ``ValueError`` for one of another form."""
    found = msgspec.json.decode(body, type=Snapshot)
    if found.form != FORM:
        raise ValueError(f"a snapshot of form {found.form}, expected {FORM}")
    return found


def read_vms(body: bytes) -> list[Heard]:
    """Read the VMs that were heard from; raises ``msgspec.MsgspecError``."""
    return msgspec.json.decode(body, type=list[Heard])
