"""``Approver`` approves events that the rules or an operator choose, while both switches are on.

One thread decides, and sends one start request after the other. It judges each event by one
``Runtime``, which it reads once. Before each request it asks IMDS for the event again and writes
the attempt to the state. Right before the request it judges again, by the runtime of that moment:
it sends nothing if the rules no longer allow the approval, or if IMDS has another address now.

While a reload changes from one IMDS to another, nothing is approved: the known events are outdated
until the new one answers (``ListedEvents.certain``).
"""

import logging
import queue
import threading
from contextlib import closing
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.freeze import longest_between
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.state import AgentSnapshot, AgentState, identity, name_of
from notbefore.agent.thread_guard import THREAD_PATIENCE, ThreadGuard
from notbefore.core.approval import (
    ADVICE,
    ApprovalAttempt,
    Decision,
    content_of,
    judge,
    next_attempt,
    unreadable,
)
from notbefore.core.approval_plan import ApprovalPlan, Switches, plan
from notbefore.core.change import OPERATOR, ApprovalKind, Reason
from notbefore.core.clock import Instant
from notbefore.core.document import SCHEDULED, parse
from notbefore.core.tracked import WATCHED, PendingEvent, TrackedEvent
from notbefore.errors import DocumentError, ImdsError, NotBeforeError
from notbefore.imds.client import PREVIEW, ImdsClient, events_path
from notbefore.process.control_socket import ControlReply, ControlRequest

SHORT_WAIT: Final = 0.5  # seconds to the next decision while a due one waits for IMDS or the disk
LONG_WAIT: Final = 60.0  # seconds to the next decision if nothing happens
OPERATOR_PATIENCE: Final = 45.0  # seconds after which an operator's request is no longer begun
CONFIRM_TIMEOUT: Final = 5.0  # seconds for IMDS's answer right before a start request
PAUSE: Final = 5.0  # seconds after an unusable answer
UNNAMED: Final = "it names no VM; `notbefore approve --without-resources` approves it anyway"
UNDECIDED: Final = ControlReply(done=False, words="not decided yet: see `notbefore history`")

log = logging.getLogger("notbefore.approval")


class ListedEvents(Struct, frozen=True):
    """The listed events, and their approvals, at a moment."""

    snapshot: AgentSnapshot
    at: Instant

    @property
    def events(self) -> dict[str, TrackedEvent]:
        """The listed events."""
        return self.snapshot.state.tracked.events

    @property
    def attempts(self) -> dict[str, ApprovalAttempt]:
        """The progress of each approval."""
        return self.snapshot.state.approvals

    @property
    def begun(self) -> list[str]:
        """The keys of the events whose approval has begun and not ended."""
        return [key for key, attempt in self.attempts.items() if attempt.state != "done"]

    def flawed(self, key: str) -> bool:
        """Whether a part of an event could not be read."""
        return any(flaw.key == key for flaw in self.snapshot.poll.flaws)

    def certain(self, key: str, runtime: Runtime) -> bool:
        """Whether the IMDS in use has just listed an event in readable form.

        Nothing is approved on old data, nor on events whose scopes belong to the VM's name in
        another configuration than that of ``runtime``.
        """
        poll = self.snapshot.poll
        tracked = self.snapshot.state.tracked
        if poll.asked is None or poll.outdated or poll.failure is not None:
            return False
        if self.snapshot.vm_name != name_of(identity(self.snapshot.state.vm, runtime.config)):
            return False

        # one of the clocks may have stopped in a freeze, but none runs ahead
        age = longest_between(poll.asked, self.at)
        return age <= WATCHED and key in tracked.events and key not in tracked.unread

    def decision(self, runtime: Runtime, tracked: TrackedEvent) -> Decision:
        """Return what the rules say about a listed event."""
        flawed = self.flawed(tracked.event.key)
        return judge(runtime.config.approval, tracked, self.snapshot.vm_name, flawed=flawed)

    def plan(self, runtime: Runtime, tracked: TrackedEvent) -> ApprovalPlan:
        """Return what is to be done about the approval of a listed event."""
        key = tracked.event.key
        switches = Switches(off=runtime.approval_off, dry_run=runtime.approval_dry_run)
        return plan(
            runtime.config.approval,
            switches,
            tracked,
            self.attempts.get(key),
            vm=self.snapshot.vm_name,
            now=self.at.time,
            flawed=self.flawed(key),
        )


