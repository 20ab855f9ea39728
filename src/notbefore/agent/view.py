"""``AgentView``: the agent's values for a scrape, the page, the JSON interface and OTLP.

All values are computed from memory, so nothing here waits for IMDS or the disk, except ``history`` and the page, which
read the history in the state file.
"""

import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore import __version__
from notbefore.agent.approver import ApprovalSettings
from notbefore.agent.polling import Polling
from notbefore.agent.state import AgentSnapshot, AgentState
from notbefore.config.model import Config
from notbefore.core.record import json_line
from notbefore.core.tracked import PendingEvent, PendingView
from notbefore.metrics.families import Family
from notbefore.metrics.samples import Snapshot, samples
from notbefore.metrics.totals import Figures
from notbefore.store.store import Store
from notbefore.web.app import App, CheckResult, Response, application, history_query, html, readiness, rendered

FIRST_ANSWER: Final = 150.0  # seconds after the start in which a missing answer of IMDS is no failure
PAGE_SECONDS: Final = 0.5  # during which the same page is returned again
PAGE_CHANGES: Final = 300  # the newest ones of the history that the page reads
READY_INTERVALS: Final = 3  # polling intervals without a good answer after which the agent is not ready


class PingStatus(Struct, frozen=True):
    """The content of a ping."""

    signal: Literal["start", "success", "fail"]  # success: IMDS was polled well, and the state is written
    line: str  # in words
    vm: str | None  # the VM's name


class InUse(NamedTuple):
    """The values that a reload, the search for IMDS, or the main thread may replace."""

    config: Config
    polling: Polling
    approval: ApprovalSettings
    figures: Callable[[], Figures]
    courier_trouble: str  # why no courier works, so that notifications wait, in words; empty if one does


class AgentView:
    """Reads the agent's values. ``in_use`` is called each time."""

    def __init__(self, state: AgentState, store: Store, in_use: Callable[[], InUse]) -> None:
        self._state = state
        self._clock = state.clock
        self.since = state.clock.now()
        self._store = store
        self._in_use = in_use

    @property
    def app(self) -> App:
        """The application that the HTTP server runs."""
        page = lru_cache(maxsize=1)(lambda _moment: self.page())  # many clients may ask for it at once
        return application(
            self.metrics,
            self.health,
            lambda environ: readiness(self.ready(), self.pending, environ),
            {
                "/": lambda _: html(page(int(time.monotonic() / PAGE_SECONDS))),
                "/api/v1/events": lambda _: Response(json_line(self.pending())),
                "/api/v1/history": lambda environ: Response(self.history(*history_query(environ))),
            },
        )

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the text of ``/metrics`` and its content type, as an ``Accept`` header asks."""
        return rendered(self.families(), accept)

    def families(self) -> list[Family]:
        """Return all samples of this moment."""
        in_use = self._in_use()
        known = self._state.snapshot
        now = self._state.now()
        answered = self._answered(known)
        poll = replace(
            known.poll.figures,
            last_success=answered.timestamp() if answered is not None else None,
            answering=self._age(known) <= READY_INTERVALS * in_use.polling.interval,
        )
        view = Snapshot(
            tracked=known.state.tracked,
            totals=known.state.totals,
            figures=in_use.figures(),
            now=now,
            outbox=self._store.view(now.timestamp()),
            sinks=tuple(in_use.config.sinks),
            polling=poll,
        )
        return list(samples(view))

    def health(self) -> CheckResult:
        """Whether the thread that polls IMDS runs, and does not hang in a request beyond its deadline."""
        trouble = self._in_use().polling.trouble
        return CheckResult(ok=not trouble, reasons=(trouble,) if trouble else ())

    def ready(self) -> CheckResult:
        """Whether the last good answer of IMDS is recent, and the state is written to the disk."""
        known, trouble = self._state.snapshot, self._in_use().courier_trouble
        reasons = [trouble] if trouble else []
        if (degraded := self._store.disk.degraded) is not None:
            reasons.append(f"the state cannot be written, so new data does not survive a restart: {degraded}")
        if known.unreadable:
            reasons.append(f"{known.unreadable} listed events cannot be read: the log says why")
        silence = self._silence(known)
        if silence:
            return CheckResult(ok=False, reasons=(silence, *reasons))
        return CheckResult(degraded is None, tuple(reasons))

    def _silence(self, known: AgentSnapshot) -> str:
        """Why the known events may be outdated, in words; empty while IMDS answers."""
        error = f": {known.poll.failure}" if known.poll.failure is not None else ""
        if known.poll.answered is None:
            unnamed = known.poll.failure is None and known.poll.figures.results.get("changed")
            return "IMDS has not said yet which VM this is" if unnamed else f"IMDS has given no valid answer yet{error}"
        age, limit = self._age(known), READY_INTERVALS * self._in_use().polling.interval
        return f"the last good answer of IMDS is {age:.1f} s old, more than {limit:g} s{error}" if age > limit else ""

    def _answered(self, known: AgentSnapshot) -> datetime | None:
        """When IMDS last gave a good answer (see ``Instant.time``); ``None`` before the first."""
        return known.poll.seen.time if known.poll.seen is not None else None

    def _age(self, known: AgentSnapshot) -> float:
        """Seconds since the last good answer of IMDS; infinite before the first."""
        answered = known.poll.answered
        return self._clock.boot_time() - answered.uptime if answered is not None else float("inf")

    def status_line(self) -> str:
        """The agent's status in one line, for ``systemctl status``."""
        count = len(self._state.snapshot.state.tracked.events)
        return "; ".join((f"{count} event{'' if count == 1 else 's'} listed", *self.ready().reasons))

    def ping_status(self) -> PingStatus:
        """The content of a ping: it is no failure that IMDS is slow with its first answer."""
        known, ready = self._state.snapshot, self.ready().ok
        begins = known.poll.answered is None and (self._clock.now() - self.since).total_seconds() < FIRST_ANSWER
        return PingStatus("start" if begins else "success" if ready else "fail", self.status_line(), known.vm_name)

    def pending(self) -> PendingView:
        """The listed events, the most urgent first, as the body of ``/api/v1/events``."""
        known, now = self._state.snapshot, self._state.now()
        return PendingView(
            incarnation=known.state.tracked.incarnation,
            last_successful_poll=self._answered(known),
            vm=known.vm,
            unreadable=known.unreadable,
            silence=self._silence(known),
            events=tuple(PendingEvent.of(event, now) for event in known.state.tracked.by_urgency),
        )

    def history(self, since: datetime | None, limit: int) -> bytes:
        """The newest changes, as the JSON of ``/api/v1/history``."""
        records, cut = self._store.history(since.timestamp() if since else None, limit)
        return b'{"changes":[%b],"cut":%b}' % (b",".join(records), b"true" if cut else b"false")

    def page(self) -> bytes:
        """The page for people, as HTML."""
        from notbefore.web.page.model import PageModel, newest_ended  # noqa: PLC0415 - only if somebody opens the page
        from notbefore.web.page.render import render  # as above

        in_use, now = self._in_use(), self._state.now()
        return render(
            PageModel(
                now=now,
                ready=self.ready(),
                listed=self.pending(),
                ended=newest_ended(self._store.history(None, PAGE_CHANGES)[0]),
                version=__version__,
                endpoint=in_use.polling.endpoint,
                state_file=str(self._store.path),
                degraded=self._store.disk.degraded,
                kinds={name: sink.kind for name, sink in in_use.config.sinks.items()},
                outbox=self._store.view(now.timestamp()),
                approval_off=in_use.approval.off,
                watching_since=self.since,
            )
        )
