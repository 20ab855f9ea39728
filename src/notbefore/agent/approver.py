"""``Approver``: approves events where that was asked for with both keys, and exactly what was asked for.

One thread decides; each event that is to be approved gets a thread of its own, since its command may take a minute.
"""

import logging
import threading
from datetime import datetime
from typing import Final

from notbefore.agent.control_socket import ControlReply, ControlRequest
from notbefore.agent.start_request import ApprovalSettings, StartRequest
from notbefore.agent.tracker import ListedEvents, Tracker
from notbefore.core.approval import BY_RULE, OPERATOR, ApprovalAttempt, CommandRun, Guard, content_of, judge
from notbefore.core.change import Reason
from notbefore.core.document import SCHEDULED
from notbefore.core.lifecycle import TrackedEvent
from notbefore.core.listing import PendingApproval
from notbefore.imds.client import TIMEOUT, ImdsClient

LOOK_AGAIN: Final = 1.0  # seconds: something is due, and has to wait for IMDS or the disk
LONGEST_LOOK: Final = 60.0  # seconds
BY_HAND_SECONDS: Final = 30.0  # for which an operator is kept waiting
MAX_WORKERS: Final = 16
STOP_PATIENCE: Final = 0.5  # seconds for a thread to see that it is over

log = logging.getLogger("notbefore.approval")


