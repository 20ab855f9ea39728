"""A change in words, for people, and what a fleet says of many VMs. Pure."""

from datetime import UTC, datetime
from typing import Final

from notbefore.core.change import MISSING, SILENT, WORDS, Change

_OUTCOMES: Final = {"canceled": "canceled", "finished": "finished", "unknown": "gone, and how it ended was not seen"}


def progress(events: int, under_way: int, over: int) -> str:
    """How far a wave of several events has come: ``2 of 5 events are over``; empty for one event."""
    if events < 2:  # noqa: PLR2004 - a wave
        return ""
    found: list[str] = []
    for count, word in ((over, "over"), (under_way, "under way")):
        if count:
            of = "" if found else f" of {events} events"
            found.append(f"{count}{of} {'is' if count == 1 else 'are'} {word}")
    return ", ".join(found) or f"none of {events} events has started"


def vms_in_words(count: int, scale_set: str | None, resource_group: str | None, region: str | None) -> str:
    """So many VMs, and where they are: ``48 VMs of the scale set web``."""
    vms = f"{count} VMs" if count != 1 else "1 VM"
    if count == 0:
        vms = "VMs that Azure does not name"
    places = (("of the scale set", scale_set), ("of the resource group", resource_group), ("in", region))
    return next((f"{vms} {words} {name}" for words, name in places if name), vms)


def sentence(change: Change, whom: str | None = None) -> str:
    """The change in words, for people: what happens to whom, and when."""
    event = change.event
    whom = whom or {"self": "this VM", "peer": "another VM", "unknown": "a VM of this group"}[change.scope]
    what = f"{event.event_type} of {whom}"
    if change.kind == "announced":
        when = f"not before {rfc3339(change.not_before)}" if change.not_before else "at a time not given"
        return f"{what} announced: {when}"
    if change.no_longer_affected:
        known = change.previous_scope == "self"
        return f"{event.event_type} {'no longer affects' if known else 'does not affect'} this VM"
    if change.kind == "updated":
        before = change.previous.event_type if change.previous is not None else event.event_type
        return f"{what} changed" + (f": it was a {before}" if before != event.event_type else "")
    if change.approval is not None:
        result = "approved" if change.kind == "approved" else "not approved"
        return f"{what} {result}: {WORDS.get(change.reason, change.reason)} ({change.approval.approval_rule})"
    if change.kind == "started":
        return f"{what} started" + (" without notice" if change.without_notice else "")
    return f"{what} {_OUTCOMES[change.outcome or 'unknown']}"


def sentence_of_many(change: Change, whom: str, progress: str) -> str:
    """What a fleet reports, in words: ``whom`` as ``vms_in_words`` says it, ``progress`` of the wave."""
    if change.event.event_type == SILENT:
        if change.event.description == MISSING:
            return f"{whom}: {'no longer missing' if change.kind == 'finished' else 'missing'}"
        return f"{whom}: {'heard from again, or no longer expected' if change.kind == 'finished' else 'silent'}"
    return sentence(change, whom) + (f": {progress}" if progress and change.kind == "updated" else "")


def rfc3339(time: datetime) -> str:
    """UTC to the millisecond: 2022-04-11T22:26:58.000Z."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
