"""``Approver`` approves the events that the rules or an operator choose, and only while both switches are on.

One thread decides, and sends one start request after the other. Before each request it asks IMDS for the event once
more and writes the attempt to the state. Right before the request it checks everything again that allows the
approval.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.control_socket import ControlReply, ControlRequest
from notbefore.agent.state import AgentSnapshot, AgentState
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.core.approval import (
    ApprovalAttempt,
    Decision,
    Policy,
    content_of,
    judge,
    next_attempt,
    unreadable,
)
from notbefore.core.change import OPERATOR, ApprovalKind, Change, Reason
from notbefore.core.clock import Instant
from notbefore.core.document import SCHEDULED, parse
from notbefore.core.tracked import WATCHED, PendingEvent, TrackedEvent
from notbefore.errors import DocumentError, ImdsError, NotBeforeError
from notbefore.imds.client import ImdsClient, events_path
from notbefore.store.file import StoredState
from notbefore.store.store import WRITE_PATIENCE

SHORT_WAIT: Final = 0.5  # seconds to the next decision while one that is due waits for IMDS or the disk
LONG_WAIT: Final = 60.0  # seconds to the next decision if nothing happens
OPERATOR_PATIENCE: Final = 45.0  # seconds after which an operator's request is no longer begun
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end
CONFIRM_TIMEOUT: Final = 5.0  # seconds for IMDS's answer right before a start request
PAUSE: Final = 5.0  # seconds after an unusable answer
UNDECIDED: Final = ControlReply(done=False, words="not decided yet: see `notbefore history`")

log = logging.getLogger("notbefore.approval")


class ApprovalSettings(Struct, frozen=True):
    """The settings that decide whether an approval is sent, and to which endpoint."""

    policy: Policy
    endpoint: str
    api_version: str
    allowed: bool  # --allow-approval

    @property
    def off(self) -> str:
        """Why no approval is sent, in words; empty if approvals are sent."""
        if not self.allowed:
            return "`notbefore run` was started without --allow-approval"
        if not self.policy.enabled:
            return "approval.enabled is not true"
        return "approval.dry_run is true" if self.policy.dry_run else ""

    @property
    def dry_run(self) -> bool:
        """Whether approvals are only recorded and not sent."""
        return self.allowed and self.policy.enabled and self.policy.dry_run


class ListedEvents(Struct, frozen=True):
    """What is known of the listed events, and of their approvals, at a moment."""

    known: AgentSnapshot
    at: Instant

    @property
    def events(self) -> dict[str, TrackedEvent]:
        """The listed events."""
        return self.known.state.tracked.events

    @property
    def attempts(self) -> dict[str, ApprovalAttempt]:
        """The progress of each approval."""
        return self.known.state.approvals

    @property
    def begun(self) -> list[str]:
        """The keys of the events whose approval has begun and not ended."""
        return [key for key, attempt in self.attempts.items() if attempt.state != "done"]

    def flawed(self, key: str) -> bool:
        """Whether a part of an event could not be read."""
        return any(flaw.key == key for flaw in self.known.poll.flaws)

    def certain(self, key: str) -> bool:
        """Whether IMDS has just listed an event in readable form: nothing is approved on old data."""
        poll, tracked = self.known.poll, self.known.state.tracked
        if poll.answered is None or poll.outdated or poll.failure is not None:
            return False
        # one of the clocks may have stopped in a freeze, but none runs ahead
        age = max((self.at.wall - poll.answered.wall).total_seconds(), self.at.uptime - poll.answered.uptime)
        return age <= WATCHED and key in tracked.events and key not in tracked.unread

    def decision(self, settings: ApprovalSettings, tracked: TrackedEvent) -> Decision:
        """Return what the rules say about a listed event."""
        return judge(settings.policy, tracked, self.known.vm_name, flawed=self.flawed(tracked.event.key))


class Approver:
    """Decides and sends in its own thread. ``settings`` returns those in use, also right before each request."""

    def __init__(self, state: AgentState, settings: Callable[[], ApprovalSettings], errors: ThreadGuard) -> None:
        self._state = state
        self._clock = state.clock
        self._settings = settings
        self._errors = errors
        self._orders = queue.SimpleQueue[Callable[[], None]]()  # of operators
        # event key -> why IMDS gave no usable answer, and when it may be asked again (seconds since the boot)
        self._unanswered: dict[str, tuple[str, float]] = {}
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approve", daemon=True)

    def start(self) -> None:
        """Start the thread if there can be anything to decide; log the settings. Called again after a reload."""
        settings = self._settings()
        if not settings.off:
            approving = sum(rule.action == "approve" for rule in settings.policy.rules)
            log.warning("approval is on: %d rules may approve events", approving)
        elif settings.allowed or settings.policy.enabled:
            log.warning("approval is off, nothing is sent: %s", settings.off)
        if self._thread.ident is None and (not settings.off or settings.dry_run or self._listed().begun):
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Decide again: there was a change, or the settings changed. Called from any thread; never waits."""
        self._woken.set()

    def stop(self) -> None:
        """Send nothing more. The next agent continues an unanswered request, from the progress in the state."""
        self._stop.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_PATIENCE)

    def _listed(self) -> ListedEvents:
        return ListedEvents(self._state.snapshot, self._state.instant())

    def _write(self, attempt: ApprovalAttempt, change: Change | None = None) -> bool:
        """Store the progress of an approval, and its record; return whether both are on disk."""

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]]:
            approvals = {**state.approvals, attempt.tracked.event.key: attempt}
            return replace(state, approvals=approvals), (change,) if change is not None else ()

        return self._state.commit(step, on_disk=WRITE_PATIENCE)

    # ---- deciding

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            self._woken.wait(self._errors.attempt("approve", self.decide, vital=False) or LONG_WAIT)

    def decide(self) -> float:
        """Do what is due; return the seconds until something else may be due."""
        while not self._orders.empty():
            self._orders.get()()
        listed = self._listed()
        keys = dict.fromkeys([*listed.begun, *(one.event.key for one in listed.known.state.tracked.by_urgency)])
        waits = [self._consider(key) for key in keys if not self._stop.is_set()]
        self._unanswered = {key: one for key, one in self._unanswered.items() if key in listed.events}
        return min([LONG_WAIT, *waits])

    def _consider(self, key: str) -> float:
        """Continue a begun approval, else do what the rules say; return the seconds until more may be due."""
        settings, listed = self._settings(), self._listed()
        tracked, before = listed.events.get(key), listed.attempts.get(key)
        if before is not None and before.state != "done":
            return self._go_on(before, settings, listed)
        if tracked is None or (settings.off and not settings.dry_run):
            return LONG_WAIT
        decision = listed.decision(settings, tracked)
        step = f"{decision.step} dry run" if settings.dry_run else decision.step
        nothing_to_do = decision.action == "leave" and decision.skipped is None
        if nothing_to_do or (before is not None and before.is_carried_out(tracked, step)):
            return LONG_WAIT
        wait = (decision.at - listed.at.time).total_seconds() if decision.at is not None else 0.0
        if wait > 0 or not self._may_ask(key, listed):
            return min(max(wait, SHORT_WAIT), LONG_WAIT)
        attempt = next_attempt(before, tracked, decision.rule, step)
        if decision.skipped is not None:
            return self._end(attempt, decision.skipped, decision.why)
        return self._end(attempt, "dry_run", "it would be approved now") if settings.dry_run else self._send(attempt)

    def _go_on(self, attempt: ApprovalAttempt, settings: ApprovalSettings, listed: ListedEvents) -> float:
        """Continue an approval that IMDS has not answered, or that could not be stored."""
        key = attempt.tracked.event.key
        if listed.known.poll.answered is None:
            return SHORT_WAIT
        if (objection := _objection(attempt, settings, listed)) is not None:
            error, _ = self._unanswered.get(key, ("", 0.0))
            return self._end(attempt, objection[0], "; ".join(filter(None, (objection[1], error))))
        if attempt.rule == OPERATOR:
            return self._end(attempt, "no_answer", "the agent ended before the answer arrived: ask again")
        return self._send(attempt) if self._may_ask(key, listed) else SHORT_WAIT

    def _may_ask(self, key: str, listed: ListedEvents) -> bool:
        """Whether IMDS may be asked: it has just listed the event, and no pause is left."""
        _, again = self._unanswered.get(key, ("", 0.0))
        return listed.certain(key) and self._clock.boot_time() >= again

    # ---- doing

    def _send(self, attempt: ApprovalAttempt) -> float:
        """Ask IMDS once more, store the attempt, check everything again, and send the start request.

        Returns the seconds until the next decision.
        """
        settings = self._settings()
        path, sent = events_path(settings.api_version), attempt
        try:
            with closing(ImdsClient(settings.endpoint)) as client:
                why = _why_not_listed(client.get(path, timeout=CONFIRM_TIMEOUT).body, attempt.tracked)
                if why:  # the next poll sees it as well
                    return self._end(attempt, "changed", why) if attempt.rule == OPERATOR else SHORT_WAIT
                counted = replace(attempt, requests=attempt.requests + 1)
                written = self._write(counted)
                current, listed = self._settings(), self._listed()
                objection = _objection(attempt, current, listed)  # the last check
                if objection is None and not written and attempt.rule == OPERATOR:
                    objection = "state_not_written", "the state cannot be written, so nothing was sent"
                if objection is not None:
                    return self._end(attempt, *objection)
                certain = listed.certain(attempt.tracked.event.key) and current.endpoint == settings.endpoint
                if not written or not certain or self._stop.is_set():
                    self._write(attempt)  # take back the count: nothing was sent
                    return SHORT_WAIT
                sent = counted
                body = {"StartRequests": [{"EventId": attempt.tracked.event.event_id}]}
                client.post(path, msgspec.json.encode(body))
        except ImdsError as error:
            refused = sent is not attempt and error.reason == "bad_request"
            if refused or attempt.rule == OPERATOR:
                return self._end(sent, "refused" if refused else "no_answer", str(error))
            event = attempt.tracked.event
            self._unanswered[event.key] = str(error), self._clock.boot_time() + PAUSE
            log.warning("approval of %s: %s; again in %g s", event.event_id, error, PAUSE)
            return PAUSE
        return self._end(replace(sent, approved=content_of(attempt.tracked)), "accepted", "")

    def _end(self, attempt: ApprovalAttempt, reason: Reason, words: str) -> float:
        """Record the end of an attempt: approved; failed, if a request was sent; else skipped."""
        kind: ApprovalKind = "approved" if reason == "accepted" else "approval_skipped"
        if attempt.requests and reason != "accepted":
            kind, reason = "approval_failed", reason if reason == "refused" else "no_answer"
        known, at = self._state.snapshot, self._state.instant()
        change = attempt.change((kind, reason), words, at, known.vm_name, known.state.tracked.incarnation or 0)
        outcome = f"{kind} ({reason})" + (f": {words}" if words else "")
        self._unanswered.pop(attempt.tracked.event.key, None)
        self._write(attempt.ended(outcome), change)
        log.warning("%s %s, %s: %s", change.event.event_type, change.event.event_id, attempt.rule, outcome)
        return SHORT_WAIT

    # ---- requests of operators

    def answer(self, request: ControlRequest, user: str) -> ControlReply:
        """Answer a request that ``user`` sent through the agent's socket; may wait for IMDS.

        Raises ``NotBeforeError`` if approvals are off, or if the event is not listed.
        """
        listed, key, settings = self._listed(), request.event_id.casefold(), self._settings()
        tracked, before = listed.events.get(key), listed.attempts.get(key)
        if settings.off:
            raise NotBeforeError(f"nothing is sent: {settings.off}")
        if tracked is None:
            raise NotBeforeError(f"no event {request.event_id} is listed: see `notbefore events`")
        if not request.content:
            event = PendingEvent.of(tracked, listed.at.time)
            return ControlReply(done=True, words=_approved(before, tracked), event=event, content=content_of(tracked))
        if content_of(tracked) != request.content:
            return ControlReply(done=False, words="nothing was sent: the event has changed since it was shown")
        until, reply = self._clock.boot_time() + OPERATOR_PATIENCE, queue.SimpleQueue[ControlReply]()

        def carry_out() -> None:
            if self._clock.boot_time() < until:
                reply.put(self._by_hand(tracked, user, request.reason))

        self._orders.put(carry_out)
        self.wake()
        try:
            return reply.get(timeout=OPERATOR_PATIENCE)
        except queue.Empty:
            return UNDECIDED

    def _by_hand(self, tracked: TrackedEvent, user: str, reason: str) -> ControlReply:
        """Approve a listed event for an operator, unless it is approved already or its approval is under way."""
        listed, key = self._listed(), tracked.event.key
        before = listed.attempts.get(key)
        if words := _approved(before, tracked):
            return ControlReply(done=True, words=words)
        if key in listed.begun:
            return ControlReply(done=False, words="an approval of it is under way: see `notbefore history`")
        attempt = replace(next_attempt(before, tracked, OPERATOR, by=user), reason=reason)
        if (objection := _objection(attempt, self._settings(), listed)) is not None:
            self._end(attempt, *objection)
        elif not listed.certain(key):
            self._end(attempt, "no_answer", "IMDS does not answer: nothing was sent")
        else:
            self._send(attempt)
        outcome = self._listed().attempts[key].outcome
        return ControlReply(outcome.startswith("approved"), outcome) if outcome else UNDECIDED


