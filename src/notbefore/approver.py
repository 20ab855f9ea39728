"""``Approver``: approves events where that was asked for with both keys, and exactly what was asked for.

One thread decides; each event that is to be approved gets a thread of its own, since its command may take a minute.
"""

import logging
import threading
from typing import Any, Final

import msgspec

from notbefore.control import Order, Reply
from notbefore.events.approval import OPERATOR, Attempt, Decision, Guard, judge
from notbefore.events.document import SCHEDULED
from notbefore.events.lifecycle import Life
from notbefore.imds.client import TIMEOUT, ImdsClient
from notbefore.start_request import StartRequest, Switches
from notbefore.watch import Listed, PendingApproval, Watch

LOOK_AGAIN: Final = 1.0  # seconds: something is due, and has to wait for IMDS or the disk
LONGEST_LOOK: Final = 60.0  # seconds
BY_HAND_SECONDS: Final = 30.0  # for which an operator is kept waiting
MAX_WORKERS: Final = 16
STOP_PATIENCE: Final = 0.5  # seconds for a thread to see that it is over

log = logging.getLogger("notbefore.approval")


class Approver:
    """Raises ``ConfigError`` for an endpoint that is none."""

    def __init__(self, watch: Watch, switches: Switches) -> None:
        self._watch = watch
        self._switches = switches
        self._requests: dict[str, tuple[StartRequest, threading.Thread]] = {}  # under way, by the event's key
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approve", daemon=True)
        watch.moved = self._woken.set
        watch.preview = self.preview
        self.configure(switches)

    def configure(self, switches: Switches) -> None:
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
        if self._thread.ident is None and (not switches.missing or self._watch.listed().attempts):
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
            wait = LONGEST_LOOK
            try:
                wait = self._look()
            except Exception:  # whatever it is: the next look may fare better, and nothing was sent
                log.exception("approval: a look at what is listed failed")
            self._woken.wait(wait)
            self._woken.clear()

    def _look(self) -> float:
        """Begin what is due; returns seconds until something else may be."""
        listed = self._watch.listed()
        left_over = [one for one in listed.attempts.values() if one.state != "done" and not self._is_busy(one)]
        if self._watch.last_good is not None:
            for attempt in left_over:
                self._resume(attempt, listed)
        waits = [LOOK_AGAIN if left_over else LONGEST_LOOK]
        if not self._switches.missing:
            listed = self._watch.listed()
            waits += [self._consider(life, listed) for life in listed.lives.values()]
        return min(waits)

    def _consider(self, life: Life, listed: Listed) -> float:
        """Begin what is due of one event; returns seconds until it may be more."""
        decision = judge(self._switches.policy, life, listed.where.vm)
        attempt = listed.attempts.get(life.event.key)
        begun = attempt is not None and (attempt.state != "done" or attempt.settles(life, decision.rule))
        if begun or (decision.action == "leave" and decision.skipped is None):
            return LONGEST_LOOK
        wait = (decision.at - listed.where.now).total_seconds() if decision.at is not None else 0.0
        if wait > 0:
            return min(wait, LONGEST_LOOK)
        if listed.fresh and life.unread_since is None:
            self._decide(life, attempt, decision)
        return LOOK_AGAIN

    def _decide(self, life: Life, before: Attempt | None, decision: Decision) -> None:
        attempt = before.next(life, decision.rule) if before is not None else Attempt(life, decision.rule)
        if decision.skipped is not None:
            self._request(attempt).over("approval_skipped", decision.skipped, decision.why)
        elif self._switches.mode == "dry_run":
            first = f"after `{decision.guard.command[0]}` had exited with 0" if decision.guard is not None else ""
            self._request(attempt).over("approval_skipped", "dry_run", f"it would be approved now {first}".rstrip())
        else:
            self._begin(attempt, decision.guard)

    def _resume(self, attempt: Attempt, listed: Listed) -> None:
        """Go on with what an agent before this one had begun, or what the disk held up."""
        request = self._request(attempt)
        life = listed.lives.get(attempt.life.event.key)
        if life is None or life.event.event_status != SCHEDULED:
            request.unsent(
                "no_longer_scheduled", "the agent ended before it was approved, and now it is no longer Scheduled"
            )
        elif attempt.command == "running":
            request.attempt = msgspec.structs.replace(attempt, command="failed")
            request.unsent("interrupted", "the agent ended while the command ran, and it runs once")
        elif attempt.rule == OPERATOR:
            request.unsent("interrupted", "the agent ended before IMDS had answered: ask again")
        else:
            decision = judge(self._switches.policy, life, listed.where.vm)
            self._begin(attempt, decision.guard if decision.rule == attempt.rule else None)

    def _request(self, attempt: Attempt) -> StartRequest:
        return StartRequest(self._watch, lambda: self._switches, self._stop, attempt)

    def _is_busy(self, attempt: Attempt) -> bool:
        with self._lock:
            return attempt.life.event.key in self._requests

    def _begin(self, attempt: Attempt, guard: Guard | None, patience: float | None = None) -> StartRequest | None:
        """Have it done in a thread; ``None`` where one is at it already, or there are too many."""
        key, request = attempt.life.event.key, self._request(attempt)
        thread = threading.Thread(
            target=self._work, args=(request, guard, patience), name=f"approve {key[:8]}", daemon=True
        )
        with self._lock:
            if key in self._requests or len(self._requests) >= MAX_WORKERS or self._stop.is_set():
                return None
            self._requests[key] = (request, thread)
            thread.start()
        return request

    def _work(self, request: StartRequest, guard: Guard | None, patience: float | None) -> None:
        try:
            if guard is None or request.ask(guard):
                request.send(patience)
        except Exception:  # a thread's last word; what was to be done stands in the store
            log.exception("approval of %s failed", request.event_id)
        finally:
            with self._lock:
                del self._requests[request.attempt.life.event.key]
            request.done.set()
            self._woken.set()

    # ---- what people ask

    def preview(self, life: Life, vm: str | None) -> PendingApproval | None:
        """What the rules would do with an event, and why; ``None`` where nobody has thought of approving."""
        switches = self._switches
        if not (switches.policy.rules or switches.policy.enabled or switches.allowed):
            return None
        decision = judge(switches.policy, life, vm)
        attempt = self._watch.listed().attempts.get(life.event.key)
        return PendingApproval(
            action=decision.action,
            rule=decision.rule,
            reason=decision.why,
            at=decision.at,
            mode=switches.mode,
            off=switches.missing,
            state=attempt.state if attempt is not None else "",
        )

    def carry_out(self, order: Order, user: str) -> Reply:
        """What came in through the agent's own socket."""
        if order.approve:
            return self._by_hand(order.event_id, user)
        events: list[dict[str, Any]] = msgspec.json.decode(self._watch.pending())["events"]
        for event in events:
            if event["event_id"].casefold() == order.event_id.casefold():
                return Reply(done=True, event=event)
        return Reply(done=False, words=f"no event {order.event_id} is listed: see `notbefore events`")

    def _by_hand(self, event_id: str, user: str) -> Reply:
        """Approve a listed event because somebody says so; returns when IMDS has answered."""
        switches = self._switches
        if switches.mode != "on":
            return Reply(done=False, words=f"nothing is sent: {switches.missing or 'approval.dry_run is true'}")
        listed = self._watch.listed()
        life = listed.lives.get(event_id.casefold())
        if life is None:
            return Reply(done=False, words=f"no event {event_id} is listed: see `notbefore events`")
        before = listed.attempts.get(life.event.key)
        attempt = before.next(life, OPERATOR, user) if before is not None else Attempt(life, OPERATOR, by=user)
        request = self._begin(attempt, None, BY_HAND_SECONDS)
        if request is None:
            return Reply(done=False, words="a rule's approval of it is under way: see `notbefore events`")
        request.done.wait(BY_HAND_SECONDS + TIMEOUT)
        if request.outcome is None:
            return Reply(done=False, words="it is not decided yet: see `notbefore history`")
        kind, reason, words = request.outcome
        return Reply(done=kind == "approved", words=f"{kind} ({reason})" + (f": {words}" if words else ""))
