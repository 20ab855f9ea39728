"""``Waves``: which stories are notified together, and when. Pure.

The terms are Alertmanager's. ``group_by`` defines which stories of one resource group and the same
routes are a group, called a wave. ``group_wait`` is how long the first notification waits for more
of them, ``group_interval`` how long a digest waits. The start of a wave is notified at once; its
end waits for ``group_interval``. News that would lose its notice by waiting for the next digest
does not wait for it.

All times are the hub's: every instance that reads the same log makes the same notifications, under
the same ids.
"""

from datetime import datetime
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import change_id
from notbefore.core.document import Event
from notbefore.core.outbox_rows import Schedule
from notbefore.core.record import WAVE, Vm
from notbefore.core.routing import Route
from notbefore.fleet.notification import Notification, notify
from notbefore.fleet.story import OVER, Standing, Story
from notbefore.fleet.wave import OpenWaves, Wave, by_progress, severity, vm_of

MAX_ROUTED: Final = 16  # places, each with other routes, that route the notifications of a wave
NOTICE_DIVISOR: Final = 3  # news waits for a third of the notice left at most: a Preempt has 30 s
DIGEST_DIVISOR: Final = 2  # or for the next digest, if that leaves at least half of the notice
DIGESTS_PER_STANDING: Final = 1_000  # a wave that begins again numbers its digests from a multiple


class Grouping(Struct, frozen=True):
    """How stories are grouped; times in seconds.

    Stories of two resource groups are never one group.
    """

    group_by: tuple[str, ...]  # see ``_label``
    group_wait: float
    group_interval: float
    over_after: float  # after NotBefore, the start and the last record: it is over without reports
    routes: tuple[Route, ...]  # stories with different routes are different groups

    @property
    def each_event(self) -> bool:
        """Whether every event is a group of its own: then there is nothing to wait for."""
        return "event_id" in self.group_by


class DueWave(NamedTuple):
    """A wave that was due, and its notification; ``None`` if there is nothing to notify of."""

    wave: Wave
    notification: Notification | None


