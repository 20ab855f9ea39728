"""``Mute``: for a time, no one is notified of events that match. Pure.

The page and the history still show them.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from notbefore.core.lifecycle import OUTCOMES
from notbefore.fleet.hub_records import Place
from notbefore.fleet.shown_waves import fits
from notbefore.fleet.waves import Notification

NOTE: Final = "mutes"  # the name of the note in which the instances share them
MAX_MUTES: Final = 200
SHORTEST: Final = 60.0  # seconds of a mute
LONGEST: Final = 366 * 86_400.0
LATEST: Final = 253_402_300_799.0  # Unix seconds: the end of the year 9999

Text = Annotated[str, Meta(min_length=1)]


class Mute(Struct, frozen=True):
    """A mute: what it matches, who made it, why, and until when."""

    id: str
    # names are from ``MATCHERS``; all of them must match
    match: Annotated[dict[str, Text], Meta(min_length=1)]
    by: str
    comment: str
    until: Annotated[float, Meta(ge=0.0, le=LATEST)]  # Unix seconds

    @property
    def words(self) -> str:
        """The mute in a sentence for people."""
        what = ", ".join(f"{name} {value}" for name, value in self.match.items())
        until = datetime.fromtimestamp(self.until, UTC)
        return (
            f"Muted until {until:%Y-%m-%d %H:%M} UTC: {what}. {self.comment} ({self.by}, {self.id})"
        )

    def applies(self, event_type: str, place: Place, names: Iterable[str]) -> bool:
        """Whether an event is muted for all its VMs.

        ``place``: what they have in common, ``names``: their names.
        """
        facts = place._asdict() | {"event_type": event_type}
        tags = dict(place.tags)
        affected = list(names) or [""]  # Azure may name none
        return all(fits(self.match, facts | {"vm": name}, tags) for name in affected)


def read_mutes(body: bytes) -> list[Mute]:
    """Read the mutes of a note; raises ``ValueError``."""
    if not body:
        return []
    try:
        return msgspec.json.decode(body, type=list[Mute])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        advice = "delete it, and mute again what is to be muted"
        raise ValueError(
            f"the note `{NOTE}` beside the snapshots cannot be read ({error}): {advice}"
        ) from None


def write_mutes(mutes: Iterable[Mute], now: float) -> bytes:
    """Return a note of the mutes that are not over at ``now`` (Unix seconds).

    Raises ``ValueError`` if too many.
    """
    lasting = [mute for mute in mutes if mute.until > now]
    if len(lasting) > MAX_MUTES:
        raise ValueError(f"there may be {MAX_MUTES} mutes at most: end one first")
    return msgspec.json.encode(lasting)


def is_muted(
    mutes: Iterable[Mute], now: float, notification: Notification, muted: set[str]
) -> bool:
    """Whether a notification is muted: if a mute matches.

    An end that follows other notifications is muted only if they all were. ``muted``: the event
    keys of which no one was notified so far; it is updated.
    """
    change = notification.change
    event = change.event
    is_first = change.previous is None
    if change.kind in OUTCOMES and not is_first:
        return event.key in muted

    for mute in mutes:
        if mute.until <= now:
            continue
        if mute.applies(event.event_type, notification.place, event.resources):
            if is_first:
                muted.add(event.key)
            return True

    muted.discard(event.key)
    return False
