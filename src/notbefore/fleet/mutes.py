"""``Mute``: for a time nobody is notified of events that match.

Page and history still show them. Pure.
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
    """What is muted, by whom, why and until when."""

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
        facts, tags = place._asdict() | {"event_type": event_type}, dict(place.tags)
        return all(fits(self.match, facts | {"vm": name}, tags) for name in list(names) or [""])


def read_mutes(body: bytes) -> list[Mute]:
    """Read the mutes of a note; raises ``ValueError``."""
    try:
        return msgspec.json.decode(body, type=list[Mute]) if body else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        advice = "delete it, and mute again what is to be muted"
        raise ValueError(
            f"the note `{NOTE}` beside the snapshots cannot be read ({error}): {advice}"
        ) from None


def write_mutes(mutes: Iterable[Mute], now: float) -> bytes:
    """Return a note of the mutes that are not over at ``now`` (Unix seconds).

    Raises ``ValueError`` if too many.
    """
    left = [one for one in mutes if one.until > now]
    if len(left) > MAX_MUTES:
        raise ValueError(f"there may be {MAX_MUTES} mutes at most: end one first")
    return msgspec.json.encode(left)


def is_muted(mutes: Iterable[Mute], now: float, made: Notification, muted: set[str]) -> bool:
    """Whether a notification is muted: if a mute matches.

    An end that follows others is muted only if they all were.

    ``muted``: the event keys of which nobody was notified so far; it is updated.
    """
    event = made.change.event
    if made.change.kind in OUTCOMES and made.change.previous is not None:
        return event.key in muted
    if not any(
        one.until > now and one.applies(event.event_type, made.place, event.resources)
        for one in mutes
    ):
        muted.discard(event.key)
        return False
    if made.change.previous is None:
        muted.add(event.key)
    return True
