"""``FleetView``: the metrics of an instance, and the page and the JSON interface of the whole
fleet.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

from notbefore import __version__
from notbefore.config.model import Config
from notbefore.core.record import json_line
from notbefore.core.text import natural
from notbefore.core.tracked import Tracked
from notbefore.courier.supervisor import Supervisor
from notbefore.errors import StoreError
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.history import Row, read_past, report
from notbefore.fleet.hub_records import Place
from notbefore.fleet.keeper import Parts
from notbefore.fleet.partition import Partition
from notbefore.fleet.shown_waves import (
    FILTERS,
    FleetEvents,
    ShownPartition,
    calendar,
    coming,
    names_of,
    under_way,
    wanted_vms,
)
from notbefore.fleet.snapshot import Snapshot
from notbefore.fleet.story import OVER
from notbefore.metrics import fleet as metrics
from notbefore.metrics.families import Family, Metric
from notbefore.metrics.samples import MetricsSnapshot
from notbefore.metrics.totals import Figures, Labels
from notbefore.web.app import (
    UNAVAILABLE,
    App,
    CheckResult,
    Environ,
    Response,
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
DAYS: Final = 30 * 86_400.0  # seconds before now that the page's table of past events covers
MONTH_EVERY: Final = 60.0  # seconds between two computations of that table


class FleetView:
    """Reads the data of the consumer's thread; a change during a read is shown at the next one."""

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
        return application(
            self.metrics,
            lambda: CheckResult(ok=True),  # when the consumer's thread ends, the process ends
            lambda _: self.ready(),
            {
                "/": lambda environ: html(self.page(_filters(environ))),
                "/api/v1/fleet/events": lambda environ: Response(
                    json_line(self.fleet(_filters(environ)))
                ),
                "/api/v1/fleet/history": lambda environ: Response(
                    self.past(since_of(query_of(environ, "since")))
                ),
                "/api/v1/calendar.ics": lambda environ: self.calendar(_filters(environ)),
            },
        )

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the text of ``/metrics`` and its content type, as an ``Accept`` header asks."""
        return rendered(self._families(), accept)

    def ready(self) -> CheckResult:
        """Whether the hub is being read.

        The reasons also name problems with snapshots and the courier.
        """
        keeper, read = self._consumer.keeper, self._consumer.connected
        own_states = [fold.state for fold in keeper.folds]
        reasons = (
            "" if read else ": ".join(filter(None, ("the hub is not being read", keeper.said))),
            (stored := keeper.trouble) and f"the snapshots cannot be written: {stored}",
            *list(keeper.refused.values()),
            _gap(own_states, self._parts.clock.now()),
            self._supervisor.trouble,
        )
        return CheckResult(ok=read, reasons=tuple(filter(None, reasons)))

    def status_line(self) -> str:
        """Return the state of the instance in one line, for ``systemctl status``."""
        folds = self._consumer.keeper.folds
        events = sum(len(fold.events.open) for fold in folds)
        return "; ".join((f"{len(folds)} partitions, {events} events", *self.ready().reasons))

    def past(self, since: datetime | None) -> bytes:
        """Return the body of ``/api/v1/fleet/history``: the events of this instance's history that
        ended since then.
        """
        return b'{"events":[%b]}' % b",".join(
            self._parts.history.past(since.timestamp() if since else 0.0)
        )

    def _month(self, _moment: int) -> tuple[list[Row], str]:
        """Return the page's table of past events, and why it is not known."""
        try:
            return report(read_past(self._parts.history.past(time.time() - DAYS))), ""
        except StoreError as unknown:
            return [], str(unknown)

    def fleet(self, wanted: Mapping[str, str]) -> FleetEvents:
        """Return the events of the whole fleet that are not over, the most urgent first.

        ``wanted``: the filters.
        """
        now = datetime.now(UTC)
        folds, others = self._consumer.keeper.folds, self._consumer.others()
        partitions = [ShownPartition(fold.name, None) for fold in folds]
        partitions += [
            ShownPartition(name, max(0.0, now.timestamp() - one.at)) for name, one in others.items()
        ]
        states = [*(fold.state for fold in folds), *others.values()]
        waves = [wave for state in states for wave in list(state.waves.values())]
        heard = wanted_vms((one for state in states for one in list(state.heard.values())), wanted)
        missing = (one for state in states for one in list(state.expected.values()) if one.silent)
        gap = self._gap_in({one.name for one in partitions}, states)
        ready = self.ready()
        trouble = gap
        if not ready.ok:
            trouble = ready.reasons[0]
        return FleetEvents(
            trouble=trouble,
            partitions=tuple(sorted(partitions, key=lambda one: natural(one.name))),
            waves=tuple(one for one in coming(waves, now) if one.matches(wanted)),
            heard=len(heard),
            silent=names_of(one for one in heard if one.silent),
            missing=names_of(wanted_vms(missing, wanted)),
            complete=not gap,
        )

    def calendar(self, wanted: Mapping[str, str]) -> Response:
        """Answer with the feed of coming events.

        With an error if they are not known: who subscribes keeps the old.
        """
        fleet = self.fleet(wanted)
        is_unknown = fleet.trouble and not (fleet.waves and fleet.complete)
        if is_unknown:
            return error(UNAVAILABLE, f"what is coming is not known: {fleet.trouble}")
        return Response(calendar(fleet.waves, datetime.now(UTC)), CALENDAR)

    def _gap_in(self, shown: set[str], states: list[Snapshot]) -> str:
        """Return why some of the fleet's events are not known; empty if all are.

        ``shown``: the shown partitions.
        """
        partitions = self._consumer.keeper.ends.keys()
        unread = len(partitions - shown)
        if unread:
            return f"{unread} of the hub's {len(partitions)} partitions could not be read yet"
        return _gap(states, self._parts.clock.now())

    def page(self, wanted: Mapping[str, str]) -> bytes:
        """Return the page of the fleet, as HTML in UTF-8; ``wanted``: the filters."""
        now, config, fleet = datetime.now(UTC), self._config, self.fleet(wanted)
        status = PageModel(
            now=now,
            ready=self.ready(),
            version=__version__,
            state_file=str(self._parts.history.path),
            degraded=self._consumer.keeper.trouble or None,
            kinds={name: sink.kind for name, sink in config.sinks.items()},
            outbox=self._parts.outbox.view(now.timestamp()),
        )
        month, unknown = self._last_month(int(time.monotonic() / MONTH_EVERY))
        from notbefore.web.page import render  # noqa: PLC0415 - only when somebody opens the page

        made = render.template("instance.html", TEMPLATES).render(
            model=status,
            now=now,
            fleet=fleet,
            ahead=[one for one in fleet.waves if one.to_come],  # people can still prepare for these
            most=MAX_PENDING,
            lines=under_way(fleet.waves),
            month=month,
            month_unknown=unknown,
            wanted=wanted,
            filters=FILTERS,
            why_silent=phrases.SILENT,
            why_missing=phrases.MISSING,
            mutes=[one.words for one in self._consumer.mutes if one.until > time.time()],
        )
        return made.encode(errors="replace")  # a file name may contain bytes that are no text

    def _gauges(self, folds: list[Partition]) -> dict[Metric, Counter[Labels]]:
        """Return the numbers of events that are not over, and of VMs, by place."""
        by = self._config.fleet.metrics_by if self._config.fleet is not None else ()
        gauges = metrics.EVENTS, metrics.VMS, metrics.HEARD, metrics.SILENT, metrics.MISSING_VMS
        found = events, vms, heard, silent, missing = [Counter[Labels]() for _ in gauges]
        for fold in folds:
            for story in list(fold.events.open.values()):
                if story.standing not in OVER:
                    place = story.place
                    labels = (
                        story.event.event_type,
                        place.region,
                        place.scale_set,
                        place.zone,
                        *_owner(place, by),
                    )
                    events[(*labels, story.standing.name.lower())] += 1
                    vms[labels] += len(story.event.resources)
            for one in list(fold.state.heard.values()):
                where = (one.place.region, one.place.scale_set, *_owner(one.place, by))
                heard[where] += 1
                silent[where] += one.silent
            for one in list(fold.state.expected.values()):
                if one.silent:
                    missing[one.place.region, one.place.scale_set, *_owner(one.place, by)] += 1
        return dict(zip(gauges, found, strict=True))

    def _families(self) -> Iterator[Family]:
        consumer, parts = self._consumer, self._parts
        folds, figures, lag = consumer.keeper.folds, consumer.keeper.figures, consumer.lag
        now = parts.clock.now()
        counts: metrics.Counts = {
            **self._gauges(folds),
            metrics.RECORDS: {(result,): count for result, count in dict(figures.records).items()},
            metrics.POISON: {(reason,): count for reason, count in dict(figures.poison).items()},
            metrics.ERRORS: {(part,): count for part, count in dict(figures.errors).items()},
            metrics.MISSING: {(): figures.missing},
            metrics.LOST_SNAPSHOTS: {(): sum(fold.state.was_lost(now) for fold in folds)},
            metrics.NEWER_SNAPSHOTS: {(): len(consumer.keeper.refused)},
            metrics.UNKNOWN_EVENTS: {(): sum(fold.state.unknown_events(now) for fold in folds)},
            metrics.PARTITIONS: {(): len(folds)},
            metrics.CONNECTED: {(): int(consumer.connected)},
            metrics.LAG_RECORDS: {(name,): records for name, (records, _) in lag.items()},
            metrics.LAG_SECONDS: {(name,): seconds for name, (_, seconds) in lag.items()},
        }
        process = MetricsSnapshot(
            tracked=Tracked(),
            totals=parts.outbox.totals,
            figures=Figures(
                version=__version__, courier=self._supervisor.figures, since=self._began
            ),
            now=datetime.now(UTC),
            outbox=parts.outbox.view(time.time()),
            sinks=tuple(self._config.sinks),
        )
        return metrics.samples(counts, process)


def _filters(environ: Environ) -> dict[str, str]:
    """Return the filters of a request: field -> value."""
    return {name: values[-1] for name, values in query_of(environ, *FILTERS).items() if values[-1]}


def _gap(states: Iterable[Snapshot], now: float) -> str:
    """Return why events of these partitions may be unknown; empty if they are not."""
    lost = 0
    unknown = 0
    for state in states:
        lost += state.was_lost(now)
        unknown += state.unknown_events(now)
    if unknown:
        return f"{unknown} events that VMs list were never reported here"
    if lost:
        return f"{lost} snapshots were lost: events older than the hub's retention may be missing"
    return ""


def _owner(place: Place, by: Collection[str]) -> tuple[str, str]:
    """Return the labels subscription and resource_group.

    Empty unless ``by`` (``metrics_by``) has them.
    """
    subscription = place.subscription if "subscription" in by else ""
    return subscription, place.resource_group if "resource_group" in by else ""
