"""``FleetView``: the metrics of an instance, and the page and the JSON interface of the whole
fleet.
"""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

from notbefore import __version__
from notbefore.config.model import Config
from notbefore.core.record import json_line
from notbefore.core.text import counted
from notbefore.core.tracked import Tracked
from notbefore.courier.supervisor import Supervisor
from notbefore.errors import StoreError
from notbefore.fleet.calendar_feed import calendar
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.history import read_past
from notbefore.fleet.history_report import Row, report
from notbefore.fleet.instance_state import InstanceState
from notbefore.fleet.keeper import Parts
from notbefore.fleet.shown_waves import (
    FILTERS,
    FleetEvents,
    names_of,
    under_way,
    wanted_vms,
)
from notbefore.metrics import fleet as metrics
from notbefore.metrics.families import Family
from notbefore.metrics.samples import MetricsSnapshot
from notbefore.metrics.totals import Figures
from notbefore.web.app import (
    UNAVAILABLE,
    App,
    CheckResult,
    Environ,
    Response,
    Route,
    application,
    error,
    html,
    query_of,
    rendered,
    since_of,
)
from notbefore.web.page.model import MAX_PENDING, PageModel
from notbefore.wording import phrases

TEMPLATES: Final = Path(__file__).with_name("templates")
CALENDAR: Final = "text/calendar; charset=utf-8"
MONTH: Final = 30 * 86_400.0  # seconds before now that the page's table of past events covers
MONTH_EVERY: Final = 60.0  # seconds between two computations of that table


