"""``ApprovalLog``: what is remembered of approvals. What is about to be done is written here before it is done."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.state import WRITE_PATIENCE, AgentSnapshot, AgentState
from notbefore.core.approval import ApprovalAttempt, ApprovalContext
from notbefore.core.change import Change
from notbefore.core.record import Vm
from notbefore.core.tracked import WATCHED, Tracked, TrackedEvent
from notbefore.process.clock import ClockReading
from notbefore.store.file import StoredState

KEPT_ATTEMPTS: Final = 20  # that are over, of events that are gone: a list that flaps brings them back


class ListedEvents(Struct, frozen=True):
    """What the approver decides on: the listed events, and how far the approval of each has come."""

    events: dict[str, TrackedEvent]
    attempts: dict[str, ApprovalAttempt]
    context: ApprovalContext
    vm: Vm | None
    answered: bool  # IMDS has answered since this process began
    fresh: bool  # its last answer was good and is new: nothing is approved on old knowledge
    flawed: frozenset[str]  # events of which a part could not be read, by their keys

    @classmethod
    def of(cls, snapshot: AgentSnapshot, now: ClockReading) -> "ListedEvents":
        """What was known at ``now``."""
        tracked, poll = snapshot.state.tracked, snapshot.poll
        return cls(
            events=tracked.events,
            attempts=snapshot.state.approvals,
            context=ApprovalContext(now.wall, snapshot.vm_name, tracked.incarnation or 0),
            vm=snapshot.vm,
            answered=poll.answered is not None,
            fresh=_is_fresh(snapshot, now),
            flawed=frozenset(flaw.event_id.casefold() for flaw in poll.flaws if flaw.event_id is not None),
        )

    def readable(self, key: str) -> TrackedEvent | None:
        """A listed event that could be read in the last document, if there is one."""
        event = self.events.get(key)
        return event if event is not None and not event.unread else None


class ApprovalLog:
    """Reads and writes the attempts at approvals in the agent's state."""

    def __init__(self, state: AgentState) -> None:
        self.clock = state.clock
        self._state = state

    def listed(self) -> ListedEvents:
        """What is known now."""
        return ListedEvents.of(self._state.snapshot, self.clock.read())

    def write(self, attempt: ApprovalAttempt, change: Change | None = None) -> bool:
        """Write down how far an approval has come, and the record of it; returns whether it is on disk."""

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]]:
            approvals = {**state.approvals, attempt.tracked.event.key: attempt}
            return replace(state, approvals=approvals), (change,) if change is not None else ()

        return self._state.commit(step, on_disk=WRITE_PATIENCE)


def without_old(attempts: dict[str, ApprovalAttempt], tracked: Tracked) -> dict[str, ApprovalAttempt]:
    """The attempts without the oldest of those that are over and whose events are gone."""
    over = [key for key, one in attempts.items() if one.state == "done" and key not in tracked.events]
    old = set(over[:-KEPT_ATTEMPTS])
    return {key: one for key, one in attempts.items() if key not in old}


def _is_fresh(snapshot: AgentSnapshot, now: ClockReading) -> bool:
    poll = snapshot.poll
    if poll.answered is None or poll.outdated or poll.failure is not None:
        return False
    return now.since(poll.answered) <= WATCHED
