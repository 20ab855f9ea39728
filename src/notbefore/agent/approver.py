"""``Approver``: approves events where both switches are on, and exactly those that the rules or an operator name.

One thread decides; each event to approve gets a thread of its own, because its command may take a minute.
"""

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from notbefore.agent.approval_log import ApprovalLog, ListedEvents
from notbefore.agent.control_socket import ControlReply, ControlRequest
from notbefore.agent.start_request import ApprovalSettings, StartRequest
from notbefore.agent.unforeseen import UnforeseenErrors
from notbefore.core.approval import ApprovalAttempt, CommandRun, ReadinessCheck, content_of, judge
from notbefore.core.change import BY_RULE, OPERATOR, Reason
from notbefore.core.document import SCHEDULED
from notbefore.core.listing import PendingApproval, PendingEvent
from notbefore.core.tracked import TrackedEvent
from notbefore.imds.client import TIMEOUT

SHORT_WAIT: Final = 1.0  # seconds to the next decision: something is due, and waits for IMDS or the disk
LONG_WAIT: Final = 60.0  # seconds to the next decision where nothing happens
OPERATOR_PATIENCE: Final = 30.0  # seconds for which an operator waits for an answer
MAX_REQUESTS: Final = 16  # at the same time, each with a thread
STOP_PATIENCE: Final = 0.5  # seconds for a thread to end

log = logging.getLogger("notbefore.approval")