class Approver:
    """Raises ``ConfigError`` for an endpoint that is none."""

    def __init__(self, watch: Tracker, switches: ApprovalSettings) -> None:
        self._watch = watch
        self._switches = switches
        self._requests: dict[str, tuple[StartRequest, threading.Thread]] = {}  # under way, by the event's key
        self._contents: dict[str, tuple[str, datetime]] = {}  # of each listed event, and since when it is so
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approve", daemon=True)
        watch.moved.append(self._woken.set)
        watch.preview = self.preview
        self.configure(switches)

    def configure(self, switches: ApprovalSettings) -> None:
        """From now on by these switches and rules; what is under way is judged by them as well."""
        ImdsClient(switches.endpoint)  # says what is wrong with the address
        self._switches = switches
        self._watch.rules = () if switches.missing else (*switches.policy.approving, OPERATOR)
        self._woken.set()

    @property
    def endpoint(self) -> str:
        """Where approvals are sent."""
        return self._switches.endpoint

    def start(self) -> None:
        """Begin to decide, where there can be anything to decide; say what holds where a key was turned."""
        switches = self._switches
        if switches.mode == "on":
            log.warning("approval is on: %d rules may approve events", len(switches.policy.approving))
        elif switches.mode == "dry_run":
            log.warning("approval: dry run, nothing is sent (approval.dry_run)")
        elif switches.allowed or switches.policy.enabled:
            log.warning("approval is off, nothing is sent: %s", switches.missing)
        left_over = any(attempt.state != "done" for attempt in self._watch.listed().attempts.values())
        if self._thread.ident is None and (left_over or not switches.missing):
            self._thread.start()

    def stop(self) -> None:
        """Send nothing more; what is under way is cut off, and stands in the store as far as it came."""
        self._stop.set()
        self._woken.set()
        with self._lock:
            threads = [self._thread, *(thread for _, thread in self._requests.values())]
            for request, _ in self._requests.values():
                request.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join(STOP_PATIENCE)

    # ---- deciding

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            wait = LONGEST_LOOK
            try:
                wait = self._look()
            except Exception:  # the next look may fare better
                log.exception("approval: a look at what is listed failed")
            self._woken.wait(wait)

    def _look(self) -> float:
        """Begin what is due; returns seconds until something else may be."""
        listed = self._watch.listed()
        left_over = [one for one in listed.attempts.values() if one.state != "done" and not self._is_busy(one)]
        waits = [LOOK_AGAIN if left_over else LONGEST_LOOK]
        if self._watch.last_good is not None:
            for attempt in left_over:
                self._resume(attempt, listed)
        if not self._switches.missing:
            self._contents = {key: known for key, known in self._contents.items() if key in listed.lives}
            waits += [self._consider(life, listed) for life in listed.lives.values()]
        return min(waits)

    def _since(self, life: TrackedEvent, listed: ListedEvents) -> datetime:
        """When this process first saw the event as it is."""
        key, content = life.event.key, content_of(life)
        if key not in self._contents or self._contents[key][0] != content:
            self._contents[key] = content, listed.where.now
        return self._contents[key][1]

    def _consider(self, life: TrackedEvent, listed: ListedEvents) -> float:
        """Begin what is due of one event; returns seconds until it may be more."""
        key, dry_run = life.event.key, self._switches.mode == "dry_run"
        flawed, since = key in listed.flawed, self._since(life, listed)
        decision = judge(self._switches.policy, life, listed.where.vm, flawed=flawed, since=since)
        step = f"{decision.step} dry run" if dry_run else decision.step
        before = listed.attempts.get(key)
        begun = before is not None and (before.state != "done" or before.settles(life, step))
        if begun or (decision.action == "leave" and decision.skipped is None):
            return LONGEST_LOOK
        wait = (decision.at - listed.where.now).total_seconds() if decision.at is not None else 0.0
        if wait > 0:
            return min(wait, LONGEST_LOOK)
        if listed.fresh and listed.life(key) is not None:
            attempt = _next(before, life, decision.rule, step)
            if decision.skipped is not None:
                self._skip(attempt, before, decision.skipped, decision.why)
            elif dry_run:
                first = f", after {decision.guard.command[0]} had exited with 0" if decision.guard is not None else ""
                self._skip(attempt, before, "dry_run", f"it would be approved now{first}")
            else:
                self._begin(attempt, before, decision.guard)
        return LOOK_AGAIN

    def _resume(self, attempt: ApprovalAttempt, listed: ListedEvents) -> None:
        """Go on with what an agent before this one had begun, or what the disk held up."""
        life = listed.lives.get(attempt.life.event.key)
        if life is None or life.event.event_status != SCHEDULED:
            words = "it is no longer Scheduled, and the agent ended meanwhile"
            self._skip(attempt, attempt, "no_longer_scheduled", words)
        elif attempt.rule == OPERATOR:
            self._skip(attempt, attempt, "interrupted", "the agent ended meanwhile: ask again")
        else:
            decision = judge(self._switches.policy, life, listed.where.vm)
            guard = decision.guard if decision.step == attempt.step else None
            ran = attempt.ran(guard) if guard is not None else None
            if guard is not None and ran is not None and ran.state == "running":
                words = "the agent ended while the command ran, and it runs once"
                self._skip(attempt.having_run(guard, CommandRun("failed", words)), attempt, "interrupted", words)
            else:
                self._begin(attempt, attempt, guard)

    # ---- doing; ``before`` is what was known when it was decided: nothing is done where another was faster

    def _is_busy(self, attempt: ApprovalAttempt) -> bool:
        with self._lock:
            return attempt.life.event.key in self._requests

    def _is_current(self, key: str, before: ApprovalAttempt | None) -> bool:
        return key not in self._requests and self._watch.listed().attempts.get(key) is before

    def _skip(self, attempt: ApprovalAttempt, before: ApprovalAttempt | None, reason: Reason, words: str) -> None:
        with self._lock:
            if self._is_current(attempt.life.event.key, before):
                StartRequest(self._watch, lambda: self._switches, self._stop, attempt).unsent(reason, words)

    def _begin(
        self,
        attempt: ApprovalAttempt,
        before: ApprovalAttempt | None,
        guard: Guard | None,
        patience: float | None = None,
    ) -> StartRequest | None:
        """Have it done in a thread; ``None`` where another is at it, or there are too many."""
        key = attempt.life.event.key
        request = StartRequest(self._watch, lambda: self._switches, self._stop, attempt, patience)
        thread = threading.Thread(target=self._work, args=(request, guard), name=f"approve {key[:8]}", daemon=True)
        with self._lock:
            full = len(self._requests) >= MAX_WORKERS or self._stop.is_set()
            if full or not self._is_current(key, before):
                return None
            thread.start()
            self._requests[key] = (request, thread)
        return request

    def _work(self, request: StartRequest, guard: Guard | None) -> None:
        try:
            if guard is None or request.ask(guard):
                request.send(guard)
        except Exception:  # a thread's last word; what was to be done stands in the store
            log.exception("approval of %s failed", request.event_id)
        finally:
            with self._lock:
                del self._requests[request.attempt.life.event.key]
            request.done.set()
            if request.attempt.state == "done":  # otherwise it has to wait: for the disk, say
                self._woken.set()

    # ---- what people ask

    def preview(self, life: TrackedEvent, listed: ListedEvents) -> PendingApproval | None:
        """What the rules would do with a listed event, and why; ``None`` where nobody has thought of approving."""
        switches = self._switches
        if not (switches.policy.rules or switches.policy.enabled or switches.allowed):
            return None
        content, since = self._contents.get(life.event.key, ("", None))
        if content != content_of(life):  # it has just changed
            since = listed.where.now
        decision = judge(switches.policy, life, listed.where.vm, flawed=life.event.key in listed.flawed, since=since)
        attempt = listed.attempts.get(life.event.key)
        return PendingApproval(
            action=decision.action,
            rule=decision.rule,
            reason=decision.why,
            at=decision.at,
            mode=switches.mode,
            off=switches.missing,
            state="" if attempt is None else attempt.outcome or attempt.state,
        )

    def carry_out(self, order: ControlRequest, user: str) -> ControlReply:
        """What came in through the agent's own socket."""
        key = order.event_id.casefold()
        life = self._watch.listed().lives.get(key)
        if life is None:
            return ControlReply(done=False, words=f"no event {order.event_id} is listed: see `notbefore events`")
        if order.content:
            return self._by_hand(life, order.content, user)
        words = _approved(self._watch.listed().attempts.get(key), life)
        event = next((one for one in self._watch.pending().events if one.event_id.casefold() == key), None)
        return ControlReply(done=event is not None, words=words, event=event, content=content_of(life))

    def _by_hand(self, life: TrackedEvent, content: str, user: str) -> ControlReply:
        """Approve a listed event because somebody says so; returns when IMDS has answered."""
        switches = self._switches
        if switches.mode != "on":
            return ControlReply(done=False, words=f"nothing is sent: {switches.missing or 'approval.dry_run is true'}")
        if content_of(life) != content:
            return ControlReply(done=False, words="nothing was sent: it has changed since it was shown, look again")
        before = self._watch.listed().attempts.get(life.event.key)
        if words := _approved(before, life):
            return ControlReply(done=True, words=words)
        request = self._begin(_next(before, life, OPERATOR, by=user), before, None, BY_HAND_SECONDS)
        if request is None:
            return ControlReply(
                done=False, words="an approval of it is under way, or too many are: see `notbefore events`"
            )
        request.done.wait(BY_HAND_SECONDS + LOOK_AGAIN + TIMEOUT)
        outcome = request.attempt.outcome
        return ControlReply(
            done=outcome.startswith("approved"), words=outcome or "it is not decided: see `notbefore history`"
        )


def _approved(attempt: ApprovalAttempt | None, life: TrackedEvent) -> str:
    """That an event was approved as it is, in words; empty where it was not."""
    if attempt is None or attempt.approved != content_of(life):
        return ""
    return f"it is approved already, by {attempt.approved_by}: nothing more is sent unless Azure changes it"


def _next(
    before: ApprovalAttempt | None, life: TrackedEvent, rule: str, step: str = "", by: str = BY_RULE
) -> ApprovalAttempt:
    return before.next(life, rule, step, by) if before is not None else ApprovalAttempt(life, rule, step, by=by)
