"""The history of a fleet: one JSON line for each event that is over, in one file a month.

The lines are appended before the snapshot that no longer holds their events is written, so a kill loses none. The fold
replays what lies behind the snapshot: an event that is in the files with the same outcome is not written again. Where
the outcome turns out to be another one, a second line follows, and the last line of an event counts.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from notbefore.config.model import Config
from notbefore.core.change import Outcome
from notbefore.fleet.merge import CANCELED, FINISHED, Story, from_unix

MAX_KNOWN: Final = 20_000  # events whose lines are remembered: the fold replays far less
MAX_WAITING: Final = 5_000  # lines that wait for a disk that cannot be written; the oldest are dropped
RETRY_INTERVAL: Final = 2.0  # seconds between attempts to write to a disk that cannot be written
SUFFIX: Final = ".jsonl"
BLOCK: Final = 64 * 1024  # bytes read at once, backwards

log = logging.getLogger("notbefore.fleet.history")


class VmMeasures(Struct, frozen=True):
    """What one affected VM measured, in seconds; ``None`` where it did not."""

    vm: str
    notice: float | None = None
    started_for: float | None = None
    interruption: float | None = None


class PastEvent(Struct, frozen=True):
    """One line: an event that is over, as all VMs together saw it."""

    event_id: str
    nth: int  # how often an event of this id was over before
    event_type: str
    event_source: str | None
    region: str
    zone: str
    scale_set: str
    resource_group: str
    subscription: str
    description: str | None
    expected_seconds: int | None  # the interruption that Azure expected
    vms: tuple[str, ...]  # that it affected
    reported_by: int  # VMs
    first_seen: datetime
    not_before: datetime | None
    started: datetime | None
    over: datetime | None  # by the last VM's word
    closed: datetime  # by the hub's clock; it says which file the line is in
    outcome: Outcome
    as_far_as_known: bool  # not every VM said that it was over
    contradicted: bool  # one VM said that it started, another that it was canceled
    exercise: bool
    measured: tuple[VmMeasures, ...]

    @classmethod
    def of(cls, story: Story, closed: float) -> "PastEvent":
        """The line of a story; ``closed``: Unix seconds of the hub's clock."""
        event, place = story.event, story.place
        return cls(
            event_id=event.event_id,
            nth=story.nth,
            event_type=event.event_type,
            event_source=event.event_source,
            region=place.region,
            zone=story.zone,
            scale_set=place.scale_set,
            resource_group=place.resource_group,
            subscription=place.subscription,
            description=event.description,
            expected_seconds=event.duration,
            vms=story.affected,
            reported_by=len(story.reported),
            first_seen=story.first_seen,
            not_before=story.not_before,
            started=story.started,
            over=story.over,
            closed=from_unix(closed),
            outcome=_outcome(story),
            as_far_as_known=story.given_up,
            contradicted=story.contradicted,
            exercise=story.exercise,
            measured=tuple(
                VmMeasures(vm, one.notice, one.started_for, one.interruption) for vm, one in story.measured.items()
            ),
        )

    @property
    def key(self) -> tuple[str, int]:
        """Whose line it is."""
        return self.event_id.casefold(), self.nth


def _outcome(story: Story) -> Outcome:
    if story.standing is FINISHED:
        return "finished"
    return "canceled" if story.standing is CANCELED else "unknown"


Known = OrderedDict[tuple[str, int], Outcome]
"""Event -> the outcome that its last line has; the newest last."""

_lines: Final = msgspec.json.Decoder(PastEvent)