class Approver:
    """Decides and has requests sent. ``settings`` gives those in use: what is under way is judged by them as well."""

    def __init__(
        self, approvals: ApprovalLog, settings: Callable[[], ApprovalSettings], errors: UnforeseenErrors
    ) -> None:
        self._approvals = approvals
        self._settings = settings
        self._errors = errors
        self._requests: dict[str, StartRequest] = {}  # under way, by the event's key
        self._threads: dict[str, threading.Thread] = {}  # of these
        self._contents: dict[str, tuple[str, datetime]] = {}  # of each listed event, and since when it has it
        self._lock = threading.Lock()  # of the first two; never held over the network or the disk
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
        with self._lock:
            threads = [self._thread, *self._threads.values()]
            requests = list(self._requests.values())
        for request in requests:
            request.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join(STOP_PATIENCE)

    # ---- deciding

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            wait = LONG_WAIT
            with self._errors.guarded("approve", vital=False):
                wait = self.decide()
            self._woken.wait(wait)

    def decide(self) -> float:
        """Begin what is due; returns seconds until something else may be."""
        listed = self._approvals.listed()
        left_over = [one for one in listed.attempts.values() if one.state != "done" and not self._is_busy(one)]
        waits = [SHORT_WAIT if left_over else LONG_WAIT]
        if listed.answered:
            for attempt in left_over:
                self._resume(attempt, listed)
        if not self._settings().off:
            self._contents = {key: known for key, known in self._contents.items() if key in listed.events}
            waits += [self._consider(tracked, listed) for tracked in listed.events.values()]
        return min(waits)

    def _unchanged_since(self, tracked: TrackedEvent, listed: ListedEvents) -> datetime:
        """When this process first saw the event as it is."""
        key, content = tracked.event.key, content_of(tracked)
        if key not in self._contents or self._contents[key][0] != content:
            self._contents[key] = content, listed.context.now
        return self._contents[key][1]

    def _consider(self, tracked: TrackedEvent, listed: ListedEvents) -> float:
        """Begin what is due of one event; returns seconds until more may be due."""
        settings, key, now = self._settings(), tracked.event.key, listed.context.now
        dry_run = settings.mode == "dry_run"
        flawed, since = key in listed.flawed, self._unchanged_since(tracked, listed)
        decision = judge(settings.policy, tracked, listed.context.vm, flawed=flawed, since=since)
        step = f"{decision.step} dry run" if dry_run else decision.step
        before = listed.attempts.get(key)
        begun = before is not None and (before.state != "done" or before.is_settled(tracked, step))
        if begun or (decision.action == "leave" and decision.skipped is None):
            return LONG_WAIT
        wait = (decision.at - now).total_seconds() if decision.at is not None else 0.0
        if wait > 0:
            return min(wait, LONG_WAIT)
        if listed.fresh and listed.readable(key) is not None:
            attempt = _next(before, tracked, decision.rule, step)
            if decision.skipped is not None:
                self._skip(attempt, before, decision.skipped, decision.why)
            elif dry_run:
                first = f", after {decision.check.command[0]} had exited with 0" if decision.check is not None else ""
                self._skip(attempt, before, "dry_run", f"it would be approved now{first}")
            else:
                self._begin(attempt, before, decision.check)
        return SHORT_WAIT

    def _resume(self, attempt: ApprovalAttempt, listed: ListedEvents) -> None:
        """Go on with what the agent before this one had begun, or what could not be written down."""
        tracked = listed.events.get(attempt.tracked.event.key)
        if tracked is None or tracked.event.event_status != SCHEDULED:
            words = "it is no longer Scheduled, and the agent ended meanwhile"
            self._skip(attempt, attempt, "no_longer_scheduled", words)
        elif attempt.rule == OPERATOR:
            self._skip(attempt, attempt, "interrupted", "the agent ended meanwhile: ask again")
        else:
            decision = judge(self._settings().policy, tracked, listed.context.vm)
            check = decision.check if decision.step == attempt.step else None
            ran = attempt.run_of(check) if check is not None else None
            if check is not None and ran is not None and ran.state == "running":
                words = "the agent ended while the command ran, and it runs once"
                self._skip(attempt.with_run(check, CommandRun("failed", words)), attempt, "interrupted", words)
            else:
                self._begin(attempt, attempt, check)

    # ---- doing; ``before`` is the attempt that was known at the decision

    def _is_busy(self, attempt: ApprovalAttempt) -> bool:
        with self._lock:
            return attempt.tracked.event.key in self._requests

    def _reserve(self, request: StartRequest, before: ApprovalAttempt | None) -> bool:
        """Keep others from the event until ``_release``; False if another thread has already taken it up.

        Called with the lock. What is known of an event without a request is also written: its last request has ended.
        """
        key = request.attempt.tracked.event.key
        if key in self._requests or self._approvals.listed().attempts.get(key) is not before:
            return False
        self._requests[key] = request
        return True

    def _release(self, request: StartRequest) -> None:
        key = request.attempt.tracked.event.key
        with self._lock:
            del self._requests[key]
            self._threads.pop(key, None)

    def _skip(self, attempt: ApprovalAttempt, before: ApprovalAttempt | None, reason: Reason, words: str) -> None:
        """Record that nothing is sent. Does nothing if another thread has already taken up the event."""
        request = StartRequest(self._approvals, self._settings, self._stop, attempt)
        with self._lock:
            if not self._reserve(request, before):
                return
        try:
            request.give_up(reason, words)
        finally:
            self._release(request)

    def _begin(
        self,
        attempt: ApprovalAttempt,
        before: ApprovalAttempt | None,
        check: ReadinessCheck | None,
        patience: float | None = None,
    ) -> StartRequest | None:
        """Begin a request in a thread of its own; ``None`` if another has taken up the event, or too many run.

        ``patience``: see ``StartRequest``.
        """
        key = attempt.tracked.event.key
        request = StartRequest(self._approvals, self._settings, self._stop, attempt, patience)
        thread = threading.Thread(target=self._work, args=(request, check), name=f"approve {key[:8]}", daemon=True)
        with self._lock:
            full = len(self._threads) >= MAX_REQUESTS or self._stop.is_set()
            if full or not self._reserve(request, before):
                return None
            self._threads[key] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for it
            self._release(request)
            raise
        return request

    def _work(self, request: StartRequest, check: ReadinessCheck | None) -> None:
        with self._errors.guarded("approve", "a request", vital=False):  # the state says how far it came
            if check is None or request.check_ready(check):
                request.send(check)
        self._release(request)
        request.done.set()
        if request.attempt.state == "done":  # otherwise it waits, for the disk for example
            self._woken.set()

    # ---- what people ask

    def preview(self, tracked: TrackedEvent, listed: ListedEvents) -> PendingApproval | None:
        """What the rules would do with a listed event, and why; ``None`` if there are no rules and no switch is on."""
        settings = self._settings()
        if not (settings.policy.rules or settings.policy.enabled or settings.allowed):
            return None
        content, since = self._contents.get(tracked.event.key, ("", None))
        if content != content_of(tracked):  # it has just changed
            since = listed.context.now
        flawed = tracked.event.key in listed.flawed
        decision = judge(settings.policy, tracked, listed.context.vm, flawed=flawed, since=since)
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
        if request.content:
            return self._approve_by_hand(tracked, request, user)
        words = _approved(listed.attempts.get(key), tracked)
        event = PendingEvent.of(tracked, listed.context.now, self.preview(tracked, listed))
        return ControlReply(done=True, words=words, event=event, content=content_of(tracked))

    def _approve_by_hand(self, tracked: TrackedEvent, asked: ControlRequest, user: str) -> ControlReply:
        """Approve a listed event because ``user`` says so; returns when IMDS has answered."""
        settings = self._settings()
        if settings.mode != "on":
            return ControlReply(done=False, words=f"nothing is sent: {settings.off or 'approval.dry_run is true'}")
        if content_of(tracked) != asked.content:
            return ControlReply(done=False, words="nothing was sent: the event has changed since it was shown")
        before = self._approvals.listed().attempts.get(tracked.event.key)
        if words := _approved(before, tracked):
            return ControlReply(done=True, words=words)
        attempt = replace(_next(before, tracked, OPERATOR, by=user), reason=asked.reason)
        request = self._begin(attempt, before, None, OPERATOR_PATIENCE)
        if request is None:
            return ControlReply(
                done=False, words="an approval of it is under way, or too many are: see `notbefore events`"
            )
        request.done.wait(OPERATOR_PATIENCE + SHORT_WAIT + TIMEOUT)
        outcome = request.attempt.outcome
        return ControlReply(
            done=outcome.startswith("approved"), words=outcome or "it is not decided: see `notbefore history`"
        )


def _approved(attempt: ApprovalAttempt | None, tracked: TrackedEvent) -> str:
    """That an event was approved as it is, in words; empty where it was not."""
    if attempt is None or attempt.approved != content_of(tracked):
        return ""
    return f"it is approved already, by {attempt.approved_by}: nothing more is sent unless Azure changes it"


def _next(
    before: ApprovalAttempt | None, tracked: TrackedEvent, rule: str, step: str = "", by: str = BY_RULE
) -> ApprovalAttempt:
    return before.next(tracked, rule, step, by) if before is not None else ApprovalAttempt(tracked, rule, step, by=by)
