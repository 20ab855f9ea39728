"""``Partition``: what one partition's log says, folded record by record; and its snapshot. Pure, but for its log.

The state is a fold over the log: the same records give the same stories, waves and notifications, whoever reads them.
A snapshot holds what is not over yet, and is taken between two records: who goes on from it needs nothing before it.
"""

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import msgspec

from notbefore.core.outbox import OutboxImage
from notbefore.fleet.events import Events
from notbefore.fleet.hub_records import Beat, PartitionFigures, Poison, Report, read
from notbefore.fleet.silence import Silence
from notbefore.fleet.snapshot import Position, Snapshot
from notbefore.fleet.story import from_unix
from notbefore.fleet.waves import Grouping, Notification

UNWATCHED: Final = 120.0  # seconds between two looks, above which nobody read the hub, or it was away
MAX_AHEAD: Final = timedelta(seconds=60)  # by which the clock of a VM may be ahead of the hub's
YEAR: Final = timedelta(days=366)  # no time that a VM reports is further away
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for stories beyond their limit

log = logging.getLogger("notbefore.fleet.partition")


class Partition:
    """The fold. ``state``: of who had the partition before; from now on it is this one's.

    ``backlog``: the last record that the hub had before it was read for the first time: what is over by then is
    history, and no news; -1 without one.
    """

    def __init__(
        self,
        name: str,
        grouping: Grouping,
        state: Snapshot | None = None,
        *,
        backlog: int = -1,
        figures: PartitionFigures | None = None,
    ) -> None:
        self.name = name
        self.figures = figures or PartitionFigures()
        self.state = state = state or Snapshot(backlog=backlog)
        self.events = events = Events(grouping, state, self.figures)
        self.silence = Silence(grouping, state.silent, state.heard)
        self.missing = Silence(grouping, state.missing, state.expected, missing=True)
        self._every = events.waves, self.silence.waves, self.missing.waves
        self._looked = state.position.enqueued

    @property
    def position(self) -> Position:
        """Up to where the log was read."""
        return self.state.position

    def event_keys(self) -> set[str]:
        """What the notifications of all that is open are known by."""
        return {wave.event_key for waves in self._every for wave in waves.open.values()}

    def snapshot(self, at: float, outbox: OutboxImage | None = None) -> bytes:
        """All that is needed to go on from here, as MessagePack: see ``read_snapshot``."""
        state = self.state
        state.waves, state.silent, state.missing = (list(one.open.values()) for one in self._every)
        state.at, state.outbox = at, outbox or OutboxImage()
        return msgspec.msgpack.encode(state)

    def hub_has(self, partitions: int) -> None:
        """So many partitions. Where they were fewer, its VMs may send their heartbeats to another one by now."""
        if partitions != self.state.partitions:
            self.state.partitions = partitions
            self.silence.forget_all()

    def begin_anew(self) -> None:
        """The log is another one: its sequence numbers start again. What is open stays open."""
        self.state.position, self.state.backlog = Position(enqueued=self.position.enqueued), -1

    # ---- the fold

    def add(self, body: bytes, at: Position) -> Iterator[Notification | None]:
        """Take in one record; yields the notifications that were due before it, as ``advance`` does."""
        if at.sequence <= self.position.sequence:
            if at.enqueued <= self.position.enqueued:  # a snapshot may be newer than the checkpoint
                return
            self.begin_anew()  # newer than all that was read: the hub was made anew, and counts from 0 again
        if self.position.sequence >= 0:
            self.figures.missing += at.sequence - 1 - self.position.sequence
        if at.enqueued >= self.next_due:
            yield from self.advance(at.enqueued)
        self.state.position = at
        try:
            result = self._take(read(body), at.enqueued)
        except Exception as error:  # noqa: BLE001 - nobody foresaw it: set aside, it keeps no other record waiting
            self.figures.errors["fold"] += 1
            result = self._set_aside(Poison("failed", f"please report it: {type(error).__name__}: {error}"), error)
        if isinstance(result, Poison):
            result = self._set_aside(result)
        self.figures.records[result] += 1

    def _set_aside(self, poison: Poison, error: Exception | None = None) -> str:
        """Count a record that is not used; log the first one of each partition and reason."""
        said, kind = self.figures.said, (self.name, poison.reason)
        text = "partition %s, sequence number %d: a record is not used (%s: %s); more of them are only counted"
        level = logging.DEBUG if kind in said else logging.WARNING
        log.log(level, text, self.name, self.position.sequence, poison.reason, poison.detail[:200], exc_info=error)
        said.add(kind)
        self.figures.poison[poison.reason] += 1
        return "poison"

    @property
    def next_due(self) -> float:
        """Unix seconds of the hub's clock: before, ``advance`` has nothing to do."""
        return min(self._looked + LOOK_EVERY, *(waves.next_due for waves in self._every))

    def advance(self, now: float) -> Iterator[Notification | None]:
        """Nothing older than ``now``, in Unix seconds of the hub's clock, will come; yields what is due by then.

        ``None``: others may have their turn.
        """
        if self.position.sequence < self.state.backlog:
            return
        try:
            yield from self._advance(now)
        except Exception:  # nobody foresaw it: the next call goes on with what comes after it
            self.figures.errors["fold"] += 1
            log.exception("partition %s: an error that nobody foresaw. Please report it.", self.name)

    def _advance(self, now: float) -> Iterator[Notification | None]:
        events = self.events
        if self.state.backlog >= 0:
            self.state.backlog = -1
            events.close(events.waves.forget_over(), now)
        if now - self._looked >= LOOK_EVERY:
            unwatched = now - self._looked if self._looked and now - self._looked > UNWATCHED else 0.0
            self._looked = now
            yield from events.look(now)
            for one in (self.silence, self.missing):
                yield from one.look(now, unwatched, events.is_gone, events.explained)
        for waves in self._every:
            for wave, made in waves.flush(now):
                if wave.key not in waves.open:  # it is over
                    events.close(wave.stories.values(), now)
                if made is not None:
                    yield made

    def _take(self, found: Report | Beat | Poison | None, now: float) -> str | Poison:
        """Take in what a record says; returns what it was: see ``RESULTS``."""
        if found is None:
            return "skipped"
        if isinstance(found, Poison):
            return found
        if not self.silence.hear(found, now):
            return Poison("too_many", f"VMs in the group {found.group}")
        if isinstance(found, Report):
            return self.events.report(_in_time(found, now), now)
        self.events.listed(found.group, found.listed, now)
        return "beat"


def _in_time(report: Report, now: float) -> Report:
    """As reported; times that cannot be are replaced by the hub's, which says ``now`` in Unix seconds."""
    latest, due = from_unix(now), report.not_before
    earliest = latest - YEAR
    if due is not None and abs(due - latest) >= YEAR:
        due = None
    elif earliest < min(report.time, report.first_seen) and max(report.time, report.first_seen) <= latest + MAX_AHEAD:
        return report
    time = max(earliest, min(report.time, latest))
    first_seen = max(earliest, min(report.first_seen, time))
    return msgspec.structs.replace(report, time=time, first_seen=first_seen, not_before=due)
