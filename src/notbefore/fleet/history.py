"""The history of an instance: the events that are over, in one SQLite file.

And the report about them.

An event that is over stays in its partition's snapshot until it is in this file, so that a kill
loses none. Writing an event again replaces it: a takeover may repeat it, and late reports may
change its outcome.
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

from notbefore.core.change import Outcome
from notbefore.core.event_types import event_type_of
from notbefore.errors import StoreError
from notbefore.fleet.shown_waves import EventFacts
from notbefore.fleet.story import OUTCOMES, Measures, Story, from_unix
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
            rows = [(one.key, one.closed.timestamp(), msgspec.json.encode(one)) for one in past]
            db.executemany("INSERT OR REPLACE INTO past VALUES (?, ?, ?)", rows)
            if self._keep is not None:
                db.execute("DELETE FROM past WHERE closed < ?", (now - self._keep,))

    def past(self, since: float) -> list[bytes]:
        """Return the newest ``MAX_ANSWER`` events that were closed since then (Unix seconds) as
        JSON, oldest first.

        Raises ``StoreError`` if one of them cannot be read: then what is past is not known.
        """
        try:
            if not self.path.exists():
                return []
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as db:
                query = "SELECT event FROM past WHERE closed >= ? ORDER BY closed DESC LIMIT ?"
                found = [event for (event,) in db.execute(query, (since, MAX_ANSWER))][::-1]
            return [bytes(msgspec.json.decode(event, type=msgspec.Raw)) for event in found]
        except (sqlite3.Error, OSError, msgspec.MsgspecError, TypeError) as error:
            advice = "if it stays so, move the file away: a new one is begun"
            raise StoreError(
                f"the history {self.path} cannot be read ({error}): {advice}"
            ) from None


def read_past(found: Iterable[bytes]) -> list[PastEvent]:
    """Read the events of instances' histories, oldest first: the newest entry of each.

    Unreadable ones are left out.
    """
    newest: dict[str, PastEvent] = {}
    for data in found:
        try:
            one = msgspec.json.decode(data, type=PastEvent)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("an event of the history cannot be read: %s", error)
            continue
        known = newest.get(one.key)
        if known is None or one.closed >= known.closed:
            newest[one.key] = one
    return sorted(newest.values(), key=lambda one: one.closed)


Row = dict[str, Any]
"""A row of a report. Notice and interruption are per affected VM, in seconds."""


def report(past: Iterable[PastEvent], by: tuple[str, ...] = USUAL) -> list[Row]:
    """Return the rows, grouped by ``COLUMNS`` or ``tags.NAME``. Exercises are left out."""
    groups: dict[tuple[str, ...], list[PastEvent]] = {}
    for one in past:
        if not one.exercise:
            groups.setdefault(tuple(_value(one, name) for name in by), []).append(one)
    return [
        dict(zip(by, key, strict=True)) | _counted(group) for key, group in sorted(groups.items())
    ]


def _counted(events: list[PastEvent]) -> Row:
    measured = [one for event in events for one in event.measured.values()]
    notices = [one.notice for one in measured if one.notice is not None]
    interruptions = [one.interruption for one in measured if one.interruption is not None]
    promises = {_promised_notice(event.event_type) for event in events}
    # several types have no common promise
    promised = promises.pop() if len(promises) == 1 else None
    outcomes = Counter(event.outcome for event in events)
    return {
        "events": len(events),
        "vms": sum(len(event.vms) for event in events),  # affected VMs, counted once for each event
        "finished": outcomes["finished"],
        "canceled": outcomes["canceled"],
        "unknown": outcomes["unknown"],
        "as_far_as_known": sum(
            event.as_far_as_known for event in events
        ),  # not every VM has reported the end
        "promised": promised,
        "measured_notice": len(notices),  # VMs
        "short_notice": (
            sum(one < KEPT * promised for one in notices) if promised is not None else None
        ),
        **_spread("notice", notices),
        "measured_interruption": len(interruptions),  # VMs
        **_spread("interruption", interruptions),
    }


def _promised_notice(event_type: str) -> float | None:
    """Return the seconds of notice that Azure promises; ``None`` for a type without a promise."""
    return event_type_of(event_type).promised_notice or None


def _spread(name: str, values: list[float]) -> Row:
    found = sorted(values)
    three = (found[0], found[(len(found) - 1) // 2], found[-1]) if found else (None, None, None)
    return dict(zip((f"{name}_min", f"{name}_median", f"{name}_max"), three, strict=True))


FIGURES: Final = tuple(_counted([]))
"""The names of a row's figures."""


def _value(event: PastEvent, name: str) -> str:
    tag = name.removeprefix("tags.")
    return str(getattr(event, name) or "") if tag == name else event.tags.get(tag.casefold(), "")
