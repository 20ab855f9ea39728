"""``Partition``: what one partition's log says, folded record by record; and its snapshot. Pure.

The state is a fold over the log: the same records give the same stories, waves and notifications, whoever reads them.
A snapshot holds what is not over yet, and is taken between two records: who goes on from it needs nothing before it.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.outbox import OutboxImage
from notbefore.fleet.events import Events
from notbefore.fleet.figures import PartitionFigures, Unread
from notbefore.fleet.hub_records import Beat, Poison, Report, read
from notbefore.fleet.silence import Heard, Silence
from notbefore.fleet.snapshot import FORM, Snapshot
from notbefore.fleet.story import from_unix
from notbefore.fleet.waves import Grouping, Notification, Waves

UNWATCHED: Final = 120.0  # seconds between two looks, above which nobody read the hub, or it was away
MAX_AHEAD: Final = 60.0  # seconds by which the clock of a VM may be ahead of the hub's
YEAR: Final = timedelta(days=366)  # no time that a VM reports is further away
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for stories beyond their limit


class Item(Struct, frozen=True):
    """One record of the hub."""

    body: bytes
    sequence: int
    offset: str
    enqueued: float  # Unix seconds, by the hub's clock


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
        self.muted: set[str] = set()  # event keys of open waves that nobody was notified of
        self.sequence = -1  # of the last record
        self.offset = ""
        self.enqueued = 0.0
        heard: dict[str, Heard] = {}
        self.events = events = Events(grouping, self.figures, heard)
        self.silence = Silence(grouping, heard, events.is_gone, events.explained)
        self.missing = Silence(grouping, {}, events.is_gone, events.explained, missing=True)
        self._backlog = backlog
        self._looked = 0.0

    def event_keys(self) -> set[str]:
        """What the notifications of all that is open are known by."""
        return {wave.event_key for waves in self._every for wave in waves.open.values()}

    @property
    def _every(self) -> tuple[Waves, ...]:
        return self.events.waves, self.silence.waves, self.missing.waves

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
            closed=self.events.closed,
            vanished=self.events.vanished,
            heard=self.silence.heard,
            expected=self.missing.heard,
            outbox=outbox or OutboxImage(),
            past=self.events.past,
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
        self.events.restore(found)
        self.muted = set(found.muted)

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
            self.figures.failures.append(error)
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
        except Exception as error:  # noqa: BLE001 - nobody foresaw it: the next call goes on with what comes after it
            self.figures.failures.append(error)

    def _advance(self, now: float) -> Iterator[Notification | None]:
        events = self.events
        if self._backlog >= 0:
            self._backlog = -1
            events.close(events.waves.forget_over(), now)
        if now - self._looked >= LOOK_EVERY:
            unwatched = now - self._looked if self._looked and now - self._looked > UNWATCHED else 0.0
            self._looked = now
            yield from events.look(now)
            yield from self.silence.look(now, unwatched)
            yield from self.missing.look(now, unwatched)
        for wave, made in events.waves.flush(now):
            if wave.key not in events.waves.open:  # it is over
                events.close(wave.stories.values(), now)
            if made is not None:
                yield made
        yield from self.silence.flush(now)
        yield from self.missing.flush(now)

    def _take(self, found: Report | Beat | Poison | None, item: Item) -> str:
        if found is None:
            return "skipped"
        if not isinstance(found, Poison) and not self.silence.hear(found, item.enqueued):
            found = Poison("too_many", f"VMs in the group {found.group}")
        if isinstance(found, Beat):
            self.events.listed(found.group, found.listed, item.enqueued)
            return "beat"
        result = self.events.report(found, item.enqueued) if isinstance(found, Report) else found
        return self._set_aside(result, item) if isinstance(result, Poison) else result

    def _set_aside(self, poison: Poison, item: Item) -> str:
        self.figures.poison[poison.reason] += 1
        self.figures.unread.append(Unread(self.name, item.sequence, poison))
        return "poison"


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