class Waves:
    """The waves of one partition. ``open_waves``: the previous owner's, changed in place."""

    def __init__(self, grouping: Grouping, open_waves: OpenWaves) -> None:
        self._grouping = grouping
        self.open = open_waves
        self._schedule = Schedule[tuple[str, ...]]()  # the waves that have a due time
        for labels, wave in open_waves.items():
            self._schedule.put(labels, wave.due)

    # ---- stories

    def labels(self, story: Story) -> tuple[str, ...]:
        """Return the key of the wave of a new story."""
        labels = [story.group]
        labels += [_label(name, story) for name in self._grouping.group_by]
        if story.exercise:
            labels.append("exercise")  # never in a wave of real events
        return (*labels, self._routes_of(story))

    def labels_of_region(self, story: Story) -> tuple[str, ...]:
        """Return the key of a wave that has the stories of a whole region."""
        return ("region", story.place.region.casefold(), self._routes_of(story))

    def _routes_of(self, story: Story) -> str:
        vm = vm_of(story.place, story.event.resources)
        return matching_routes(vm, story.event, self._grouping.routes)

    def note(self, story: Story, now: float, notified: Standing = Standing.NEW) -> None:
        """Note that a story is new or has changed at ``now``; set when its wave is due.

        ``notified``: the last notified standing of a story that was over, and turns out not to be.
        """
        if not story.labels:
            story.labels = self.labels(story)
        wave = self.open.get(story.labels)
        if wave is None:
            wave = self._begin(story, now, notified)

        was_over = wave.standing in OVER
        wave.stories[story.event.key] = story
        self.route(story)

        standing = wave.standing
        due = self._due(wave, standing, story, now)
        was_notified = wave.notified is not Standing.NEW
        ends_or_continues = was_notified and (standing in OVER or was_over)
        if wave.due is None or due < wave.due or ends_or_continues:
            wave.due = due
            self._schedule.put(story.labels, due)

    def route(self, story: Story) -> None:
        """Route the story's wave also by its place, if other routes match there than elsewhere."""
        wave = self.open[story.labels]
        routes = self._grouping.routes
        vm = vm_of(story.place, story.event.resources)
        matching = matching_routes(vm, story.event, routes)

        for routed_vm in wave.routed:
            if matching_routes(routed_vm, story.event, routes) == matching:
                return
        if len(wave.routed) < MAX_ROUTED:
            wave.routed = (*wave.routed, vm)

    def continue_wave(self, wave: Wave, now: float) -> bool:
        """Add a wave that another partition has had, unless these labels have one here."""
        labels = wave.labels
        if labels in self.open:
            return False
        if wave.due is not None:
            wave.due = max(wave.due, now)
        self.open[labels] = wave
        self._schedule.put(labels, wave.due)
        return True

    def drop(self, story: Story) -> Wave:
        """Remove a story from its wave; return the wave, which is dropped if it is empty then."""
        wave = self.open[story.labels]
        del wave.stories[story.event.key]
        if not wave.stories:
            del self.open[story.labels]
            self._schedule.drop(story.labels)
        return wave

    def forget_over(self) -> list[Story]:
        """Remove and return the stories that are over, before any wave is notified."""
        forgotten: list[Story] = []
        for wave in list(self.open.values()):
            for story in by_progress(wave.stories.values()).over:
                self.drop(story)
                forgotten.append(story)
        return forgotten

    def _begin(self, story: Story, now: float, notified: Standing) -> Wave:
        """Add the wave of a story that has none."""
        notified_at = 0.0
        if notified is Standing.NEW:
            notified_at = now
        wave = Wave(
            event_key=self._event_key(story, notified),
            notified=notified,
            notified_at=notified_at,
            number=DIGESTS_PER_STANDING * notified,  # the ids of its digests must not repeat
            nth=story.nth,
        )
        self.open[story.labels] = wave
        return wave

    def _event_key(self, story: Story, notified: Standing) -> str:
        """Return the key of a new wave.

        A group that begins again with the same event, which was over, gets another key.
        """
        if self._grouping.each_event and not story.shares_id:
            return story.event.key
        labels = "\n".join(story.labels)
        first_story = f"{story.event.key} {notified.name}"
        return WAVE + change_id(labels, "announced", first_story, story.nth)[:24]

    # ---- when a wave is due

    def _due(self, wave: Wave, standing: Standing, story: Story, now: float) -> float:
        """Return when a wave is due after a change of one of its stories."""
        grouping = self._grouping

        # a correction waits for others like it
        if story.late:
            return now + grouping.group_wait

        # with a wave for each event, nothing else can join it
        if grouping.each_event:
            if not story.awaits_reports:
                return now
            wait_ends = now + grouping.group_wait
            return min(wait_ends, wave.due or wait_ends)

        # the event with the NotBefore that people expect is over: others may end with it
        is_outdated = standing is not Standing.STARTED and _is_outdated(wave, now)
        if is_outdated and story.standing in OVER:
            return now + grouping.group_wait

        # people do not know of the wave, or expect a NotBefore that it no longer has
        if wave.notified is Standing.NEW or is_outdated:
            return self._soon(story, now)

        return self._due_again(wave, standing, story, now)

    def _due_again(self, wave: Wave, standing: Standing, story: Story, now: float) -> float:
        """Return when a wave is due that people know of."""
        # the first start is what people wait for
        if standing is Standing.STARTED and wave.notified is Standing.SCHEDULED:
            return now

        # the end waits, as the next VM's event may still come
        if standing in OVER:
            return now + self._grouping.group_interval

        # news that people cannot act on waits for the next digest
        digest = max(now, wave.notified_at + self._grouping.group_interval)
        if not _is_urgent(wave, story, now):
            return digest

        # urgent news also waits for the digest, if that leaves enough of the notice
        if digest - now <= _notice_left(story, now) / DIGEST_DIVISOR:
            return digest
        return min(self._soon(story, now), digest)

    def _soon(self, story: Story, now: float) -> float:
        """Return when news of a story is due that may wait for ``group_wait``."""
        longest = _notice_left(story, now) / NOTICE_DIVISOR
        return now + max(0.0, min(self._grouping.group_wait, longest))

    def _rests_until(self, wave: Wave) -> float:
        """Return until when more events may join a wave that was over before its notification."""
        if wave.notified is not Standing.NEW:
            return 0.0
        if wave.standing not in OVER or self._grouping.each_event:
            return 0.0

        last_heard = max(story.heard_at for story in wave.stories.values())
        latest = wave.notified_at + self._grouping.group_interval
        return min(last_heard + self._grouping.group_wait, latest)

    # ---- notifications

    def first_due(self) -> float:
        """Return when the next wave is due, in Unix seconds; infinite if none is."""
        return self._schedule.first()

    def notify_next(self, now: float) -> DueWave | None:
        """Return the wave that is due first, with its notification.

        ``None`` if none is due by ``now``. A wave that is over is removed from ``open``.
        """
        while True:
            labels = self._schedule.pop(now)
            if labels is None:
                return None

            wave = self.open[labels]
            rests_until = self._rests_until(wave)
            if rests_until > now:
                wave.due = rests_until
                self._schedule.put(labels, rests_until)
                continue

            notification = notify(wave)
            if wave.standing in OVER:
                del self.open[labels]
            return DueWave(wave, notification)


