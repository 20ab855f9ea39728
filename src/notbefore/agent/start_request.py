"""``StartRequest``: the approval of one event, from its command to the answer of IMDS, in a thread of its own.

What is about to be done is on disk before it is done. Before its command, and again right before each request, the
event is checked: listed as Scheduled by a fresh answer, unchanged since the decision, NotBefore ahead, and the settings
and rules still say so.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.approval_log import ApprovalLog, ListedEvents
from notbefore.core.approval import ApprovalAttempt, CommandRun, Policy, ReadinessCheck, content_of, judge, unreadable
from notbefore.core.change import OPERATOR, ApprovalKind, Reason
from notbefore.core.document import SCHEDULED, parse
from notbefore.core.record import Record, json_line
from notbefore.core.tracked import TrackedEvent
from notbefore.errors import DocumentError, ImdsError, SendError
from notbefore.imds.client import TIMEOUT, ImdsClient

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # seconds after each unusable answer; then the last one
CONFIRM_TIMEOUT: Final = 5.0  # seconds for the answer right before a request
CHECK_INTERVAL: Final = 0.5  # seconds between checks whether IMDS answers again
LOGGED_FAILURES: Final = 4  # each of them is logged; later ones now and then
PREVIEW_VERSION: Final = "2017-03-01"  # needs the DocumentIncarnation as well

log = logging.getLogger("notbefore.approval")


class ApprovalSettings(Struct, frozen=True):
    """What decides whether anything is sent, and where."""

    policy: Policy
    endpoint: str
    api_version: str
    allowed: bool  # --allow-approval
    conflict: str = ""  # why it is not certain which VM this is, in words

    @property
    def off(self) -> str:
        """Why nothing may be approved, in words; empty if it may."""
        return self.missing or self.conflict

    @property
    def missing(self) -> str:
        """Which of the two switches is off, in words; empty if both are on."""
        if not self.allowed:
            return "`notbefore run` was started without --allow-approval"
        return "" if self.policy.enabled else "approval.enabled is not true"

    @property
    def mode(self) -> str:
        """One of on, dry_run, off."""
        if self.off:
            return "off"
        return "dry_run" if self.policy.dry_run else "on"


class Objection(Struct, frozen=True):
    """Why an event is not to be approved now."""

    reason: Reason
    words: str


class StartRequest:
    """One attempt. ``settings`` gives those in use; ``stop`` ends it.

    ``patience``: seconds after which it is over whatever happens; without it, it is over at NotBefore.
    """

    def __init__(
        self,
        approvals: ApprovalLog,
        settings: Callable[[], ApprovalSettings],
        stop: threading.Event,
        attempt: ApprovalAttempt,
        patience: float | None = None,
    ) -> None:
        self.attempt = attempt
        self.done = threading.Event()  # nothing more will come of it
        self._approvals = approvals
        self._settings = settings
        self._stop = stop
        self._clock = clock = approvals.clock
        self._deadline = None if patience is None else clock.monotonic() + patience
        self._client: ImdsClient | None = None

    @property
    def event_id(self) -> str:
        """Azure's, as received."""
        return self.attempt.tracked.event.event_id

    def abort(self) -> None:
        """Cut off a request that is under way; from another thread, after ``stop`` was set."""
        client = self._client
        if client is not None:
            client.abort()

    # ---- the command

    def check_ready(self, check: ReadinessCheck) -> bool:
        """Run the command, once an event. False if the machine is not ready, or nothing can be written down."""
        ran = self.attempt.run_of(check)
        if ran is not None and ran.state == "ready":
            return True
        if ran is not None:  # it ran for this event when its content was another; its record was made then
            self._approvals.write(self.attempt.ended(f"approval_skipped (not_ready): {ran.said}"))
            return False
        running = self.attempt.with_run(check, CommandRun("running"))
        if self._wait_until_approvable("") is None or not self._write_ahead(running):
            return False
        log.info("approval of %s: running %s", self.event_id, check.command[0])
        ready, words = self._run(check)
        if self._stop.is_set():  # it was cut off: the next agent reports that
            return False
        self.attempt = self.attempt.with_run(check, CommandRun("ready" if ready else "failed", words))
        if not ready:
            self.end("approval_skipped", "not_ready", words)
        return ready and self._approvals.write(self.attempt)

    def _run(self, check: ReadinessCheck) -> tuple[bool, str]:
        from notbefore.courier.process import ending, run, variables  # noqa: PLC0415 - imports subprocess

        listed = self._approvals.listed()
        undecided = self.attempt.change("approval_skipped", "not_ready", "", listed.context)
        flat = Record.of(undecided, listed.vm).flat()
        values = {name: value for name, value in flat.items() if name not in _UNDECIDED}
        environment = variables(values, {"RULE": self.attempt.rule, "VM": listed.context.vm or ""})
        try:
            code, said = run(check.command, json_line(values), environment, check.timeout.seconds, self._stop.is_set)
        except (SendError, OSError) as error:
            return False, str(error)
        return code == 0, ending(code, said)

    # ---- the request

    def send(self, check: ReadinessCheck | None = None) -> None:
        """Send until IMDS has answered, or until there is an objection."""
        error = ""
        while (tracked := self._wait_until_approvable(error)) is not None:
            before = self.attempt
            counted = replace(before, tracked=tracked, state="sending", requests=before.requests + 1)
            if not self._write_ahead(counted):
                return
            listed = self._approvals.listed()  # writing may have taken a while
            if not listed.fresh or self._objection(listed) is not None:
                self._take_back(before)
                continue
            if not self._is_still_listed(tracked):  # the last answer may be 15 s old
                self._take_back(before)
                self._stop.wait(CHECK_INTERVAL)
                continue
            try:
                self._post(tracked)
            except ImdsError as refusal:
                if refusal.reason == "bad_request":
                    self.end("approval_failed", "refused", str(refusal))
                    return
                error = str(refusal)
                self._pause(refusal)
                continue
            self.attempt = self.attempt.accepted(tracked, self._clock.now())
            ran = self.attempt.run_of(check) if check is not None else None
            self.end("approved", "accepted", ran.said if ran is not None else "")
            return

    def _wait_until_approvable(self, error: str) -> TrackedEvent | None:
        """The event, once IMDS has just said that it may be approved; ``None`` with an objection, which is recorded.

        ``error``: what IMDS said to the last request, for the record.
        """
        while not self._stop.is_set():
            listed = self._approvals.listed()
            objection = self._objection(listed)
            if objection is not None:
                self.give_up(objection.reason, f"{objection.words}; {error}" if error else objection.words)
                return None
            tracked = listed.readable(self.attempt.tracked.event.key)
            if self._deadline is not None and self._clock.monotonic() >= self._deadline:
                self.end("approval_failed", "no_answer", error or "IMDS does not answer: nothing was sent")
                return None
            if listed.fresh and tracked is not None:
                return tracked
            self._stop.wait(CHECK_INTERVAL)
        return None

    def _objection(self, listed: ListedEvents) -> Objection | None:
        tracked, settings = listed.events.get(self.attempt.tracked.event.key), self._settings()
        if tracked is None:
            return Objection("no_longer_scheduled", "it is gone")
        if tracked.event.event_status != SCHEDULED:
            return Objection("no_longer_scheduled", f"it is {tracked.event.event_status}")
        if tracked.not_before is not None and listed.context.now >= tracked.not_before:
            return Objection("too_late", "NotBefore came first")
        if settings.mode != "on":
            return Objection("switched_off", settings.off or "approval.dry_run is true")
        words = self._changed(tracked, settings.policy, listed)
        return Objection("changed", words) if words else None

    def _changed(self, tracked: TrackedEvent, policy: Policy, listed: ListedEvents) -> str:
        """What has changed since the decision, in words; empty if nothing has."""
        flawed = tracked.event.key in listed.flawed
        if content_of(tracked) != content_of(self.attempt.tracked):
            return "the event has changed"
        if self.attempt.rule == OPERATOR:
            return unreadable(tracked, flawed=flawed)
        decision = judge(policy, tracked, listed.context.vm, flawed=flawed)
        if decision.action != "approve" or decision.step != self.attempt.step:
            return f"the rules say {decision.action} now: {decision.why}"
        return "it is another VM's turn now" if decision.at is not None and listed.context.now < decision.at else ""

    def _post(self, tracked: TrackedEvent) -> None:
        """Send one start request. Raises ``ImdsError`` for everything but 200."""
        settings, context = self._settings(), self._approvals.listed().context
        body: dict[str, object] = {"StartRequests": [{"EventId": tracked.event.event_id}]}
        if settings.api_version == PREVIEW_VERSION:
            body["DocumentIncarnation"] = context.incarnation
        left = [TIMEOUT]
        if tracked.not_before is not None:
            left.append((tracked.not_before - context.now).total_seconds())
        if self._deadline is not None:
            left.append(self._deadline - self._clock.monotonic())
        with self._connected(settings) as client:
            client.post(_path(settings), msgspec.json.encode(body), timeout=max(1.0, min(left)))

    def _is_still_listed(self, tracked: TrackedEvent) -> bool:
        """Ask IMDS once more, right before the request: is the event listed exactly as it was decided on?"""
        settings, event = self._settings(), tracked.event
        try:
            with self._connected(settings) as client:
                answer = client.get(_path(settings), timeout=CONFIRM_TIMEOUT)
            document = parse(answer.body or b"", settings.api_version)
        except (ImdsError, DocumentError) as error:
            log.warning(
                "approval of %s: nothing was sent, because IMDS did not confirm the event: %s", self.event_id, error
            )
            return False
        flawed = any(flaw.event_id is not None and flaw.event_id.casefold() == event.key for flaw in document.flaws)
        return not flawed and any(one.key == event.key and one.digest() == event.digest() for one in document.events)

    @contextmanager
    def _connected(self, settings: ApprovalSettings) -> Iterator[ImdsClient]:
        """A connection to IMDS that ``abort`` can cut off."""
        client = self._client = ImdsClient(settings.endpoint)
        try:
            if self._stop.is_set():  # it is set before `abort` looks for the client
                raise ImdsError("reset", "the agent is stopping")
            yield client
        finally:
            self._client = None
            client.close()

    def _pause(self, refusal: ImdsError) -> None:
        count = self.attempt.requests
        pause = PAUSES[min(count, len(PAUSES)) - 1]
        if refusal.retry_after is not None:
            pause = min(max(refusal.retry_after, PAUSES[0]), PAUSES[-1])
        if not self._stop.is_set() and (count <= LOGGED_FAILURES or count % 60 == 0):
            log.warning("approval of %s: %s; again in %g s", self.event_id, refusal, pause)
        if self._deadline is not None:
            pause = min(pause, max(0.0, self._deadline - self._clock.monotonic()))
        self._stop.wait(pause)

    # ---- what is written down

    def _write_ahead(self, attempt: ApprovalAttempt) -> bool:
        """Write down what is about to be done. False if that is impossible: then it must not be done."""
        before, self.attempt = self.attempt, attempt
        if self._approvals.write(attempt):
            return True
        self._take_back(before)  # in memory, until the state can be written
        if before.rule == OPERATOR:  # somebody waits for an answer
            self.end("approval_skipped", "state_not_written", "the state cannot be written, so nothing was sent")
        return False

    def _take_back(self, before: ApprovalAttempt) -> None:
        """Nothing was done of what was written ahead."""
        self.attempt = before
        self._approvals.write(before)

    def give_up(self, reason: Reason, words: str) -> None:
        """Record that it ended without an answer: as skipped, or as failed if IMDS was asked."""
        if self.attempt.requests:
            self.end("approval_failed", "no_answer", words)
        else:
            self.end("approval_skipped", reason, words)

    def end(self, kind: ApprovalKind, reason: Reason, words: str) -> None:
        """Record how it ended."""
        change = self.attempt.change(kind, reason, words, self._approvals.listed().context)
        outcome = f"{kind} ({reason})" + (f": {words}" if words else "")
        self.attempt = self.attempt.ended(outcome)
        self._approvals.write(self.attempt, change)
        log.warning("%s %s, %s: %s", change.event.event_type, change.event.event_id, self.attempt.rule, outcome)


def _path(settings: ApprovalSettings) -> str:
    return f"/metadata/scheduledevents?api-version={settings.api_version}"


_UNDECIDED: Final = (  # attributes of a record that say what became of the approval
    "body", "event.name", *(f"azure.scheduled_event.{name}" for name in ("change_id", "change", "reason")),
)  # fmt: skip