class FleetView:
    """Reads the state that the consumer publishes. Safe to call from several threads."""

    def __init__(
        self, config: Config, consumer: Consumer, parts: Parts, supervisor: Supervisor
    ) -> None:
        self._config = config
        self._consumer = consumer
        self._parts = parts
        self._supervisor = supervisor
        self._began = datetime.now(UTC)
        self._last_month = lru_cache(maxsize=1)(self._month)

    @property
    def app(self) -> App:
        """The application that the HTTP server runs."""
        routes: dict[str, Route] = {
            "/": self._answer_page,
            "/api/v1/fleet/events": self._answer_events,
            "/api/v1/fleet/history": self._answer_history,
            "/api/v1/calendar.ics": self._answer_calendar,
        }
        return application(self.metrics, self._health, self._answer_ready, routes)

    def _answer_page(self, environ: Environ) -> Response:
        return html(self.page(_filters(environ)))

    def _answer_events(self, environ: Environ) -> Response:
        return Response(json_line(self.fleet(_filters(environ))))

    def _answer_history(self, environ: Environ) -> Response:
        return Response(self.past(since_of(query_of(environ, "since"))))

    def _answer_calendar(self, environ: Environ) -> Response:
        return self.calendar(_filters(environ))

    def _answer_ready(self, _environ: Environ) -> CheckResult:
        return self.ready()

    def _health(self) -> CheckResult:
        return CheckResult(ok=True)  # when the consumer's thread ends, the process ends

    # ---- the state of this instance

    def ready(self) -> CheckResult:
        """Whether the hub is being read.

        The reasons also name problems with snapshots and the courier.
        """
        return self._ready(self._consumer.state())

    def _ready(self, state: InstanceState) -> CheckResult:
        reasons: list[str] = []
        is_read = state.reading.connected
        if not is_read:
            reasons.append(_unread(state))
        if state.snapshot_trouble:
            reasons.append(f"the snapshots cannot be written: {state.snapshot_trouble}")
        reasons += state.refused
        if state.gap:
            reasons.append(state.gap)
        if state.split:
            reasons.append(state.split)
        if self._supervisor.trouble:
            reasons.append(self._supervisor.trouble)
        return CheckResult(ok=is_read, reasons=tuple(reasons))

    def status_line(self) -> str:
        """Return the state of the instance in one line, for ``systemctl status``."""
        state = self._consumer.state()
        partitions = counted(state.own_partitions, "partition")
        events = counted(state.own_events, "event")
        return "; ".join((f"{partitions}, {events}", *self._ready(state).reasons))

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the text of ``/metrics`` and its content type, as an ``Accept`` header asks."""
        return rendered(self._families(), accept)

    def _families(self) -> Iterator[Family]:
        figures = Figures(
            version=__version__,
            courier=self._supervisor.figures,
            since=self._began,
        )
        process = MetricsSnapshot(
            tracked=Tracked(),
            totals=self._parts.outbox.totals,
            figures=figures,
            now=datetime.now(UTC),
            outbox=self._parts.outbox.view(time.time()),
            sinks=tuple(self._config.sinks),
        )
        state = self._consumer.state()
        return metrics.fleet_samples(state.counts, process, state.azure_delays)

    # ---- the whole fleet

    def fleet(self, filters: Mapping[str, str]) -> FleetEvents:
        """Return the events of the whole fleet that are not over, the most urgent first."""
        return self._fleet(self._consumer.state_with_others(), filters)

    def _fleet(self, state: InstanceState, filters: Mapping[str, str]) -> FleetEvents:
        trouble = state.fleet_gap
        ready = self._ready(state)
        if not ready.ok:
            trouble = ready.reasons[0]

        heard = wanted_vms(state.heard, filters)
        missing = wanted_vms(state.missing, filters)
        return FleetEvents(
            trouble=trouble,
            partitions=state.partitions,
            waves=tuple(wave for wave in state.waves if wave.matches(filters)),
            heard=len(heard),
            silent=names_of(vm for vm in heard if vm.silent),
            missing=names_of(missing),
            without_agent=names_of(wanted_vms(state.without_agent, filters)),
            complete=not state.fleet_gap,
        )

    def calendar(self, filters: Mapping[str, str]) -> Response:
        """Answer with the feed of coming events.

        If they are not known, the answer is an error: calendars then keep what they have.
        """
        fleet = self.fleet(filters)
        is_unknown = fleet.trouble and not (fleet.waves and fleet.complete)
        if is_unknown:
            return error(UNAVAILABLE, f"what is coming is not known: {fleet.trouble}")
        return Response(calendar(fleet.waves, datetime.now(UTC)), CALENDAR)

    def page(self, filters: Mapping[str, str]) -> bytes:
        """Return the page of the fleet, as HTML in UTF-8."""
        # Jinja needs 4 MB, and is loaded when someone opens the page
        from notbefore.web.page import render  # noqa: PLC0415

        now = datetime.now(UTC)
        state = self._consumer.state_with_others()
        fleet = self._fleet(state, filters)
        status = PageModel(
            now=now,
            ready=self._ready(state),
            version=__version__,
            state_file=str(self._parts.history.path),
            degraded=state.snapshot_trouble or None,
            kinds={name: sink.kind for name, sink in self._config.sinks.items()},
            outbox=self._parts.outbox.view(now.timestamp()),
        )
        month, month_unknown = self._last_month(int(time.monotonic() / MONTH_EVERY))
        mutes = [mute.words for mute in state.reading.mutes if mute.until > now.timestamp()]

        text = render.template("instance.html", TEMPLATES).render(
            model=status,
            now=now,
            fleet=fleet,
            ahead=[wave for wave in fleet.waves if wave.to_come],  # people can prepare for these
            most=MAX_PENDING,
            places=under_way(fleet.waves),
            month=month,
            month_unknown=month_unknown,
            wanted=filters,
            filters=FILTERS,
            why_silent=phrases.SILENT,
            why_missing=phrases.MISSING,
            why_without_agent=phrases.WITHOUT_AGENT,
            mutes=mutes,
        )
        return text.encode(errors="replace")  # a file name may contain bytes that are no text

    # ---- the history

    def past(self, since: datetime | None) -> bytes:
        """Return the body of ``/api/v1/fleet/history``: the events that ended since then."""
        begin = 0.0
        if since is not None:
            begin = since.timestamp()
        return b'{"events":[%b]}' % b",".join(self._parts.history.past(begin))

    def _month(self, _minute: int) -> tuple[list[Row], str]:
        """Return the page's table of past events, and why it is not known, or an empty text."""
        try:
            past = read_past(self._parts.history.past(time.time() - MONTH))
        except StoreError as unknown:
            return [], str(unknown)
        return report(past), ""


def _unread(state: InstanceState) -> str:
    """Return a sentence: the hub is not being read, and why."""
    text = "the hub is not being read"
    if state.hub_trouble:
        return f"{text}: {state.hub_trouble}"
    return text


def _filters(environ: Environ) -> dict[str, str]:
    """Return the filters of a request: field -> value; of several values the last one."""
    filters: dict[str, str] = {}
    for name, values in query_of(environ, *FILTERS).items():
        if values[-1]:
            filters[name] = values[-1]
    return filters
