"""``Mute``: for a time nobody is notified of what it matches; the page and the history show it all the same. Pure."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Vm
from notbefore.fleet.shown_waves import fits
from notbefore.fleet.waves import Notification

NOTE: Final = "mutes"  # the name under which the instances share them
MATCHERS: Final = ("event_type", "subscription", "resource_group", "scale_set", "region", "tag", "vm")
MAX_MUTES: Final = 200


class Mute(Struct, frozen=True):
    """What is muted, by whom, why and until when."""

    id: str
    match: dict[str, str]  # of ``MATCHERS``; all of them have to agree
    by: str
    comment: str
    until: float  # Unix seconds

    @property
    def words(self) -> str:
        """For people."""
        what = ", ".join(f"{name} {value}" for name, value in self.match.items())
        until = datetime.fromtimestamp(self.until, UTC)
        return f"Muted until {until:%Y-%m-%d %H:%M} UTC: {what}. {self.comment} ({self.by}, {self.id})"

    def applies(self, event_type: str, vm: Vm, names: Iterable[str]) -> bool:
        """Whether an event of VMs is muted, for each of them; ``vm``: what they have in common, ``names``: theirs."""
        facts = {
            "event_type": event_type,
            "subscription": vm.subscription_id,
            "resource_group": vm.resource_group,
            "scale_set": vm.scale_set,
            "region": vm.location,
        }
        return all(fits(self.match, facts | {"vm": name}, vm.tags) for name in list(names) or [""])


def read_mutes(body: bytes) -> list[Mute]:
    """The mutes of a note; raises ``ValueError``."""
    try:
        return msgspec.json.decode(body, type=list[Mute]) if body else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the mutes cannot be read: {error}") from None


def write_mutes(mutes: Iterable[Mute], now: float) -> bytes:
    """The note of those that are not over, the newest last; ``now``: Unix seconds. Raises ``ValueError``."""
    left = [one for one in mutes if one.until > now]
    if len(left) > MAX_MUTES:
        raise ValueError(f"{MAX_MUTES} at most: end one first")
    return msgspec.json.encode(left)


def is_muted(mutes: Iterable[Mute], now: float, made: Notification, muted: set[str]) -> bool:
    """Whether nobody is notified now. What ends is muted where its beginning was, or where it had none: a correction.

    ``muted``: the event keys of what nobody was notified of so far; it is kept up to date.
    """
    event = made.change.event
    if made.change.kind in OUTCOMES and made.change.previous is not None:
        return event.key in muted
    if not any(one.until > now and one.applies(event.event_type, made.vm, event.resources) for one in mutes):
        muted.discard(event.key)
        return False
    if made.change.previous is None:
        muted.add(event.key)
    return True
