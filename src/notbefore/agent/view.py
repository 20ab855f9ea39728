"""``AgentView``: the agent's values for a scrape, the page, the JSON interface and OTLP.

All values are computed from memory, so nothing here waits for IMDS or the disk. The exceptions are
``history`` and the page, which read the history in the state file.
"""

import re
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from notbefore import __version__
from notbefore.agent.approver import ListedEvents
from notbefore.agent.desk import outbox_reply
from notbefore.agent.figures import ProcessFigures
from notbefore.agent.outbox_answer import outbox_answer
from notbefore.agent.polling import SLOWER, Polling
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.state import AgentSnapshot, AgentState
from notbefore.core.record import Vm, json_line
from notbefore.core.text import counted
from notbefore.core.tracked import PendingApproval, PendingEvent, PendingView, TrackedEvent
from notbefore.errors import NotBeforeError
from notbefore.metrics.families import Family
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.process.operations import OutboxRequest
from notbefore.store.store import Store
from notbefore.web.app import (
    App,
    BadRequestError,
    CheckResult,
    Environ,
    Response,
    application,
    history_query,
    html,
    query_of,
    readiness,
    rendered,
)
from notbefore.wording.approval import pending_approval

# seconds after the start in which a missing answer of IMDS is no failure
FIRST_ANSWER: Final = 150.0
PAGE_SECONDS: Final = 0.5  # during which the same page is returned again
PAGE_CHANGES: Final = 300  # the newest ones of the history that the page reads
# polling intervals without a good answer after which the agent is not ready
READY_INTERVALS: Final = 3
DELIVERY_ID: Final = re.compile("[0-9a-f]{1,32}")  # or its beginning
SLOW: Final = 1.0  # seconds; IMDS is slow if its last answer took longer


class HistoryAnswer(Struct, frozen=True):
    """The body of ``/api/v1/history``; see ``store.HistoryRecords``."""

    changes: list[Raw]  # oldest first
    cut: bool
    problem: str | None


class PingStatus(Struct, frozen=True):
    """The content of a ping."""

    # success: IMDS was polled well, and the state is written
    signal: Literal["start", "success", "fail"]
    line: str  # in words
    vm: str | None  # the VM's name


