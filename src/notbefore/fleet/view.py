"""``FleetView``: what a scrape and the JSON interface show of an instance."""

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from notbefore import __version__
from notbefore.config.model import Config
from notbefore.core.text import natural
from notbefore.core.tracked import Tracked
from notbefore.fleet.coming import FleetEvents, coming
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.history import History
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.merge import OVER, Story
from notbefore.fleet.month import Month
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Partition
from notbefore.metrics.families import Family, Snapshot
from notbefore.metrics.fleet import FleetSnapshot, Shown, samples
from notbefore.metrics.process import CourierFigures, Figures
from notbefore.metrics.totals import Labels
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.state import Store
from notbefore.web.page.model import PageModel
from notbefore.web.view import AgentStatus, CheckResult

if TYPE_CHECKING:  # imported at the first scrape
    from notbefore.web.exposition import MetricsText


class Stored(NamedTuple):
    """What an instance keeps on its disk, and who reads it."""

    store: Store
    notified: FleetOutbox
    outbox: OutboxReader
    history: History
    inventory: Inventory | None = None


class FleetView:
    """Reads what the consumer's thread has; what changes meanwhile is shown at the next look."""

    def __init__(
        self,
        config: Config,
        consumer: Consumer,
        stored: Stored,
        courier: Callable[[], CourierFigures],
    ) -> None:
        self._config = config
        self._consumer = consumer
        self._stored = stored
        self._store, self._notified, self._outbox = stored[:3]
        self._courier = courier
        self._began = datetime.now(UTC)
        self._month = Month(stored.history.directory)

    @cached_property
    def _text(self) -> "MetricsText":
        from notbefore.web.exposition import MetricsText  # noqa: PLC0415 - 9 MiB, at the first scrape

        return MetricsText(self._families)

    def metrics(self, accept: str, names: Collection[str] = ()) -> tuple[bytes, str]:
        """``/metrics``: the body and the content type for this ``Accept`` header; ``names``: only these families."""
        return self._text.render(accept, names)

    def health(self) -> CheckResult:
        """The consumer's thread runs."""
        alive = self._consumer.alive
        return CheckResult(ok=alive, reasons=() if alive else ("the thread that reads the hub has ended",))

    def ready(self) -> CheckResult:
        """The hub is being read, and the state is written where it survives the end of the machine."""
        reasons = []
        if self._store.degraded:
            reasons.append(f"the state cannot be written: {self._store.degraded}")
        if not self._consumer.connected:
            reasons.append(": ".join(("the hub is not being read", *filter(None, [self._consumer.trouble]))))
        return CheckResult(ok=not reasons, reasons=tuple(reasons))

    def status_line(self) -> str:
        """How the instance is, in one line for ``systemctl status``."""
        folds = self._consumer.folds
        events = sum(len(fold.stories) for fold in folds)
        return "; ".join((f"{len(folds)} partitions, {events} events", *self.ready().reasons))

    def history(self, since: datetime | None, limit: int) -> bytes:
        """The newest notifications, as the JSON of ``/api/v1/history``."""
        found = self._store.history(since.timestamp() if since else None, limit)
        return b'{"changes":[%b],"cut":%b}' % (b",".join(found.records), b"true" if found.cut else b"false")

    def fleet(self) -> FleetEvents:
        """What is coming over the fleet, the most urgent first."""
        now = datetime.now(UTC)
        folds = self._consumer.folds
        waves = coming((wave for fold in folds for wave in list(fold.waves.open.values())), now)
        silent = sorted((one.name for fold in folds for one in fold.silence.silent), key=natural)
        missing = sorted((one.name for fold in folds for one in fold.missing.silent), key=natural)
        heard = sum(len(fold.silence.heard) for fold in folds)
        return FleetEvents(
            tuple(sorted((fold.name for fold in folds), key=natural)),
            waves,
            heard,
            tuple(silent),
            tuple(missing),
        )

    def page(self) -> bytes:
        """The page of this instance, as HTML."""
        from notbefore.fleet.page import InstancePage, instance_page  # noqa: PLC0415 - only when somebody opens it

        config, process = self._config, self._stored
        agent = AgentStatus(
            version=__version__,
            state_file=str(process.store.path),
            degraded=process.store.degraded,
            damaged_files=process.store.damaged_files,
            courier_running=self._courier().running,
            sinks={name: sink.kind for name, sink in config.sinks.items()},
            outbox=process.outbox.view,
            links=config.messages.links,
        )
        status = PageModel(now=datetime.now(UTC), ready=self.ready(), agent=agent)
        return instance_page(InstancePage(status, self.fleet(), self._month.get()))

    def _disk_errors(self) -> dict[str, int]:
        inventory = self._stored.inventory
        return {"history": self._stored.history.failures} | (
            {"inventory": inventory.failures} if inventory is not None else {}
        )

    def _families(self) -> Iterator[Family]:
        consumer = self._consumer
        folds = consumer.folds
        heard: dict[Labels, float] = {}
        silent: dict[Labels, float] = {}
        missing: dict[Labels, float] = {}
        for fold in folds:
            for one in list(fold.silence.heard.values()):
                place = (one.place.region, one.place.scale_set)
                heard[place] = heard.get(place, 0.0) + 1.0
                silent[place] = silent.get(place, 0.0) + float(one.silent)
            for one in fold.missing.silent:
                place = (one.place.region, one.place.scale_set)
                missing[place] = missing.get(place, 0.0) + 1.0
        snapshot = FleetSnapshot(
            now=datetime.now(UTC),
            events=tuple(one for fold in folds for one in _events(fold)),
            heard=heard,
            silent=silent,
            missing_vms=missing,
            fell_silent=consumer.counts["fell_silent"],
            records=consumer.records,
            poison=consumer.poison,
            errors=consumer.errors | self._disk_errors(),
            contradictions=consumer.counts["contradictions"],
            given_up=consumer.counts["given_up"],
            missing=consumer.counts["missing"],
            lag={name: (float(lag.events), lag.seconds) for name, lag in list(consumer.lag.items())},
            partitions=len(folds),
            connected=consumer.connected,
            notice=consumer.measured.notice,
            interruption=consumer.measured.interruption,
            since=self._began,
        )
        process = Snapshot(
            tracked=Tracked(),
            totals=self._notified.totals,
            figures=Figures(
                version=__version__,
                courier=self._courier(),
                store_degraded=self._store.degraded is not None,
                store_damaged=self._store.damaged_files,
                since=self._began,
            ),
            now=snapshot.now,
            outbox=self._outbox.view,
            sinks=tuple(self._config.sinks),
        )
        return samples(snapshot, process)


def _events(fold: Partition) -> Iterable[Shown]:
    for story in list(fold.stories.values()):
        if story.standing not in OVER:
            yield Shown(_labels(story), story.standing.name.lower(), len(story.affected))


def _labels(story: Story) -> Labels:
    return (story.event.event_type, story.place.region, story.place.scale_set, story.zone)