class Objection(Struct, frozen=True):
    """A cause not to approve an event that was to be approved."""

    reason: Reason
    words: str


class PausedEvent(Struct, frozen=True):
    """An event for which IMDS has given no usable answer."""

    error: str
    until: float  # seconds since the boot; then IMDS may be asked again


class OperatorOrder(Struct, frozen=True):
    """A listed event that an operator wants to have approved."""

    tracked: TrackedEvent
    user: str
    reason: str
    without_resources: bool  # even if the event names no VM
    deadline: float  # seconds since the boot; the approval does not begin later
    reply: queue.SimpleQueue[ControlReply]


class Approver:
    """Decides and sends in its own thread."""

    def __init__(self, state: AgentState, runtime: Published[Runtime], errors: ThreadGuard) -> None:
        self._state = state
        self._clock = state.clock
        self._runtime = runtime
        self._errors = errors
        self._orders = queue.SimpleQueue[OperatorOrder]()
        self._paused: dict[str, PausedEvent] = {}  # by event key
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approve", daemon=True)

    def start(self) -> None:
        """Log the settings, and start the thread if there can be anything to decide.

        Called again after a reload.
        """
        runtime = self._runtime.current
        policy = runtime.config.approval
        if not runtime.approval_off:
            approving = sum(rule.action == "approve" for rule in policy.rules)
            log.warning("approval is on: %d rules may approve events", approving)
        elif runtime.allow_approval or policy.enabled:
            log.warning("approval is off, nothing is sent: %s", runtime.approval_off)

        may_decide = not runtime.approval_off or runtime.approval_dry_run
        if self._thread.ident is None and (may_decide or self._listed().begun):
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Decide again: an event or the settings have changed.

        Called from any thread; never waits.
        """
        self._woken.set()

    def stop(self) -> None:
        """Send nothing more. The next agent continues an unanswered request."""
        self._stop.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(THREAD_PATIENCE)

    def _listed(self) -> ListedEvents:
        return ListedEvents(self._state.snapshot, self._state.instant())

    # ---- deciding

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            patience = self._errors.attempt("approve", self.decide, vital=False)
            if patience is None:  # it has failed
                patience = LONG_WAIT
            self._woken.wait(patience)

    def decide(self) -> float:
        """Carry out the decisions that are due; return the seconds until others may be due."""
        while not self._orders.empty():
            self._carry_out(self._orders.get())

        listed = self._listed()
        urgent = [tracked.event.key for tracked in listed.snapshot.state.tracked.by_urgency]
        patience = LONG_WAIT
        for key in dict.fromkeys([*listed.begun, *urgent]):
            if self._stop.is_set():
                break
            patience = min(patience, self._consider(key))

        for key in self._paused.keys() - listed.events.keys():
            del self._paused[key]
        return patience

    def _consider(self, key: str) -> float:
        """Continue a begun approval of an event, or follow the rules.

        Returns the seconds until more may be due.
        """
        # the runtime first: after a change of IMDS, the events are outdated before it is replaced
        runtime = self._runtime.current
        listed = self._listed()
        tracked = listed.events.get(key)
        attempt = listed.attempts.get(key)
        if attempt is not None and attempt.state != "done":
            return self._continue(attempt, runtime, listed)
        if tracked is None:
            return LONG_WAIT
        return self._follow_rules(tracked, runtime, listed)

    def _follow_rules(
        self,
        tracked: TrackedEvent,
        runtime: Runtime,
        listed: ListedEvents,
    ) -> float:
        """Follow the rules for a listed event; return the seconds until more may be due."""
        planned = listed.plan(runtime, tracked)
        if not planned.is_due_action:
            return LONG_WAIT

        wait = planned.seconds_left(listed.at.time)
        if wait > 0 or not self._may_ask(tracked.event.key, runtime, listed):
            return min(max(wait, SHORT_WAIT), LONG_WAIT)

        decision = planned.decision
        attempt = next_attempt(planned.attempt, tracked, decision.rule, planned.step)
        if decision.skipped is not None:
            return self._end(attempt, decision.skipped, decision.why)
        if planned.action == "dry_run":
            return self._end(attempt, "dry_run", "it would be approved now")
        return self._send(attempt, runtime)

    def _continue(
        self,
        attempt: ApprovalAttempt,
        runtime: Runtime,
        listed: ListedEvents,
    ) -> float:
        """Continue an approval that IMDS has not answered, or that could not be stored."""
        key = attempt.tracked.event.key
        if listed.snapshot.poll.answered is None:
            return SHORT_WAIT

        objection = _objection(attempt, runtime, listed)
        if objection is not None:
            words = objection.words
            if key in self._paused:
                words = f"{words}; {self._paused[key].error}"
            return self._end(attempt, objection.reason, words)

        if attempt.rule == OPERATOR:
            words = "the agent ended before the answer arrived: ask again"
            return self._end(attempt, "no_answer", words)
        if not self._may_ask(key, runtime, listed):
            return SHORT_WAIT
        return self._send(attempt, runtime)

    def _may_ask(self, key: str, runtime: Runtime, listed: ListedEvents) -> bool:
        """Whether IMDS may be asked: it has just listed the event, and no pause is left."""
        if not listed.certain(key, runtime):
            return False
        return key not in self._paused or self._clock.boot_time() >= self._paused[key].until

    # ---- doing

    def _send(self, attempt: ApprovalAttempt, runtime: Runtime) -> float:
        """Ask IMDS again, store the attempt, judge again, and send the start request.

        Returns the seconds until the next decision.
        """
        path = events_path(runtime.api_version)
        with closing(ImdsClient(runtime.endpoint)) as client:
            try:
                answer = client.get(path, timeout=CONFIRM_TIMEOUT)
                difference = _why_not_listed(answer.body, attempt.tracked)
            except ImdsError as error:
                return self._pause(attempt, error)
            if difference and attempt.rule == OPERATOR:
                return self._end(attempt, "changed", difference)
            if difference:  # the next poll also sees it
                return SHORT_WAIT

            counted = replace(attempt, requests=attempt.requests + 1)
            is_on_disk = self._state.write_attempt(counted)
            wait = self._check_again(attempt, runtime, is_on_disk=is_on_disk)
            if wait is not None:
                return wait
            return self._post(client, path, counted)

    def _check_again(
        self,
        attempt: ApprovalAttempt,
        runtime: Runtime,
        *,
        is_on_disk: bool,
    ) -> float | None:
        """Judge an attempt right before its start request, by the runtime of this moment.

        Returns ``None`` if the request may be sent to the endpoint of ``runtime``, else the seconds
        until the next decision.
        """
        current = self._runtime.current
        listed = self._listed()
        objection = _objection(attempt, current, listed)
        if objection is None and not is_on_disk and attempt.rule == OPERATOR:
            words = "the state cannot be written, so nothing was sent"
            objection = Objection("state_not_written", words)
        if objection is not None:
            return self._end(attempt, objection.reason, objection.words)

        is_certain = listed.certain(attempt.tracked.event.key, current)
        if (current.endpoint, current.api_version) != (runtime.endpoint, runtime.api_version):
            is_certain = False
        if not is_on_disk or not is_certain or self._stop.is_set():
            self._state.write_attempt(attempt)  # take back the count: nothing was sent
            return SHORT_WAIT
        return None

    def _post(self, client: ImdsClient, path: str, attempt: ApprovalAttempt) -> float:
        """Send the start request, and record IMDS's answer."""
        body: dict[str, Any] = {"StartRequests": [{"EventId": attempt.tracked.event.event_id}]}
        if path == events_path(PREVIEW):
            body["DocumentIncarnation"] = self._state.snapshot.state.tracked.incarnation
        try:
            client.post(path, msgspec.json.encode(body))
        except ImdsError as error:
            if error.reason == "bad_request":
                return self._end(attempt, "refused", str(error))
            return self._pause(attempt, error)
        approved = replace(attempt, approved=content_of(attempt.tracked))
        return self._end(approved, "accepted", "")

    def _pause(self, attempt: ApprovalAttempt, error: ImdsError) -> float:
        """Wait after an unusable answer of IMDS; an operator gets the error instead."""
        if attempt.rule == OPERATOR:
            return self._end(attempt, "no_answer", str(error))
        event = attempt.tracked.event
        self._paused[event.key] = PausedEvent(str(error), self._clock.boot_time() + PAUSE)
        log.warning("approval of %s: %s; again in %g s", event.event_id, error, PAUSE)
        return PAUSE

    def _end(self, attempt: ApprovalAttempt, reason: Reason, words: str) -> float:
        """Record the end of an attempt: approved; failed, if a request was sent; else skipped."""
        kind: ApprovalKind = "approval_skipped"
        if reason == "accepted":
            kind = "approved"
        elif attempt.requests:
            kind = "approval_failed"
            if reason != "refused":
                reason = "no_answer"

        snapshot = self._state.snapshot
        incarnation = snapshot.state.tracked.incarnation or 0
        at = self._state.instant()
        change = attempt.change(
            kind, reason, words, at=at, vm=snapshot.vm_name, incarnation=incarnation
        )
        outcome = f"{kind} ({reason})"
        if words:
            outcome = f"{outcome}: {words}"

        event = change.event
        self._paused.pop(event.key, None)
        self._state.write_attempt(attempt.ended(outcome), change)
        log.warning("%s %s, %s: %s", event.event_type, event.event_id, attempt.rule, outcome)
        return SHORT_WAIT

    # ---- requests of operators

    def answer(self, request: ControlRequest, user: str) -> ControlReply:
        """Answer a request that ``user`` sent through the agent's socket; may wait for IMDS.

        Raises ``NotBeforeError`` if approvals are off, or if the event is not listed.
        """
        runtime = self._runtime.current
        listed = self._listed()
        key = request.event_id.casefold()
        tracked = listed.events.get(key)
        if runtime.approval_off:
            raise NotBeforeError(f"nothing is sent: {runtime.approval_off}")
        if tracked is None:
            raise NotBeforeError(f"no event {request.event_id} is listed: see `notbefore events`")
        if tracked.event.is_advice:
            raise NotBeforeError(f"nothing is sent: {ADVICE}")

        content = content_of(tracked)
        if not request.content:
            words = _approved(listed.attempts.get(key), tracked)
            event = PendingEvent.of(tracked, listed.at.time)
            return ControlReply(done=True, words=words, event=event, content=content)
        if request.content != content:
            words = "nothing was sent: the event has changed since it was shown"
            return ControlReply(done=False, words=words)
        return self._order(tracked, request, user)

    def _order(self, tracked: TrackedEvent, request: ControlRequest, user: str) -> ControlReply:
        """Let the approver's thread approve an event, and wait for the result."""
        deadline = self._clock.boot_time() + OPERATOR_PATIENCE
        reply = queue.SimpleQueue[ControlReply]()
        order = OperatorOrder(
            tracked=tracked,
            user=user,
            reason=request.reason,
            without_resources=request.without_resources,
            deadline=deadline,
            reply=reply,
        )
        self._orders.put(order)
        self.wake()
        try:
            return reply.get(timeout=OPERATOR_PATIENCE)
        except queue.Empty:
            return UNDECIDED

    def _carry_out(self, order: OperatorOrder) -> None:
        if self._clock.boot_time() < order.deadline:
            order.reply.put(self._approve_by_hand(order))

    def _approve_by_hand(self, order: OperatorOrder) -> ControlReply:
        """Approve a listed event for an operator, unless its approval is done or under way."""
        runtime = self._runtime.current
        listed = self._listed()
        key = order.tracked.event.key
        before = listed.attempts.get(key)
        approved = _approved(before, order.tracked)
        if approved:
            return ControlReply(done=True, words=approved)
        if key in listed.begun:
            words = "an approval of it is under way: see `notbefore history`"
            return ControlReply(done=False, words=words)

        attempt = next_attempt(before, order.tracked, OPERATOR, by=order.user)
        attempt = replace(
            attempt,
            reason=order.reason,
            without_resources=order.without_resources,
        )
        objection = _objection(attempt, runtime, listed)
        if objection is not None:
            self._end(attempt, objection.reason, objection.words)
        elif not listed.certain(key, runtime):
            self._end(attempt, "no_answer", "IMDS does not answer: nothing was sent")
        else:
            self._send(attempt, runtime)

        outcome = self._listed().attempts[key].outcome
        if not outcome:
            return UNDECIDED
        return ControlReply(done=outcome.startswith("approved"), words=outcome)


