"""``StartRequest``: the approval of one event, from its command to the answer of IMDS, in a thread of its own.

What is about to be done is on the disk before it is done. Before its command, and again right before each request, the
event is looked at: listed as Scheduled by a fresh answer, what it was when it was decided on, NotBefore ahead, and the
switches and rules still say so.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.agent.tracker import ListedEvents, Tracker
from notbefore.core.approval import OPERATOR, ApprovalAttempt, CommandRun, Guard, Policy, content_of, judge
from notbefore.core.change import ApprovalKind, Reason
from notbefore.core.document import SCHEDULED
from notbefore.core.lifecycle import TrackedEvent
from notbefore.core.record import Record, json_line
from notbefore.errors import ImdsError, SendError
from notbefore.imds.client import TIMEOUT, ImdsClient

PAUSES: Final = (
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
    60.0,
)  # seconds after each request without a usable answer; then the last
LISTEN: Final = 0.5  # seconds between looks whether IMDS is heard again
LOUD: Final = 4  # failures of which each is logged; later ones now and then
PREVIEW_VERSION: Final = "2017-03-01"  # wants the DocumentIncarnation as well

log = logging.getLogger("notbefore.approval")


class ApprovalSettings(Struct, frozen=True):
    """What decides whether anything is sent, and where."""

    policy: Policy
    endpoint: str
    api_version: str
    allowed: bool  # --allow-approval

    @property
    def missing(self) -> str:
        """Which of the two keys is missing, in words; empty with both."""
        if not self.allowed:
            return "`notbefore run` was started without --allow-approval"
        return "" if self.policy.enabled else "approval.enabled is not true"

    @property
    def mode(self) -> str:
        """on, dry_run, off."""
        if self.missing:
            return "off"
        return "dry_run" if self.policy.dry_run else "on"


class Objection(Struct, frozen=True):
    """Why an event is not to be approved now."""

    reason: Reason
    words: str


class StartRequest:
    """``switches`` says what holds at the time of asking; ``stop`` cuts all of it off.

    ``patience``: seconds after which it is over whatever happens; without it, at NotBefore.
    """

    def __init__(
        self,
        watch: Tracker,
        switches: Callable[[], ApprovalSettings],
        stop: threading.Event,
        attempt: ApprovalAttempt,
        patience: float | None = None,
    ) -> None:
        self.attempt = attempt
        self.done = threading.Event()  # nothing more will come of it
        self._watch = watch
        self._switches = switches
        self._stop = stop
        self._deadline = None if patience is None else time.monotonic() + patience
        self._client: ImdsClient | None = None

    @property
    def event_id(self) -> str:
        """Azure's."""
        return self.attempt.life.event.event_id

    def abort(self) -> None:
        """Cut off a request that is under way; from another thread, after ``stop`` was set."""
        client = self._client
        if client is not None:
            client.abort()

    # ---- the command

    def ask(self, guard: Guard) -> bool:
        """Run the command, once an event; False where that settles it, or nothing can be written down."""
        ran = self.attempt.ran(guard)
        if ran is not None and ran.state == "ready":
            return True
        if ran is not None:  # for this event, when its content was another: that is told already
            self._watch.note(self.attempt.ended(f"approval_skipped (not_ready): {ran.said}"))
            return False
        if self._approvable("") is None or not self._begin(self.attempt.having_run(guard, CommandRun("running"))):
            return False
        log.info("approval of %s: running %s", self.event_id, guard.command[0])
        ready, words = self._run(guard)
        if self._stop.is_set():  # it was cut off: the next agent says so
            return False
        self.attempt = self.attempt.having_run(guard, CommandRun("ready" if ready else "failed", words))
        if not ready:
            self.over("approval_skipped", "not_ready", words)
        return ready and self._watch.note(self.attempt)

    def _run(self, guard: Guard) -> tuple[bool, str]:
        from notbefore.delivery.sinks.command import ending, run, variables  # noqa: PLC0415 - imports subprocess

        where = self._watch.listed().where
        undecided = self.attempt.change("approval_skipped", "not_ready", "", where)
        values = {
            name: value for name, value in Record.of(undecided, self._watch.vm).flat().items() if name not in _UNDECIDED
        }
        environment = variables(values, {"RULE": self.attempt.rule, "VM": where.vm or ""})
        try:
            code, said = run(guard.command, json_line(values), environment, guard.timeout.seconds, self._stop.is_set)
        except (SendError, OSError) as error:
            return False, str(error)
        return code == 0, ending(code, said)

    # ---- the request

    def send(self, guard: Guard | None = None) -> None:
        """Send until IMDS has answered, or nothing helps any more."""
        error = ""
        while (life := self._approvable(error)) is not None:
            before = self.attempt
            counted = msgspec.structs.replace(before, life=life, state="sending", requests=before.requests + 1)
            if not self._begin(counted):
                return
            listed = self._watch.listed()  # to write it down may have taken a while
            if not listed.fresh or self._objection(listed) is not None:
                self.attempt = before
                self._watch.note(before)
                continue
            try:
                self._post(life)
            except ImdsError as refusal:
                if refusal.reason == "bad_request":
                    self.over("approval_failed", "refused", str(refusal))
                    return
                error = str(refusal)
                self._pause(refusal)
                continue
            self.attempt = self.attempt.accepted(life, self._watch.listed().where.now)
            ran = self.attempt.ran(guard) if guard is not None else None
            self.over("approved", "accepted", ran.said if ran is not None else "")
            return

    def _approvable(self, error: str) -> TrackedEvent | None:
        """The event, if it may be approved now; waits until IMDS is heard. Otherwise says why not."""
        while not self._stop.is_set():
            listed = self._watch.listed()
            objection = self._objection(listed)
            if objection is not None:
                self.unsent(objection.reason, f"{objection.words}; {error}" if error else objection.words)
                return None
            life = listed.life(self.attempt.life.event.key)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.over("approval_failed", "no_answer", error or "IMDS is not heard: nothing was sent")
                return None
            if listed.fresh and life is not None:
                return life
            self._stop.wait(LISTEN)
        return None

    def _objection(self, listed: ListedEvents) -> Objection | None:
        life, switches = listed.lives.get(self.attempt.life.event.key), self._switches()
        if life is None:
            return Objection("no_longer_scheduled", "it is gone")
        if life.event.event_status != SCHEDULED:
            return Objection("no_longer_scheduled", f"it is {life.event.event_status}")
        if life.not_before is not None and listed.where.now >= life.not_before:
            return Objection("too_late", "NotBefore came first")
        if switches.mode != "on":
            return Objection("switched_off", switches.missing or "approval.dry_run is true")
        words = self._changed(life, switches.policy, listed)
        return Objection("changed", words) if words else None

    def _changed(self, life: TrackedEvent, policy: Policy, listed: ListedEvents) -> str:
        """What is not any more as it was decided on, in words."""
        flawed = life.event.key in listed.flawed
        if content_of(life) != content_of(self.attempt.life):
            return "the event is another one now"
        if self.attempt.rule == OPERATOR:
            return "a part of it could not be read" if flawed else ""
        decision = judge(policy, life, listed.where.vm, flawed=flawed)
        if decision.action != "approve" or decision.step != self.attempt.step:
            return f"the rules say {decision.action} now: {decision.why}"
        return "it is another VM's turn now" if decision.at is not None and listed.where.now < decision.at else ""

    def _post(self, life: TrackedEvent) -> None:
        """One start request; raises ``ImdsError`` for everything but 200."""
        switches, where = self._switches(), self._watch.listed().where
        body: dict[str, object] = {"StartRequests": [{"EventId": life.event.event_id}]}
        if switches.api_version == PREVIEW_VERSION:
            body["DocumentIncarnation"] = where.incarnation
        left = [TIMEOUT]
        if life.not_before is not None:
            left.append((life.not_before - where.now).total_seconds())
        if self._deadline is not None:
            left.append(self._deadline - time.monotonic())
        client = self._client = ImdsClient(switches.endpoint)
        try:
            if self._stop.is_set():  # it is set before `abort` looks for the client
                raise ImdsError("reset", "the agent stops")
            path = f"/metadata/scheduledevents?api-version={switches.api_version}"
            client.post(path, msgspec.json.encode(body), timeout=max(1.0, min(left)))
        finally:
            self._client = None
            client.close()

    def _pause(self, refusal: ImdsError) -> None:
        count = self.attempt.requests
        pause = PAUSES[min(count, len(PAUSES)) - 1]
        if refusal.retry_after is not None:
            pause = min(max(refusal.retry_after, PAUSES[0]), PAUSES[-1])
        if not self._stop.is_set() and (count <= LOUD or count % 60 == 0):
            log.warning("approval of %s: %s; again in %g s", self.event_id, refusal, pause)
        if self._deadline is not None:
            pause = min(pause, max(0.0, self._deadline - time.monotonic()))
        self._stop.wait(pause)

    # ---- what is written down

    def _begin(self, attempt: ApprovalAttempt) -> bool:
        """Write down what is about to be done; False where that cannot be: then it is not done."""
        before, self.attempt = self.attempt, attempt
        if self._watch.note(attempt):
            return True
        self.attempt = before
        self._watch.note(before)  # in memory, until the disk can take it
        if before.rule == OPERATOR:  # somebody waits for an answer
            self.over("approval_skipped", "state_not_written", "the state cannot be written, so nothing was sent")
        return False

    def unsent(self, reason: Reason, words: str) -> None:
        """It is over without an answer: skipped, or failed where IMDS was asked."""
        if self.attempt.requests:
            self.over("approval_failed", "no_answer", words)
        else:
            self.over("approval_skipped", reason, words)

    def over(self, kind: ApprovalKind, reason: Reason, words: str) -> None:
        """Record how it ended."""
        change = self.attempt.change(kind, reason, words, self._watch.listed().where)
        outcome = f"{kind} ({reason})" + (f": {words}" if words else "")
        self.attempt = self.attempt.ended(outcome)
        self._watch.note(self.attempt, change)
        log.warning("%s %s, %s: %s", change.event.event_type, change.event.event_id, self.attempt.rule, outcome)


_UNDECIDED: Final[frozenset[str]] = frozenset(
    {
        "body",
        "event.name",
        "azure.scheduled_event.change_id",
        "azure.scheduled_event.change",
        "azure.scheduled_event.reason",
    }
)