class AgentView:
    """Reads the agent's parts, and changes none of them. Safe to call from several threads."""

    def __init__(
        self,
        state: AgentState,
        store: Store,
        runtime: Published[Runtime],
        polling: Polling,
        figures: ProcessFigures,
    ) -> None:
        self._state = state
        self._store = store
        self._runtime = runtime
        self._polling = polling
        self._figures = figures
        self._clock = state.clock

    # ---- metrics

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the text of ``/metrics`` and its content type, as an ``Accept`` header asks."""
        return rendered(self.families(), accept)

    def families(self) -> list[Family]:
        """Return all samples of this moment."""
        config = self._runtime.current.config
        snapshot = self._state.snapshot
        now = self._state.now()
        answered = self._answered(snapshot)
        last_success = None
        if answered is not None:
            last_success = answered.timestamp()
        is_answering = self._age(snapshot) <= READY_INTERVALS * config.imds.interval.seconds
        poll = replace(snapshot.poll.figures, last_success=last_success, answering=is_answering)
        metrics = MetricsSnapshot(
            tracked=snapshot.state.tracked,
            totals=snapshot.state.totals,
            figures=self._figures.read(),
            now=now,
            outbox=self._store.view(now.timestamp()),
            sinks=tuple(config.sinks),
            polling=poll,
        )
        return list(samples(metrics))

    def export(self) -> tuple[list[Family], Vm | None]:
        """Return all samples of this moment, and the VM that they are of, for OTLP."""
        return self.families(), self._state.snapshot.vm

    # ---- health

    def health(self) -> CheckResult:
        """Whether the thread that polls IMDS runs, and does not hang in a request."""
        trouble = self._polling.trouble
        if trouble:
            return CheckResult(ok=False, reasons=(trouble,))
        return CheckResult(ok=True)

    def ready(self) -> CheckResult:
        """Whether the last good answer of IMDS is recent, and the state is written to the disk."""
        snapshot = self._state.snapshot
        silence = self._silence(snapshot)
        degraded = self._store.disk.degraded

        reasons: list[str] = []
        if silence:
            reasons.append(silence)
        if self._figures.courier_trouble:
            reasons.append(self._figures.courier_trouble)
        if degraded is not None:
            consequence = "new data does not survive a restart"
            reasons.append(f"the state cannot be written, so {consequence}: {degraded}")
        if snapshot.unreadable:
            unreadable = counted(snapshot.unreadable, "listed event")
            reasons.append(f"{unreadable} cannot be read: the log says why")
        hears = not silence or self._is_slow(snapshot)
        return CheckResult(ok=hears and degraded is None, reasons=tuple(reasons))

    def status_line(self) -> str:
        """Return the agent's status in one line, for ``systemctl status``."""
        count = len(self._state.snapshot.state.tracked.events)
        listed = f"{count} events listed"
        if count == 1:
            listed = "1 event listed"
        return "; ".join((listed, *self.ready().reasons))

    def ping_status(self) -> PingStatus:
        """Return the content of a ping."""
        snapshot = self._state.snapshot
        return PingStatus(self._ping_signal(snapshot), self.status_line(), snapshot.vm_name)

    def _ping_signal(self, snapshot: AgentSnapshot) -> Literal["start", "success", "fail"]:
        running = (self._clock.now() - self._figures.since).total_seconds()
        if snapshot.poll.answered is None and running < FIRST_ANSWER:
            return "start"  # it is no failure that IMDS is slow with its first answer
        if self.ready().ok:
            return "success"
        return "fail"

    def _silence(self, snapshot: AgentSnapshot) -> str:
        """Return why the known events may be outdated, in words; empty while IMDS answers."""
        error = ""
        if snapshot.poll.failure is not None:
            error = f": {snapshot.poll.failure}"
        if snapshot.poll.answered is None:
            if snapshot.poll.failure is None and snapshot.poll.figures.results.get("changed"):
                return "IMDS has not said yet which VM this is"
            return f"IMDS has given no valid answer yet{error}"

        age = self._age(snapshot)
        limit = READY_INTERVALS * self._runtime.current.config.imds.interval.seconds
        if age <= limit:
            return ""
        if self._is_slow(snapshot):
            return f"IMDS is slow: its last answer took {snapshot.poll.took:.0f} s"
        return f"the last good answer of IMDS is {age:.1f} s old, more than {limit:g} s{error}"

    def _is_slow(self, snapshot: AgentSnapshot) -> bool:
        """Whether answers of IMDS arrive, and take so long that the last one is not recent."""
        if snapshot.poll.failure is not None or snapshot.poll.took <= SLOW:
            return False
        return self._age(snapshot) <= SLOWER * snapshot.poll.took

    def _answered(self, snapshot: AgentSnapshot) -> datetime | None:
        """Return when IMDS was asked for its last good answer; ``None`` before the first."""
        if snapshot.poll.asked is None:
            return None
        return snapshot.poll.asked.time

    def _age(self, snapshot: AgentSnapshot) -> float:
        """Return the seconds since the last good answer of IMDS; infinite before the first."""
        if snapshot.poll.answered is None:
            return float("inf")
        return self._clock.boot_time() - snapshot.poll.answered.uptime

    # ---- the JSON interface and the page

    @property
    def app(self) -> App:
        """The application that the HTTP server runs."""

        @lru_cache(maxsize=1)  # many clients may ask for the page at once
        def page_at(_moment: int) -> bytes:
            return self.page()

        def answer_page(_environ: Environ) -> Response:
            return html(page_at(int(time.monotonic() / PAGE_SECONDS)))

        return application(
            self.metrics,
            self.health,
            self._answer_readiness,
            {
                "/": answer_page,
                "/api/v1/events": self._answer_events,
                "/api/v1/history": self._answer_history,
                "/api/v1/outbox": self._answer_outbox,
            },
        )

    def _answer_readiness(self, environ: Environ) -> CheckResult:
        return readiness(self.ready(), self.pending, environ)

    def _answer_events(self, _environ: Environ) -> Response:
        return Response(json_line(self.pending()))

    def _answer_history(self, environ: Environ) -> Response:
        since, limit = history_query(environ)
        return Response(self.history(since, limit))

    def _answer_outbox(self, environ: Environ) -> Response:
        query = query_of(environ, "id", "sink")
        if "id" in query:
            *_, prefix = query["id"]
            return Response(self._delivery(prefix))
        if "sink" in query:
            *_, sink = query["sink"]
            return Response(self._deliveries(sink))
        return Response(self._deliveries(None))

    def _delivery(self, prefix: str) -> bytes:
        """Return the delivery whose id begins with ``prefix``, with its record."""
        if not DELIVERY_ID.fullmatch(prefix):
            raise BadRequestError("id: expected a delivery id, or its beginning")
        try:
            reply = outbox_reply(self._store, OutboxRequest("show", ids=(prefix,)))
        except NotBeforeError as error:
            raise BadRequestError(f"id: {error}") from None
        return json_line(outbox_answer(reply, datetime.now(UTC), with_records=True))

    def _deliveries(self, sink: str | None) -> bytes:
        """Return the deliveries without their records; the outbox bounds their number and size."""
        reply = outbox_reply(self._store, OutboxRequest("show", sink=sink))
        if sink is not None and not reply.rows:
            self._require_sink(sink)
        return json_line(outbox_answer(reply, datetime.now(UTC), with_records=False))

    def _require_sink(self, sink: str) -> None:
        if sink not in self._runtime.current.config.sinks:
            raise BadRequestError(
                f"sink: the outbox has no delivery for {sink[:60]!r}, and the configuration has no"
                " such sink"
            )

    def pending(self) -> PendingView:
        """Return the listed events, the most urgent first, as the body of ``/api/v1/events``."""
        snapshot = self._state.snapshot
        now = self._state.now()
        tracked = snapshot.state.tracked
        listed = ListedEvents(snapshot, self._state.instant())
        events: list[PendingEvent] = []
        for tracked_event in tracked.by_urgency:
            approval = self._approval(tracked_event, listed, now)
            events.append(PendingEvent.of(tracked_event, now, approval))
        return PendingView(
            incarnation=tracked.incarnation,
            last_successful_poll=self._answered(snapshot),
            vm=snapshot.vm,
            unreadable=snapshot.unreadable,
            silence=self._silence(snapshot),
            events=tuple(events),
        )

    def _approval(
        self, tracked: TrackedEvent, listed: ListedEvents, now: datetime
    ) -> PendingApproval | None:
        """Return what the approver does with an event; ``None`` without rules and attempts."""
        runtime = self._runtime.current
        has_attempt = tracked.event.key in listed.attempts
        if not runtime.config.approval.rules and not has_attempt:
            return None
        return pending_approval(listed.plan(runtime, tracked), now)

    def history(self, since: datetime | None, limit: int) -> bytes:
        """Return the newest changes, as the JSON of ``/api/v1/history``."""
        start = None
        if since is not None:
            start = since.timestamp()
        history = self._store.history(start, limit)
        answer = HistoryAnswer(
            changes=[Raw(record) for record in history.records],
            cut=history.was_cut,
            problem=history.problem or None,
        )
        return msgspec.json.encode(answer)

    def page(self) -> bytes:
        """Return the page for people, as HTML."""
        # imported only when someone opens the page
        from notbefore.web.page.model import PageModel, newest_ended  # noqa: PLC0415
        from notbefore.web.page.render import render

        runtime = self._runtime.current
        now = self._state.now()
        history = self._store.history(None, PAGE_CHANGES)
        return render(
            PageModel(
                now=now,
                ready=self.ready(),
                listed=self.pending(),
                ended=newest_ended(history.records),
                history_problem=history.problem,
                version=__version__,
                endpoint=runtime.endpoint,
                state_file=str(self._store.path),
                degraded=self._store.disk.degraded,
                kinds={name: sink.kind for name, sink in runtime.config.sinks.items()},
                outbox=self._store.view(now.timestamp()),
                approval_off=runtime.approval_off,
                approval_untouched=runtime.approval_untouched,
                watching_since=self._figures.since,
            )
        )
