"""The history of an instance: the events that are over, in one SQLite file, and their report.

An event that is over stays in its partition's snapshot until it is in this file, so that a kill
loses none. Writing an event again replaces it, but for what was measured: a takeover may repeat it,
and late reports may change its outcome.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from notbefore.core.change import Outcome
from notbefore.core.event_types import event_type_of
from notbefore.errors import StoreError
from notbefore.fleet.shown_waves import EventFacts
from notbefore.fleet.story import OUTCOMES, EndedBy, Measures, Story, from_unix
from notbefore.fleet.waves import azure_status
from notbefore.store.lock import PRIVATE_DIRECTORY, prepare_file

FILE_NAME: Final = "fleet-history.db"
MAX_ANSWER: Final = 100_000  # events in one answer
BUSY_SECONDS: Final = 2.0  # to wait while another connection uses the file

# the least share of a promise that keeps it: an agent sees an event up to a second late
KEPT: Final = 0.9
COLUMNS: Final = (
    "event_type",
    "region",
    "subscription",
    "resource_group",
    "scale_set",
    "zone",
    "event_source",
)
"""What a report may be grouped by, besides ``tags.NAME``."""
USUAL: Final = ("event_type", "region")

log = logging.getLogger("notbefore.fleet.history")


class PastEvent(EventFacts, frozen=True, kw_only=True):
    """An event that is over, as reported by all VMs together."""

    nth: int  # the number of earlier events with this id
    expected_seconds: int | None  # the interruption that Azure expected
    over: datetime | None  # the last VM's report of the end
    closed: datetime  # when the fleet ended it, by the hub's clock
    outcome: Outcome
    as_far_as_known: bool  # not every VM has reported the end
    exercise: bool
    measured: dict[str, Measures]  # by VM
    ended_by: EndedBy | None = None  # ``None``: by a version that did not know
    # the seconds between Azure's first message and NotBefore
    azure_notice: float | None = None

    @classmethod
    def closed_at(cls, now: float, story: Story) -> "PastEvent":
        """Make the entry of a story; ``now``: Unix seconds of the hub's clock."""
        event = story.event
        place = story.place
        return cls(
            event_id=event.event_id,
            event_type=event.event_type,
            event_source=event.event_source,
            subscription=place.subscription,
            resource_group=place.resource_group,
            scale_set=place.scale_set,
            region=place.region,
            zone=place.zone,
            tags=dict(place.tags),
            vms=event.resources,
            reported_by=len(story.reported),
            first_seen=story.first_seen,
            not_before=story.not_before,
            started=story.started,
            description=event.description or None,
            nth=story.nth,
            expected_seconds=event.duration,
            over=story.over,
            closed=from_unix(now),
            outcome=OUTCOMES[story.standing],
            as_far_as_known=story.given_up,
            exercise=story.exercise,
            measured=story.measured,
            ended_by=story.ended_by,
            azure_notice=story.azure.notice if story.azure is not None else None,
            azure_status=azure_status([story]),
        )

    def completed_by(self, earlier: "PastEvent") -> "PastEvent":
        """Return the entry of a correction, with what was measured before the correction."""
        azure_notice = earlier.azure_notice
        if azure_notice is None:
            azure_notice = self.azure_notice
        return replace(
            self,
            measured={**earlier.measured, **self.measured},
            reported_by=max(earlier.reported_by, self.reported_by),
            first_seen=min(earlier.first_seen, self.first_seen),
            not_before=self.not_before or earlier.not_before,
            started=self.started or earlier.started,
            azure_notice=azure_notice,
        )

    @property
    def key(self) -> str:
        """Identifies the event, whichever instance wrote it."""
        return f"{self.subscription}/{self.resource_group}/{self.event_id}/{self.nth}".casefold()


class History:
    """One file, for any thread: each call has its own connection.

    ``keep``: how many seconds events are kept; ``None``: forever.
    """

    def __init__(self, directory: Path, keep: float | None = None) -> None:
        self.path = directory / FILE_NAME
        self._keep = keep

    def write(self, past: Sequence[PastEvent], now: float) -> None:
        """Add events that are over; delete those too old at ``now`` (Unix seconds).

        Raises ``sqlite3.Error``, and as ``prepare_file``.
        """
        self.path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        prepare_file(self.path)  # SQLite would create it with the umask's mode
        with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as db, db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS past (key TEXT PRIMARY KEY, closed REAL, event BLOB)"
            )
            db.execute("CREATE INDEX IF NOT EXISTS past_closed ON past (closed)")
            for event in past:
                entry = _completed(db, event)
                row = (entry.key, entry.closed.timestamp(), msgspec.json.encode(entry))
                db.execute("INSERT OR REPLACE INTO past VALUES (?, ?, ?)", row)
            if self._keep is not None:
                db.execute("DELETE FROM past WHERE closed < ?", (now - self._keep,))

    def past(self, since: float) -> list[bytes]:
        """Return the newest ``MAX_ANSWER`` events closed since then as JSON, oldest first.

        ``since``: in Unix seconds. Raises ``StoreError`` if one of them cannot be read, because
        the answer would be incomplete.
        """
        try:
            if not self.path.exists() or self.path.stat().st_size == 0:
                return []  # the first ``write`` has not created its table yet
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as db:
                query = "SELECT event FROM past WHERE closed >= ? ORDER BY closed DESC LIMIT ?"
                newest_first = [event for (event,) in db.execute(query, (since, MAX_ANSWER))]
            return [
                bytes(msgspec.json.decode(event, type=msgspec.Raw))
                for event in reversed(newest_first)
            ]
        except (sqlite3.Error, OSError, msgspec.MsgspecError, TypeError) as error:
            advice = "if it stays so, move the file away: a new one is begun"
            raise StoreError(
                f"the history {self.path} cannot be read ({error}): {advice}"
            ) from None


