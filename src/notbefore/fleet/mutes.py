"""``Mute``: for some time, no one is notified of the events that match it. Pure.

The page and the history still show these events.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from notbefore.core.lifecycle import OUTCOMES
from notbefore.fleet.hub_records import Place
from notbefore.fleet.notification import Notification
from notbefore.fleet.shown_waves import fits

NOTE: Final = "mutes"  # the name of the note in which the instances share them
MAX_MUTES: Final = 200
SHORTEST_MUTE: Final = 60.0  # seconds
LONGEST_MUTE: Final = 366 * 86_400.0  # seconds
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
        matchers = ", ".join(f"{name} {value}" for name, value in self.match.items())
        until = f"{datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M} UTC"
        return f"Muted until {until}: {matchers}. {self.comment} ({self.by}, {self.id})"

    def applies(self, event_type: str, place: Place, names: Iterable[str]) -> bool:
        """Whether an event is muted for all its VMs.

        ``place``: what the VMs have in common. ``names``: their names.
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
        raise ValueError(
            f"the note `{NOTE}` next to the snapshots cannot be read ({error}): delete it, and"
            " create the mutes again"
        ) from None


def write_mutes(mutes: Iterable[Mute], now: float) -> bytes:
    """Return a note with the mutes that last beyond ``now`` (Unix seconds).

    Raises ``ValueError`` if there are too many.
    """
    lasting = [mute for mute in mutes if mute.until > now]
    if len(lasting) > MAX_MUTES:
        raise ValueError(f"there may be {MAX_MUTES} mutes at most: end one first")
    return msgspec.json.encode(lasting)


def is_muted(
    mutes: Iterable[Mute], now: float, notification: Notification, muted: set[str]
) -> bool:
    """Whether a notification is muted, because a mute matches it.

    The end of an event is muted only if all its earlier notifications were. ``muted``: the event
    keys of events of which no one was notified so far; this function updates it.
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
