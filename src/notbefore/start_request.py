"""``StartRequest``: the approval of one event, from its command to the answer of IMDS, in a thread of its own.

What is about to be done is on the disk before it is done. Before each request the event is looked at again: it must be
listed as Scheduled by a fresh document, NotBefore must lie ahead, and the rules must still say so.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.errors import ImdsError, SendError
from notbefore.events.approval import OPERATOR, Attempt, Guard, Policy, judge
from notbefore.events.change import ApprovalKind, Reason
from notbefore.events.document import SCHEDULED
from notbefore.events.lifecycle import Life
from notbefore.events.record import json_line, record
from notbefore.imds.client import TIMEOUT, ImdsClient
from notbefore.watch import Listed, Watch

PAUSES: Final = (1.0, 2.0, 4.0, 8.0)  # seconds after a request that got no usable answer; then the last one
LISTEN: Final = 0.5  # seconds between looks whether IMDS is heard again
PREVIEW_VERSION: Final = "2017-03-01"  # wants the DocumentIncarnation as well

log = logging.getLogger("notbefore.approval")


class Switches(Struct, frozen=True):
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
    """``switches`` says what holds at the time of asking; ``stop`` cuts all of it off."""

    def __init__(self, watch: Watch, switches: Callable[[], Switches], stop: threading.Event, attempt: Attempt) -> None:
        self.attempt = attempt
        self.done = threading.Event()  # nothing more will come of it
        self.outcome: tuple[ApprovalKind, Reason, str] | None = None  # how it ended
        self._watch = watch
        self._switches = switches
        self._stop = stop
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
        if self.attempt.command == "ready":
            return True
        if self.attempt.command == "failed":  # for this event, when its content was another: that is told already
            self._note(state="done")
            return False
        if not self._note(command="running"):
            return False
        log.info("approval of %s: running %s", self.event_id, guard.command[0])
        ready, words = self._run(guard)
        if self._stop.is_set():  # it was cut off: the next agent says so
            return False
        if ready:
            return self._note(command="ready", said=words)
        self.attempt = msgspec.structs.replace(self.attempt, command="failed", said=words)
        self.over("approval_skipped", "not_ready", words)
        return False

    def _run(self, guard: Guard) -> tuple[bool, str]:
        from notbefore.delivery.sinks.command import ending, run, variables  # noqa: PLC0415 - imports subprocess

        where = self._watch.listed().where
        undecided = self.attempt.change("approval_skipped", "not_ready", "", where)
        values = {name: value for name, value in record(undecided, self._watch.vm).items() if name not in _UNDECIDED}
        environment = variables(values, {"RULE": self.attempt.rule, "VM": where.vm or ""})
        try:
            code, said = run(guard.command, json_line(values), environment, guard.timeout.seconds, self._stop.is_set)
        except SendError as error:
            return False, str(error)
        return code == 0, ending(code, said)

    # ---- the request

    def send(self, patience: float | None = None) -> None:
        """Send until IMDS has answered, or nothing helps any more, or ``patience`` (seconds) is over."""
        error, begun = "", time.monotonic()
        while (life := self._approvable(error)) is not None:
            if patience is not None and time.monotonic() - begun >= patience:
                self.over("approval_failed", "no_answer", error)
                return
            if not self._note(life=life, state="sending", requests=self.attempt.requests + 1):
                return
            try:
                self._post(life)
            except ImdsError as refusal:
                if refusal.reason == "bad_request":
                    self.over("approval_failed", "refused", str(refusal))
                    return
                error = str(refusal)
                self._pause(refusal)
                continue
            self.attempt = msgspec.structs.replace(self.attempt, approved=life.event.digest())
            self.over("approved", "accepted", self.attempt.said)
            return

    def _approvable(self, error: str) -> Life | None:
        """The event, if it may be approved now; waits until IMDS is heard. Otherwise says why not."""
        while not self._stop.is_set():
            listed = self._watch.listed()
            objection = self._objection(listed)
            if objection is not None:
                self.unsent(objection.reason, f"{objection.words}; {error}" if error else objection.words)
                return None
            life = listed.lives[self.attempt.life.event.key]
            if listed.fresh and life.unread_since is None:
                return life
            self._stop.wait(LISTEN)
        return None

    def _objection(self, listed: Listed) -> Objection | None:
        life = listed.lives.get(self.attempt.life.event.key)
        switches = self._switches()
        if life is None or life.event.event_status != SCHEDULED:
            return Objection(
                "no_longer_scheduled", "it is gone" if life is None else f"it is {life.event.event_status}"
            )
        if life.not_before is not None and listed.where.now >= life.not_before:
            return Objection("too_late", "NotBefore came first")
        if switches.mode != "on":
            return Objection("switched_off", switches.missing or "approval.dry_run is true")
        if self.attempt.rule == OPERATOR:
            return None
        decision = judge(switches.policy, life, listed.where.vm)
        if decision.action != "approve" or decision.rule != self.attempt.rule:
            return Objection("changed", f"now {decision.action}: {decision.why}")
        return None

    def _post(self, life: Life) -> None:
        """One start request; raises ``ImdsError`` for everything but 200."""
        switches, where = self._switches(), self._watch.listed().where
        body: dict[str, object] = {"StartRequests": [{"EventId": life.event.event_id}]}
        if switches.api_version == PREVIEW_VERSION:
            body["DocumentIncarnation"] = where.incarnation
        left = TIMEOUT if life.not_before is None else (life.not_before - where.now).total_seconds()
        client = self._client = ImdsClient(switches.endpoint)
        try:
            if not self._stop.is_set():  # `stop` is set before `abort` looks for the client
                path = f"/metadata/scheduledevents?api-version={switches.api_version}"
                client.post(path, msgspec.json.encode(body), timeout=max(1.0, min(TIMEOUT, left)))
        finally:
            self._client = None
            client.close()

    def _pause(self, refusal: ImdsError) -> None:
        pause = PAUSES[min(self.attempt.requests, len(PAUSES)) - 1]
        if refusal.retry_after is not None:
            pause = min(max(refusal.retry_after, PAUSES[0]), PAUSES[-1])
        if not self._stop.is_set():
            log.warning("approval of %s: %s; again in %g s", self.event_id, refusal, pause)
        self._stop.wait(pause)

    # ---- what is written down

    def _note(self, **facts: Any) -> bool:
        """Write down how far it is; False, and as it was before, where it cannot be written."""
        before, self.attempt = self.attempt, msgspec.structs.replace(self.attempt, **facts)
        if self._watch.note(self.attempt):
            return True
        log.error("approval of %s waits: the state cannot be written", self.event_id)
        self.attempt = before
        self._watch.note(before)
        return False

    def unsent(self, reason: Reason, words: str) -> None:
        """It is over without an approval: skipped, or failed where IMDS was asked and gave no usable answer."""
        if self.attempt.requests:
            self.over("approval_failed", "no_answer", words)
        else:
            self.over("approval_skipped", reason, words)

    def over(self, kind: ApprovalKind, reason: Reason, words: str) -> None:
        """Record how it ended."""
        change = self.attempt.change(kind, reason, words, self._watch.listed().where)
        self.attempt = msgspec.structs.replace(self.attempt, state="done", told=self.attempt.told + 1)
        self._watch.note(self.attempt, change)
        self.outcome = (kind, reason, words)
        event = self.attempt.life.event
        log.warning(
            "%s %s: %s (%s, %s)%s",
            event.event_type,
            event.event_id,
            kind,
            reason,
            self.attempt.rule,
            words and f": {words}",
        )


_UNDECIDED: Final = frozenset(
    {
        "body",
        "event.name",
        "azure.scheduled_event.change_id",
        "azure.scheduled_event.change",
        "azure.scheduled_event.reason",
    }
)