class History:
    """The files of one instance in a directory. ``keep``: seconds; ``None`` for ever.

    ``add`` never touches the disk. One thread does, which a disk that hangs may hold; ``flush`` waits for it.
    """

    def __init__(self, directory: Path, keep: float | None = None) -> None:
        self.directory = directory
        self._keep = keep
        self._known: Known | None = None  # None before the files were read
        self._waiting: list[PastEvent] = []
        self._change = threading.Condition()
        self._stop = self._failed = False
        self.failures = 0  # attempts to write
        self.dropped = 0  # lines that could not be kept until the disk could be written again
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Read what is there, and close a line that was torn; from now on lines are written."""
        self._thread.start()

    def add(self, lines: Iterable[PastEvent]) -> None:
        """Take in events that are over; they are written soon."""
        with self._change:
            self._waiting += lines
            excess = len(self._waiting) - MAX_WAITING
            if excess > 0:
                del self._waiting[:excess]
                self.dropped += excess
            self._change.notify_all()

    @property
    def waiting(self) -> int:
        """Lines that are not on the disk yet."""
        return len(self._waiting)

    def flush(self, patience: float) -> bool:
        """Wait until all lines are on the disk, ``patience`` seconds at most; returns whether they are.

        It does not wait for a disk that could not be written at the last attempt.
        """
        with self._change:
            self._change.wait_for(lambda: not self._waiting or self._failed, patience)
            return not self._waiting

    def close(self, patience: float) -> None:
        """Write what waits, and end the thread, in ``patience`` seconds."""
        with self._change:
            self._stop = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(patience)

    def _run(self) -> None:
        while True:
            with self._change:
                if self._failed and not self._stop:
                    self._change.wait_for(lambda: self._stop, RETRY_INTERVAL)
                elif self._known is not None:  # at the start the files are read at once
                    self._change.wait_for(lambda: self._waiting or self._stop)
                lines, stop = list(self._waiting), self._stop
            failed = not self._write(lines)
            with self._change:
                if not failed:
                    written = set(map(id, lines))
                    self._waiting = [one for one in self._waiting if id(one) not in written]
                self._failed = failed
                self.failures += failed
                self._change.notify_all()
                if stop:
                    return

    def _write(self, lines: list[PastEvent]) -> bool:
        """Append what is not there yet; returns whether it could."""
        try:
            if self._known is None:
                self._known = self._begin()
            known = dict(self._known)
            new: dict[Path, list[PastEvent]] = {}
            for one in lines:
                if known.get(one.key) != one.outcome:
                    known[one.key] = one.outcome
                    new.setdefault(self.directory / f"{one.closed:%Y-%m}{SUFFIX}", []).append(one)
            for path, found in new.items():
                if not path.exists():
                    self._delete_old()
                _append(path, b"".join(msgspec.json.encode(one) + b"\n" for one in found))
                _remember(self._known, found)
        except OSError as error:
            if not self._failed:
                log.warning("the history in %s cannot be written (%s): its lines wait in memory", self.directory, error)
            return False
        return True

    def _begin(self) -> Known:
        """The events of the last two months that have any."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._delete_old()
        known: Known = OrderedDict()
        for path in _files(self.directory)[-2:]:
            _append(path, b"")
            _remember(known, _read(path, []))
        return known

    def _delete_old(self) -> None:
        if self._keep is None:
            return
        last = datetime.now(UTC) - timedelta(seconds=self._keep)
        for path in _files(self.directory):
            if path.stem < f"{last:%Y-%m}":  # a month is deleted once all of it is older
                path.unlink()
                log.info("%s is older than fleet.history.keep: deleted", path)


def history_directory(config: Config) -> Path:
    """Where the instance of this configuration writes its history."""
    given = config.fleet.history.dir if config.fleet is not None else None
    return Path(given) if given else Path(config.state.dir) / "history"


def _remember(known: Known, lines: Iterable[PastEvent]) -> None:
    for one in lines:
        known[one.key] = one.outcome
        known.move_to_end(one.key)
        if len(known) > MAX_KNOWN:
            known.popitem(last=False)


def _append(path: Path, data: bytes) -> None:
    """Append whole lines, and have them on the disk; a line that a crash or a full disk has torn is cut off before."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        _cut_torn(file)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _cut_torn(file: IO[bytes]) -> None:
    """Cut off what follows the last end of a line, and stand there. Its event was not called written."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    file.truncate(end)
    file.seek(end)


def _files(directory: Path) -> list[Path]:
    """The files of a directory, the oldest first."""
    return sorted(path for path in directory.glob(f"????-??{SUFFIX}") if path.is_file())


def _read(path: Path, unreadable: list[str]) -> Iterator[PastEvent]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # it is being written, or was torn
                return
            try:
                yield _lines.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                unreadable.append(f"{path}, line {number}: {error}")


def read_past(directories: Iterable[Path], since: datetime, until: datetime, unreadable: list[str]) -> list[PastEvent]:
    """The events that were closed from ``since`` to ``until``, the oldest first; of each its last line.

    Several directories: of the instances of one fleet, which may hold the same event. ``unreadable`` gets a sentence
    for each line that cannot be read. Raises ``OSError``.
    """
    found: dict[tuple[str, int], PastEvent] = {}
    for directory in directories:
        for path in _files(directory):
            if f"{since:%Y-%m}" <= path.stem <= f"{until:%Y-%m}":
                for one in _read(path, unreadable):
                    before = found.get(one.key)
                    if since <= one.closed <= until and (before is None or one.closed >= before.closed):
                        found[one.key] = one
    return sorted(found.values(), key=lambda one: one.closed)