# ---- decisions from frozen values


def _objection(
    attempt: ApprovalAttempt,
    runtime: Runtime,
    listed: ListedEvents,
) -> Objection | None:
    """Return why a decision is no longer valid; ``None`` if it still is."""
    tracked = listed.events.get(attempt.tracked.event.key)
    if tracked is None:
        return Objection("no_longer_scheduled", "it is gone")
    if tracked.event.event_status != SCHEDULED:
        return Objection("no_longer_scheduled", f"it is {tracked.event.event_status}")
    if tracked.not_before is not None and listed.at.time >= tracked.not_before:
        return Objection("too_late", "NotBefore came first")
    if runtime.approval_off:
        return Objection("switched_off", runtime.approval_off)
    if content_of(tracked) != content_of(attempt.tracked):
        return Objection("changed", "the event has changed")
    if attempt.rule == OPERATOR:
        return _objection_to_operator(attempt, tracked, listed)
    return _objection_of_rules(attempt, tracked, runtime, listed)


def _objection_to_operator(
    attempt: ApprovalAttempt,
    tracked: TrackedEvent,
    listed: ListedEvents,
) -> Objection | None:
    """Return why an operator may not approve an event, although it has not changed."""
    words = unreadable(tracked, flawed=listed.flawed(tracked.event.key))
    if words:
        return Objection("changed", words)
    if not tracked.event.resources and not attempt.without_resources:
        return Objection("no_resources", UNNAMED)
    return None


