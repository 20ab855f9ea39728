"""The sentences of the agent's page about the listed events. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from notbefore.core.document import STARTED
from notbefore.core.tracked import PendingEvent, PendingView

_VM_ON_PAGE: Final = {  # by scope
    "self": "this VM",
    "peer": "another VM",
    "unknown": "perhaps this VM",
}


def affected(scope: str) -> str:
    """Return which VM an event of this scope affects, as the page of one VM shows it."""
    return _VM_ON_PAGE.get(scope, scope)


def summary(
    by_rank: Sequence[PendingEvent], view: PendingView, now: datetime, *, is_ready: bool
) -> str:
    """Return the listed events in a sentence or two, which say what is uncertain.

    ``by_rank``: the events of ``view``, the most important first.
    """
    if not by_rank:
        return _nothing_listed(view, is_ready=is_ready)

    first = by_rank[0]
    sentences = [f"{first.event_type} of {affected(first.scope)} {_state(first, now)}."]
    others = len(by_rank) - 1
    if others == 1:
        sentences.append("1 more is pending.")
    elif others > 1:
        sentences.append(f"{others} more are pending.")
    if view.silence:
        sentences.append("That was when IMDS last answered: what is scheduled now is not known.")
    return " ".join(sentences)


def _state(event: PendingEvent, now: datetime) -> str:
    if event.is_advice:
        return "is listed"
    if event.event_status == STARTED:
        return "is under way"
    if event.not_before is None:
        return "is next, at a time not given"
    time = time_of_day(event.not_before, now)
    if event.not_before <= now:
        return f"was due at {time} UTC, and has not started"
    return f"is next, not before {time} UTC"


def _nothing_listed(view: PendingView, *, is_ready: bool) -> str:
    if view.last_successful_poll is None:
        return "What is scheduled is not known yet: IMDS has not answered."
    if view.unreadable:
        return "Something is scheduled that cannot be read: the agent's log says why."
    if is_ready:
        return "Nothing is scheduled."
    return "Nothing was scheduled when IMDS last answered."


def time_of_day(time: datetime, now: datetime) -> str:
    """Return a time in UTC, without the date if it is today."""
    utc = time.astimezone(UTC)
    if utc.date() == now.astimezone(UTC).date():
        return f"{utc:%H:%M:%S}"
    return f"{utc:%Y-%m-%d %H:%M:%S}"