# ---- decisions from frozen values


def _objection(attempt: ApprovalAttempt, settings: ApprovalSettings, listed: ListedEvents) -> tuple[Reason, str] | None:
    """Return why a decision is no longer valid, as a reason and in words; ``None`` if it still is."""
    tracked = listed.events.get(attempt.tracked.event.key)
    status = tracked.event.event_status if tracked is not None else "gone"
    if tracked is None or status != SCHEDULED:
        return "no_longer_scheduled", f"it is {status}"
    if tracked.not_before is not None and listed.at.time >= tracked.not_before:
        return "too_late", "NotBefore came first"
    if settings.off:
        return "switched_off", settings.off
    if content_of(tracked) != content_of(attempt.tracked):
        return "changed", "the event has changed"
    if attempt.rule == OPERATOR:
        words = unreadable(tracked, flawed=listed.flawed(tracked.event.key))
        return ("changed", words) if words else None
    decision = listed.decision(settings, tracked)
    same = decision.action == "approve" and decision.step == attempt.step
    return None if same else ("changed", f"the rules say {decision.action} now: {decision.why}")


def _approved(attempt: ApprovalAttempt | None, tracked: TrackedEvent) -> str:
    """Return in words that an event was approved with its present content; empty if it was not."""
    if attempt is None or attempt.approved != content_of(tracked):
        return ""
    return "it is approved already (`notbefore history`): nothing more is sent unless Azure changes it"


def _why_not_listed(body: bytes, tracked: TrackedEvent) -> str:
    """Return why a body no longer lists the event that was decided on, in words; empty if it lists it unchanged.

    Raises ``ImdsError`` if the body is no document.
    """
    event = tracked.event
    try:
        document = parse(body)
    except DocumentError as error:
        raise ImdsError("rejected", str(error)) from None
    if any(flaw.key == event.key for flaw in document.flaws):
        return "a part of it cannot be read now"
    same = any(one.key == event.key and one.digest() == event.digest() for one in document.events)
    return "" if same else "IMDS does not list it like this any more"