def _label(name: str, story: Story) -> str:
    """Return the value of a ``group_by`` name.

    It is a field of the event or of its place, or the value of the tag of ``tags.NAME``.
    """
    if name.startswith("tags."):
        tags = dict(story.place.tags)
        return tags.get(name.removeprefix("tags.").casefold(), "")
    if name == "event_id":
        return story.event.key
    if name.startswith("event_"):
        return getattr(story.event, name) or ""
    value: str = getattr(story.place, name)
    return value.casefold()


# ---- judging the news of a wave


def _is_outdated(wave: Wave, now: float) -> bool:
    """Whether people expect a NotBefore that no event to come still has."""
    # people know of no NotBefore: they were not notified, or it has started
    if wave.notified is not Standing.SCHEDULED or wave.notified_event is None:
        return False

    # no one is reminded of a NotBefore that is unknown, or has passed
    expected = wave.notified_event.not_before
    if expected is None or expected.timestamp() <= now:
        return False

    to_come = by_progress(wave.stories.values()).to_come
    return all(story.not_before != expected for story in to_come)


def _is_urgent(wave: Wave, story: Story, now: float) -> bool:
    """Whether a story is news that people can still prepare for."""
    # it has started, or is over: nothing is left to prepare for
    if story.standing is not Standing.SCHEDULED:
        return False

    # no notification has named the event
    notified_event = wave.notified_event
    if not story.named or notified_event is None:
        return True

    # it affects VMs that no notification has named for this event
    if story.joined:
        return True

    # it comes before what people expect
    if _is_earlier(story, notified_event.not_before, now):
        return True

    # it is more severe than what people expect
    return severity(story.event) < severity(notified_event)


def _is_earlier(story: Story, expected: datetime | None, now: float) -> bool:
    """Whether a story comes before an expected NotBefore."""
    if story.not_before is None:
        return False

    # people expect nothing that is still to come
    if expected is None or expected.timestamp() <= now:
        return True
    return story.not_before < expected


def _notice_left(story: Story, now: float) -> float:
    """Return the seconds until NotBefore, negative if it has passed; 0 if it is unknown."""
    if story.not_before is None:
        return 0.0
    return story.not_before.timestamp() - now


# ---- the routes of a wave


def matching_routes(vm: Vm, event: Event, routes: tuple[Route, ...]) -> str:
    """Return the numbers of the routes that match an event.

    Matchers that change with time do not count.
    """
    routed_vm = routable(vm)
    numbers: list[str] = []
    for number, route in enumerate(routes):
        match = route.match
        if not match.is_here(routed_vm) or not match.holds(event):
            continue
        numbers.append(str(number))
        if not (route.continues or match.change):
            break
    return " ".join(numbers)


def routable(vm: Vm) -> Vm:
    """Return the VM with an id, so that routes take an empty value for known, and do not match."""
    if not vm.subscription_id:
        return vm
    return replace(vm, vm_id="fleet")
