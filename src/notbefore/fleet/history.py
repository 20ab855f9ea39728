"""``History``: the events of an instance that are over, in one SQLite file.

An event that is over stays in its partition's snapshot until it is in this file, so that a kill
loses none. An event may be written again: a takeover may repeat it, and late reports may change its
outcome. The new entry replaces the old one, and keeps what only the old one had measured.
"""

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from notbefore.core.change import Outcome
from notbefore.errors import StoreError
from notbefore.fleet.shown_waves import EventFacts
from notbefore.fleet.story import OUTCOME_OF, EndedBy, Measures, Story, from_unix
from notbefore.fleet.wave import azure_status
from notbefore.store.lock import PRIVATE_DIRECTORY, prepare_file

FILE_NAME: Final = "fleet-history.db"
MAX_ANSWER: Final = 100_000  # events in one answer
BUSY_SECONDS: Final = 2.0  # to wait while another connection uses the file

log = logging.getLogger("notbefore.fleet.history")


class PastEvent(EventFacts, frozen=True, kw_only=True):
    """An event that is over, as all VMs together have reported it."""

    nth: int  # the number of earlier events with this id
    expected_seconds: int | None  # the interruption that Azure expected
    over: datetime | None  # the last VM's report of the end
    closed: datetime  # when the fleet ended it, by the hub's clock
    outcome: Outcome
    as_far_as_known: bool  # not every VM has reported the end
    exercise: bool
    measured: dict[str, Measures]  # by VM
    ended_by: EndedBy | None = None  # ``None``: an older version has written it
    # the seconds between Azure's first message and NotBefore
    azure_notice: float | None = None

    @classmethod
    def closed_at(cls, now: float, story: Story) -> "PastEvent":
        """Make the entry of a story that is closed ``now`` (Unix seconds of the hub's clock)."""
        event = story.event
        place = story.place
        azure_notice = None
        if story.azure is not None:
            azure_notice = story.azure.notice
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
            outcome=OUTCOME_OF[story.standing],
            as_far_as_known=story.given_up,
            exercise=story.exercise,
            measured=story.measured,
            ended_by=story.ended_by,
            azure_notice=azure_notice,
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
    """One file. Any thread may use it, as each call has its own connection.

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
            raise StoreError(
                f"the history {self.path} cannot be read ({error}): if this persists, move the file"
                " away, and the instance begins a new one"
            ) from None


def _completed(db: sqlite3.Connection, event: PastEvent) -> PastEvent:
    """Return an entry, completed by the entry that it replaces."""
    row = db.execute("SELECT event FROM past WHERE key = ?", (event.key,)).fetchone()
    if row is None:
        return event
    earlier = read_past(row)
    if not earlier:
        return event
    return event.completed_by(earlier[0])


def read_past(entries: Iterable[bytes]) -> list[PastEvent]:
    """Read the events in the histories of instances; return them oldest first.

    Of several entries about one event, the newest counts. Unreadable ones are left out.
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