def _completed(db: sqlite3.Connection, event: PastEvent) -> PastEvent:
    """Return an entry with what only the entry has that it replaces."""
    row = db.execute("SELECT event FROM past WHERE key = ?", (event.key,)).fetchone()
    if row is None:
        return event
    earlier = read_past(row)
    if not earlier:
        return event
    return event.completed_by(earlier[0])


def read_past(entries: Iterable[bytes]) -> list[PastEvent]:
    """Read the events of instances' histories, oldest first: the newest entry of each.

    Unreadable ones are left out.
    """
    newest: dict[str, PastEvent] = {}
    for entry in entries:
        try:
            event = msgspec.json.decode(entry, type=PastEvent)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("an event of the history cannot be read: %s", error)
            continue
        other = newest.get(event.key)
        if other is None or event.closed >= other.closed:
            newest[event.key] = event
    return sorted(newest.values(), key=_closed)


def _closed(event: PastEvent) -> datetime:
    return event.closed


Row = dict[str, Any]
"""A row of a report: the columns that it is grouped by, and ``Figures``."""


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of a row. Notice and interruption are per affected VM, in seconds."""

    events: int
    vms: int  # affected VMs, counted once for each event
    finished: int
    canceled: int
    unknown: int
    as_far_as_known: int  # not every VM has reported the end
    promised: float | None  # the notice that Azure promises; null for several types
    measured_notice: int  # VMs
    short_notice: int | None  # VMs with less than nine tenths of the promise
    notice_min: float | None
    notice_median: float | None
    notice_max: float | None
    measured_interruption: int  # VMs
    interruption_min: float | None
    interruption_median: float | None
    interruption_max: float | None
    azure_notice: int  # events whose notice is known from Azure's own messages, when they came
    azure_short_notice: int | None  # of these, events with less than nine tenths of the promise
    azure_notice_min: float | None
    azure_notice_median: float | None
    azure_notice_max: float | None
    known_by_azure: int  # events whose end Azure has reported
    known_by_vms: int  # events whose end VMs have reported


FIGURES: Final = Figures.__struct_fields__
"""The names of a row's figures."""


def report(past: Iterable[PastEvent], by: tuple[str, ...] = USUAL) -> list[Row]:
    """Return the rows, grouped by ``COLUMNS`` or ``tags.NAME``. Exercises are left out."""
    groups: dict[tuple[str, ...], list[PastEvent]] = {}
    for event in past:
        if event.exercise:
            continue
        key = tuple(_value(event, name) for name in by)
        groups.setdefault(key, []).append(event)

    rows: list[Row] = []
    for key, events in sorted(groups.items()):
        columns = dict(zip(by, key, strict=True))
        rows.append(columns | asdict(_figures_of(events)))
    return rows


def _figures_of(events: list[PastEvent]) -> Figures:
    notices: list[float] = []
    interruptions: list[float] = []
    for event in events:
        for measures in event.measured.values():
            if measures.notice is not None:
                notices.append(measures.notice)
            if measures.interruption is not None:
                interruptions.append(measures.interruption)

    promised = None
    short_notice = None
    promises = {_promised_notice(event.event_type) for event in events}
    if len(promises) == 1:  # several types have no common promise
        promised = promises.pop()
    if promised is not None:
        short_notice = sum(notice < KEPT * promised for notice in notices)

    azure_notices = [event.azure_notice for event in events if event.azure_notice is not None]
    azure_short_notice = None
    if promised is not None:
        azure_short_notice = sum(notice < KEPT * promised for notice in azure_notices)

    outcomes = Counter(event.outcome for event in events)
    known_by = Counter(event.ended_by for event in events)
    return Figures(
        events=len(events),
        vms=sum(len(event.vms) for event in events),
        finished=outcomes["finished"],
        canceled=outcomes["canceled"],
        unknown=outcomes["unknown"],
        as_far_as_known=sum(event.as_far_as_known for event in events),
        promised=promised,
        measured_notice=len(notices),
        short_notice=short_notice,
        **_spread("notice", notices),
        measured_interruption=len(interruptions),
        **_spread("interruption", interruptions),
        azure_notice=len(azure_notices),
        azure_short_notice=azure_short_notice,
        **_spread("azure_notice", azure_notices),
        known_by_azure=known_by["azure"] + known_by["both"],
        known_by_vms=known_by["vms"] + known_by["both"],
    )


def _promised_notice(event_type: str) -> float | None:
    """Return the seconds of notice that Azure promises; ``None`` for a type without a promise."""
    return event_type_of(event_type).promised_notice or None


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Return the smallest, the middle and the largest value; ``None`` if there are none."""
    if not values:
        return {f"{name}_min": None, f"{name}_median": None, f"{name}_max": None}
    ordered = sorted(values)
    return {
        f"{name}_min": ordered[0],
        f"{name}_median": ordered[(len(ordered) - 1) // 2],
        f"{name}_max": ordered[-1],
    }


def _value(event: PastEvent, name: str) -> str:
    """Return the value of a column, or of the tag of ``tags.NAME``."""
    if name.startswith("tags."):
        return event.tags.get(name.removeprefix("tags.").casefold(), "")
    return str(getattr(event, name) or "")