def _objection_of_rules(
    attempt: ApprovalAttempt,
    tracked: TrackedEvent,
    runtime: Runtime,
    listed: ListedEvents,
) -> Objection | None:
    """Return why the rules no longer allow an approval; ``None`` if they still do."""
    decision = listed.decision(runtime, tracked)
    if decision.action == "approve" and decision.step == attempt.step:
        return None
    return Objection("changed", f"the rules say {decision.action} now: {decision.why}")


def _approved(attempt: ApprovalAttempt | None, tracked: TrackedEvent) -> str:
    """Return in words that an event was approved with its present content; empty if it was not."""
    if attempt is None or attempt.approved != content_of(tracked):
        return ""
    already = "it is approved already (`notbefore history`)"
    return f"{already}: nothing more is sent unless Azure changes it"


def _why_not_listed(body: bytes, tracked: TrackedEvent) -> str:
    """Return why a body no longer lists an event unchanged, in words; empty if it does.

    Raises ``ImdsError`` if the body is no document.
    """
    event = tracked.event
    try:
        document = parse(body)
    except DocumentError as error:
        raise ImdsError("rejected", str(error)) from None
    if any(flaw.key == event.key for flaw in document.flaws):
        return "a part of it cannot be read now"
    for listed in document.events:
        if listed.key == event.key and listed.digest() == event.digest():
            return ""
    return "IMDS does not list it like this any more"
