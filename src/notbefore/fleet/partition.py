"""``Partition``: the fold over the log of one partition, and its snapshot. Pure, but it logs.

The same records give the same stories, waves and notifications, whichever instance reads them. A
snapshot contains what is not over yet. It is taken between two records, so its next owner needs no
earlier ones.

The fold works in steps: it ends one overdue event, looks at the VMs of one place, or notifies of
one wave. Before a record is applied, ``add`` takes all steps that are due. They may be many, so a
caller that has other things to do takes them in chunks first (``is_due``, ``advance_chunk``).
"""

import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Final

import msgspec

from notbefore.core.outbox_rows import OutboxImage
from notbefore.fleet.azure_messages import AzureMessages, AzureReport, read_record
from notbefore.fleet.events import MAX_AHEAD, Events
from notbefore.fleet.hub_records import Beat, PartitionFigures, PoisonError, Report
from notbefore.fleet.notification import Notification
from notbefore.fleet.silence import Silence
from notbefore.fleet.snapshot import Position, Snapshot
from notbefore.fleet.story import OVER, from_unix
from notbefore.fleet.waves import Grouping

CHUNK: Final = 8  # steps that ``advance_chunk`` takes: a step of a large wave needs milliseconds
UNWATCHED: Final = 120.0  # seconds between two looks; after more, the hub was not read meanwhile
YEAR: Final = timedelta(days=366)  # a time that a VM reports may not be further away
LOOK_EVERY: Final = 30.0  # seconds of the hub's clock between two looks for overdue events and VMs
# the results of messages; a record with several messages has the first of their results
RESULTS: Final = ("news", "poison", "late", "known", "skipped")

log = logging.getLogger("notbefore.fleet.partition")


class Partition:
    """The fold over one partition. ``state``: the previous owner's, changed in place."""

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

    def hub_has(self, partitions: int, others: Collection[Snapshot] = (), now: float = 0.0) -> None:
        """Note how many partitions the hub has.

        If their number has changed, VMs may use another partition now: forget the VMs here, and
        expect those of the others. ``others``: the states of the other partitions. ``now``: Unix
        seconds of the hub's clock.
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

        A newer record with a smaller number was not read: the hub was created again, and counts
        from 0.
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
