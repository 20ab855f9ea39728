"""``Approver``: approves events where both switches are on, and exactly those that the rules or an operator name.

One thread decides, and sends one start request after the other. Before each of them IMDS is asked once more for the
event, then it is written down what is about to be done, and right before the request everything that allows it is
looked at again.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.approval_log import ApprovalLog, ListedEvents
from notbefore.agent.control_socket import ControlReply, ControlRequest
from notbefore.agent.start_request import ApprovalSettings, post, why_not_listed
from notbefore.agent.unforeseen import UnforeseenErrors
from notbefore.core.approval import ApprovalAttempt, Decision, content_of, judge, unreadable
from notbefore.core.change import BY_RULE, OPERATOR, ApprovalKind, Reason
from notbefore.core.document import SCHEDULED
from notbefore.core.duration import back_off
from notbefore.core.listing import PendingApproval, PendingEvent
from notbefore.core.tracked import TrackedEvent
from notbefore.errors import ImdsError
from notbefore.imds.client import ImdsClient

SHORT_WAIT: Final = 0.5  # seconds to the next decision: something is due, and waits for IMDS or the disk
LONG_WAIT: Final = 60.0  # seconds to the next decision where nothing happens
OPERATOR_PATIENCE: Final = 45.0  # seconds after which what an operator asked for is not begun any more
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end
PAUSE: Final = 1.0  # seconds after the first unusable answer, doubled with each,
LONGEST_PAUSE: Final = 60.0  # to so many seconds
LOGGED_FAILURES: Final = 4  # each of them is logged; later ones now and then
WOULD_APPROVE: Final = "it would be approved now"
INTERRUPTED: Final = "the agent ended before it had the answer: ask again"

log = logging.getLogger("notbefore.approval")


class Objection(Struct, frozen=True):
    """Why an event is not to be approved now."""

    reason: Reason
    words: str


class UnansweredRequest(Struct, frozen=True):
    """IMDS gave no usable answer about an event."""

    count: int  # in a row
    error: str
    again: float  # monotonic seconds


class OperatorOrder:
    """What an operator asks for; the thread sets ``reply``, then ``done``."""

    def __init__(self, tracked: TrackedEvent, user: str, reason: str, until: float) -> None:
        self.tracked = tracked
        self.user = user
        self.reason = reason
        self.until = until  # monotonic seconds: it is not begun later
        self.reply = ControlReply(done=False, words="it is not decided: see `notbefore history`")
        self.done = threading.Event()


class Approver:
    """``settings`` gives those in use: they are asked for again right before each request."""

    def __init__(
        self, approvals: ApprovalLog, settings: Callable[[], ApprovalSettings], errors: UnforeseenErrors
    ) -> None:
        self._approvals = approvals
        self._clock = approvals.clock
        self._settings = settings
        self._errors = errors
        self._contents: dict[str, tuple[str, datetime]] = {}  # of each listed event, and since when it has it
        self._unanswered: dict[str, UnansweredRequest] = {}  # by the event's key
        self._orders = queue.SimpleQueue[OperatorOrder]()
        self._client: ImdsClient | None = None  # of the request that is under way
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approve", daemon=True)

    def start(self) -> None:
        """Begin to decide, where there can be anything to decide; log which settings hold. Again after a reload."""
        settings = self._settings()
        if settings.mode == "on":
            log.warning("approval is on: %d rules may approve events", len(settings.policy.approving))
        elif settings.mode == "dry_run":
            log.warning("approval: dry run, nothing is sent (approval.dry_run)")
        elif settings.allowed or settings.policy.enabled:
            log.warning("approval is off, nothing is sent: %s", settings.off)
        left_over = any(attempt.state != "done" for attempt in self._approvals.listed().attempts.values())
        if self._thread.ident is None and (left_over or not settings.missing):
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        """There was a change, or the settings are others. From any thread; never waits."""
        self._woken.set()

    def stop(self) -> None:
        """Send nothing more. What is under way is cut off; the state says how far it came."""
        self._stop.set()
        self._woken.set()
        client = self._client
        if client is not None:
            client.abort()
        if self._thread.ident is not None:
            self._thread.join(STOP_PATIENCE)

    # ---- deciding

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            wait = LONG_WAIT
            with self._errors.guarded("approve", vital=False):
                wait = self.decide()
            self._woken.wait(wait)

    def decide(self) -> float:
        """Do what is due; returns seconds until something else may be."""
        while not self._orders.empty():
            self._carry_out(self._orders.get())
        listed = self._approvals.listed()
        self._contents = {key: known for key, known in self._contents.items() if key in listed.events}
        begun = {key for key, attempt in listed.attempts.items() if attempt.state != "done"}
        waits = [self._go_on(key) for key in begun]
        first_due = sorted(listed.events.values(), key=lambda one: one.not_before or datetime.max.replace(tzinfo=UTC))
        waits += [self._consider(one.event.key) for one in first_due if one.event.key not in begun]
        self._unanswered = {key: known for key, known in self._unanswered.items() if key in listed.events}
        return min([LONG_WAIT, *waits])

    def _consider(self, key: str) -> float:
        """Do what the rules say of a listed event; returns seconds until more may be due."""
        settings, listed = self._settings(), self._approvals.listed()
        tracked, before = listed.events.get(key), listed.attempts.get(key)
        if tracked is None or settings.off or self._stop.is_set():
            return LONG_WAIT
        decision = self._decision(settings, tracked, listed, self._unchanged_since(tracked, listed))
        dry_run = settings.mode == "dry_run"
        step = f"{decision.step} dry run" if dry_run else decision.step
        nothing_to_do = decision.action == "leave" and decision.skipped is None
        if nothing_to_do or (before is not None and before.is_carried_out(tracked, step)):
            return LONG_WAIT
        wait = (decision.at - listed.context.now).total_seconds() if decision.at is not None else 0.0
        if wait <= 0 and self._answers(key, listed):
            attempt = _next(before, tracked, decision.rule, step)
            if decision.skipped is None and not dry_run:
                return self._send(attempt)
            self._give_up(attempt, decision.skipped or "dry_run", decision.why if decision.skipped else WOULD_APPROVE)
        return min(max(wait, SHORT_WAIT), LONG_WAIT)

    def _answers(self, key: str, listed: ListedEvents) -> bool:
        """IMDS has just listed the event, and does not owe an answer about it."""
        unanswered = self._unanswered.get(key)
        if unanswered is not None and self._clock.monotonic() < unanswered.again:
            return False
        return listed.fresh and listed.readable(key) is not None

    def _decision(
        self, settings: ApprovalSettings, tracked: TrackedEvent, listed: ListedEvents, since: datetime | None
    ) -> Decision:
        flawed = tracked.event.key in listed.flawed
        return judge(settings.policy, tracked, listed.context.vm, flawed=flawed, since=since)

    def _unchanged_since(self, tracked: TrackedEvent, listed: ListedEvents) -> datetime:
        """When this process first saw the event as it is."""
        key, content = tracked.event.key, content_of(tracked)
        if key not in self._contents or self._contents[key][0] != content:
            self._contents[key] = content, listed.context.now
        return self._contents[key][1]

    def _go_on(self, key: str) -> float:
        """Go on with what was begun: IMDS has not answered it, or it could not be written down."""
        listed = self._approvals.listed()
        attempt = listed.attempts.get(key)
        if attempt is None or not listed.answered or self._stop.is_set():
            return SHORT_WAIT
        objection, unanswered = self._objection(attempt, listed), self._unanswered.get(key)
        if objection is not None:
            words = f"{objection.words}; {unanswered.error}" if unanswered is not None else objection.words
            return self._give_up(attempt, objection.reason, words)
        if attempt.rule == OPERATOR:
            return self._give_up(attempt, "no_answer", INTERRUPTED)
        return self._send(attempt) if self._answers(key, listed) else SHORT_WAIT

    def _objection(self, attempt: ApprovalAttempt, listed: ListedEvents) -> Objection | None:
        """Why a decision does not hold any more: by the event, the time, the settings, the rules, or this VM's name."""
        tracked, settings = listed.events.get(attempt.tracked.event.key), self._settings()
        if tracked is None:
            return Objection("no_longer_scheduled", "it is gone")
        if tracked.event.event_status != SCHEDULED:
            return Objection("no_longer_scheduled", f"it is {tracked.event.event_status}")
        if tracked.not_before is not None and listed.context.now >= tracked.not_before:
            return Objection("too_late", "NotBefore came first")
        if settings.mode != "on":
            return Objection("switched_off", settings.off or "approval.dry_run is true")
        words = self._changed(attempt, tracked, settings, listed)
        return Objection("changed", words) if words else None

    def _changed(
        self, attempt: ApprovalAttempt, tracked: TrackedEvent, settings: ApprovalSettings, listed: ListedEvents
    ) -> str:
        """What has changed since the decision, in words; empty if nothing has."""
        if content_of(tracked) != content_of(attempt.tracked):
            return "the event has changed"
        if attempt.rule == OPERATOR:
            return unreadable(tracked, flawed=tracked.event.key in listed.flawed)
        decision = self._decision(settings, tracked, listed, None)
        if decision.action != "approve" or decision.step != attempt.step:
            return f"the rules say {decision.action} now: {decision.why}"
        return "it is another VM's turn now" if decision.at is not None and listed.context.now < decision.at else ""

    # ---- doing

    def _send(self, attempt: ApprovalAttempt) -> float:
        """Ask IMDS once more, then send; returns seconds until it is to be tried again, if it is."""
        settings = self._settings()
        with self._connected(settings) as client:
            try:
                why = why_not_listed(client, settings, attempt.tracked)
            except ImdsError as error:
                return self._not_answered(attempt, error)
            if why:  # the next poll sees it as well
                return self._give_up(attempt, "changed", why) if attempt.rule == OPERATOR else SHORT_WAIT
            return self._post(attempt, client, settings)

    def _post(self, attempt: ApprovalAttempt, client: ImdsClient, settings: ApprovalSettings) -> float:
        """Write down what is about to be done, look at everything again, and do it."""
        counted = replace(attempt, requests=attempt.requests + 1)
        written = self._approvals.write(counted)
        listed = self._approvals.listed()
        objection = self._objection(attempt, listed)  # the last look
        if objection is not None:
            return self._give_up(attempt, objection.reason, objection.words)
        if not written and attempt.rule == OPERATOR:
            return self._give_up(attempt, "state_not_written", "the state cannot be written, so nothing was sent")
        if not written or not listed.fresh or self._stop.is_set():
            self._approvals.write(attempt)  # nothing was done of what was written ahead
            return SHORT_WAIT
        try:
            post(client, settings, attempt.tracked, listed.context)
        except ImdsError as refusal:
            if refusal.reason == "bad_request":
                return self._end(counted, "approval_failed", "refused", str(refusal))
            return self._not_answered(counted, refusal)
        return self._end(counted.accepted(attempt.tracked, self._clock.now()), "approved", "accepted", "")

    @contextmanager
    def _connected(self, settings: ApprovalSettings) -> Iterator[ImdsClient]:
        """A connection to IMDS that ``stop`` can cut off."""
        client = self._client = ImdsClient(settings.endpoint)
        try:
            if self._stop.is_set():  # it is set before `stop` looks for the client
                client.abort()
            yield client
        finally:
            self._client = None
            client.close()

    def _not_answered(self, attempt: ApprovalAttempt, failure: ImdsError) -> float:
        """IMDS gave no usable answer; returns seconds until it is asked again. An operator is told so at once."""
        key = attempt.tracked.event.key
        if self._stop.is_set():  # the next agent goes on from what is written
            return LONG_WAIT
        if attempt.rule == OPERATOR:
            return self._give_up(attempt, "no_answer", str(failure))
        count = self._unanswered[key].count + 1 if key in self._unanswered else 1
        pause = back_off(count, PAUSE, LONGEST_PAUSE)
        if failure.retry_after is not None:
            pause = min(max(failure.retry_after, PAUSE), LONGEST_PAUSE)
        self._unanswered[key] = UnansweredRequest(count, str(failure), self._clock.monotonic() + pause)
        if count <= LOGGED_FAILURES or count % 60 == 0:
            log.warning("approval of %s: %s; again in %g s", attempt.tracked.event.event_id, failure, pause)
        return pause

    def _give_up(self, attempt: ApprovalAttempt, reason: Reason, words: str) -> float:
        """Record that it ended without an answer: as skipped, or as failed if IMDS was asked."""
        if attempt.requests:
            return self._end(attempt, "approval_failed", "no_answer", words)
        return self._end(attempt, "approval_skipped", reason, words)

    def _end(self, attempt: ApprovalAttempt, kind: ApprovalKind, reason: Reason, words: str) -> float:
        """Record how it ended."""
        change = attempt.change(kind, reason, words, self._approvals.listed().context)
        outcome = f"{kind} ({reason})" + (f": {words}" if words else "")
        self._unanswered.pop(attempt.tracked.event.key, None)
        self._approvals.write(attempt.ended(outcome), change)
        log.warning("%s %s, %s: %s", change.event.event_type, change.event.event_id, attempt.rule, outcome)
        return SHORT_WAIT

    # ---- what people ask

    def preview(self, tracked: TrackedEvent, listed: ListedEvents) -> PendingApproval | None:
        """What the rules would do with a listed event, and why; ``None`` if there are no rules and no switch is on."""
        settings = self._settings()
        if not (settings.policy.rules or settings.policy.enabled or settings.allowed):
            return None
        content, since = self._contents.get(tracked.event.key, ("", None))
        if content != content_of(tracked):  # it has just changed
            since = listed.context.now
        decision = self._decision(settings, tracked, listed, since)
        attempt = listed.attempts.get(tracked.event.key)
        return PendingApproval(
            action=decision.action,
            rule=decision.rule,
            reason=decision.why,
            at=decision.at,
            mode=settings.mode,
            off=settings.off,
            state="" if attempt is None else attempt.outcome or attempt.state,
        )

    def answer(self, request: ControlRequest, user: str) -> ControlReply:
        """Answer what came in through the agent's own socket from ``user``; may take as long as IMDS does."""
        listed, key = self._approvals.listed(), request.event_id.casefold()
        tracked = listed.events.get(key)
        if tracked is None:
            return ControlReply(done=False, words=f"no event {request.event_id} is listed: see `notbefore events`")
        if not request.content:
            words = _approved(listed.attempts.get(key), tracked)
            event = PendingEvent.of(tracked, listed.context.now, self.preview(tracked, listed))
            return ControlReply(done=True, words=words, event=event, content=content_of(tracked))
        settings = self._settings()
        if settings.mode != "on":
            return ControlReply(done=False, words=f"nothing is sent: {settings.off or 'approval.dry_run is true'}")
        if content_of(tracked) != request.content:
            return ControlReply(done=False, words="nothing was sent: the event has changed since it was shown")
        order = OperatorOrder(tracked, user, request.reason, self._clock.monotonic() + OPERATOR_PATIENCE)
        self._orders.put(order)
        self.wake()
        order.done.wait(OPERATOR_PATIENCE)
        return order.reply

    def _carry_out(self, order: OperatorOrder) -> None:
        """Approve a listed event because an operator says so, unless that is needless by now."""
        listed, key = self._approvals.listed(), order.tracked.event.key
        before = listed.attempts.get(key)
        if self._clock.monotonic() >= order.until:
            return
        if words := _approved(before, order.tracked):
            order.reply = ControlReply(done=True, words=words)
        elif before is not None and before.state != "done":
            words = "an approval of it is under way: see `notbefore events`"
            order.reply = ControlReply(done=False, words=words)
        else:
            attempt = replace(_next(before, order.tracked, OPERATOR, by=order.user), reason=order.reason)
            objection = self._objection(attempt, listed)
            if objection is not None:
                self._give_up(attempt, objection.reason, objection.words)
            elif not listed.fresh or listed.readable(key) is None:
                self._give_up(attempt, "no_answer", "IMDS does not answer: nothing was sent")
            else:
                self._send(attempt)
            ended = self._approvals.listed().attempts.get(key)
            if ended is not None and ended.outcome:
                order.reply = ControlReply(done=ended.outcome.startswith("approved"), words=ended.outcome)
        order.done.set()


def _approved(attempt: ApprovalAttempt | None, tracked: TrackedEvent) -> str:
    """That an event was approved as it is, in words; empty where it was not."""
    if attempt is None or attempt.approved != content_of(tracked):
        return ""
    return f"it is approved already, by {attempt.approved_by}: nothing more is sent unless Azure changes it"


def _next(
    before: ApprovalAttempt | None, tracked: TrackedEvent, rule: str, step: str = "", by: str = BY_RULE
) -> ApprovalAttempt:
    return before.next(tracked, rule, step, by) if before is not None else ApprovalAttempt(tracked, rule, step, by=by)
