"""``OpenEvent``: an event that is not over, as an operator sees it. Pure."""

from collections.abc import Iterable

from msgspec import Struct

from notbefore.core.document import Event
from notbefore.core.record import FleetFacts, Vm
from notbefore.core.tracked import PendingEvent
from notbefore.fleet.hub_records import Place
from notbefore.fleet.partition import Partition
from notbefore.fleet.story import Standing, Story
from notbefore.fleet.wave import facts_of


class OpenEvent(Struct, frozen=True):
    """An event of a partition that this instance reads, as it is now."""

    partition: str
    event: Event
    standing: Standing
    place: Place
    resource_id: str  # as Azure itself reports it, or empty
    pending: PendingEvent
    facts: FleetFacts
    routed: tuple[Vm, ...]

    @property
    def content(self) -> str:
        """Identifies the event with everything that Azure can change."""
        time = self.pending.not_before or self.pending.first_seen
        return f"{self.event.digest()} {self.resource_id} {time.isoformat()}"


def open_events(folds: Iterable[Partition], event_id: str, now: float) -> list[OpenEvent]:
    """Return the open events of these partitions that have an EventId."""
    key = event_id.casefold()
    events: list[OpenEvent] = []
    for fold in folds:
        for story in fold.events.open.values():
            if story.event.key == key:
                routed = fold.events.waves.open[story.labels].routed
                events.append(_open_event(fold.name, story, routed, now))
    return events


def _open_event(partition: str, story: Story, routed: tuple[Vm, ...], now: float) -> OpenEvent:
    event = story.event
    resource_id = ""
    if story.azure is not None:
        resource_id = story.azure.resource_id
    seconds = None
    if story.not_before is not None:
        seconds = story.not_before.timestamp() - now
    return OpenEvent(
        partition=partition,
        event=event,
        standing=story.standing,
        place=story.place,
        resource_id=resource_id,
        pending=PendingEvent(
            event_id=event.event_id,
            event_type=event.event_type,
            event_status=story.standing.name.capitalize(),
            event_source=event.event_source,
            scope="fleet",
            resources=event.resources,
            description=event.description or None,
            not_before=story.not_before,
            seconds_to_not_before=seconds,
            expected_duration_seconds=event.duration,
            first_seen=story.first_seen,
            notice_seconds=None,
            started=story.started,
            start_seen=False,
        ),
        facts=facts_of([story]),
        routed=routed,
    )
