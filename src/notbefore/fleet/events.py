"""``Events``: which events of a partition are open, and what a report does to them. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from notbefore.core.document import VANISHING
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_records import PartitionFigures, Poison, Report
from notbefore.fleet.snapshot import Closed, Snapshot
from notbefore.fleet.story import CANCELED, ENDED, NEW, OVER, STARTED, STRENGTH, Story, from_unix
from notbefore.fleet.waves import Grouping, Waves

CLOSED_SECONDS: Final = 86_400.0  # how long an event that is over is remembered: for late and repeated records
MAX_CLOSED: Final = 20_000
MAX_WAITING: Final = 5_000  # events that wait for the disk of the history; what is over then is not in it
MAX_OPEN: Final = 20_000  # events that are open
MAX_OPEN_OF_GROUP: Final = 5_000  # of them in one resource group, whose VMs can report what they like of each other
MAX_OPEN_OF_ONE: Final = 1_000  # of them reported by one VM first
NAMES_OF_ONE: Final = 4_096  # characters of affected VMs' names: an event with more of them counts as several


class Events:
    """``state`` has what is kept of them, and the VMs that have sent signs of life."""

    def __init__(self, grouping: Grouping, state: Snapshot, figures: PartitionFigures) -> None:
        self.waves = Waves(grouping, state.waves)
        self.open: dict[str, Story] = {}  # by resource group and EventId
        self.past = state.past
        self._closed = state.closed
        self._vanished = state.vanished
        self._heard = state.heard
        self._limit = grouping.over_after
        self._figures = figures
        self._taken: Counter[str] = Counter()  # open events: in all, by group, and by the VM that reported them first
        self._by_id: dict[str, str] = {}  # EventId -> the key of the first event that has it
        for wave in state.waves:
            for story in wave.stories.values():
                self._keep(story.key, story)
        for key, closed in self._closed.items():
            self._by_id.setdefault(closed.event_key, key)

    def report(self, report: Report, now: float) -> str | Poison:
        """Take in a report; returns what it was: see ``RESULTS``."""
        key = report.group + report.event_id.casefold()
        story = self.open.get(key)
        if story is not None and story.standing in OVER and report.reason == "came_back":
            self._close(story, now)  # the id is another event's now; its wave may go on
            story = None
        if story is None:
            return self._begin(key, report, now)
        if story.began is not None and report.time < story.began:
            return "late"  # of the event before
        before = _weight(story.event.resources)
        if _weight(report.resources) > before and self._is_full(story.sender):
            return Poison("too_many", f"VMs of open events of {story.sender}")
        story.heard_at = now
        news = story.add(report)
        self._count(story.sender, _weight(story.event.resources) - before)
        if news:
            if not story.by_affected:
                self._locate(story)
            self.waves.note(story, now)
        return "news" if news else "known"

    def listed(self, group: str, event_ids: Iterable[str], now: float) -> None:
        """A VM lists these events: they are not over."""
        for event_id in event_ids:
            if (story := self.open.get(group + event_id.casefold())) is not None:
                story.heard_at = now

    def _begin(self, key: str, report: Report, now: float) -> str | Poison:
        """A report of an event that is not open."""
        closed = self._closed.get(key)
        if closed is not None and not _reopens(closed, report):
            return "late"
        story, notified = Story.begin(report), NEW
        if self._is_full(story.sender):
            return Poison("too_many", f"open events of {story.sender}")
        story.heard_at = now
        if closed is not None:
            if report.reason == "came_back":
                story.nth, story.began = closed.nth + 1, min(report.time, from_unix(now))
            else:
                story.nth = closed.nth
                notified, story.late = closed.standing, report.time.timestamp() <= closed.at
            del self._closed[key]
        self._keep(key, story)
        story.add(report)
        self._locate(story)
        self.waves.note(story, now, notified)
        return "news"

    def _keep(self, key: str, story: Story) -> None:
        self.open[key] = story
        self._count(story.sender, _weight(story.event.resources))
        story.shares_id = self._by_id.setdefault(story.event.key, key) != key

    def _is_full(self, sender: str) -> bool:
        """There is no room for more: what one VM invents costs no other VM's event anything."""
        bounds = zip(_owners(sender), (MAX_OPEN, MAX_OPEN_OF_GROUP, MAX_OPEN_OF_ONE), strict=True)
        return any(self._taken[one] >= bound for one, bound in bounds)

    def _count(self, sender: str, more: int) -> None:
        for one in _owners(sender):
            self._taken[one] += more
            if not self._taken[one]:
                del self._taken[one]

    def _locate(self, story: Story) -> None:
        """The affected VMs are where their heartbeats say, whoever reports the event first."""
        for name in story.vms:
            if (heard := self._heard.get(name)) is not None:
                story.locate(heard.place, affected=True)

    def look(self, now: float) -> Iterator[None]:
        """End what is long overdue, and forget what is long over. Others may have their turn at each step."""
        for story in list(self.open.values()):
            if not story.given_up and now > story.deadline(self._limit):
                before = story.standing
                story.give_up()
                if story.standing is not before:
                    self._figures.given_up += 1
                    self.waves.note(story, now)
                    yield
        for vm in [vm for vm, at in self._vanished.items() if now - at >= CLOSED_SECONDS]:
            del self._vanished[vm]
        for key, one in list(self._closed.items()):
            if now - one.at <= CLOSED_SECONDS and len(self._closed) <= MAX_CLOSED:
                break
            del self._closed[key]
            if self._by_id.get(one.event_key) == key:
                del self._by_id[one.event_key]

    def is_gone(self, vm: str) -> bool:
        """A Preempt or a Terminate of the VM is over, and it has not come back."""
        at, heard = self._vanished.get(vm), self._heard.get(vm)
        return at is not None and (heard is None or heard.at <= at + heard.interval)

    def explained(self, now: float) -> set[str]:
        """The VMs that an event affects which has started, or was due to."""
        return {
            vm
            for story in self.open.values()
            if story.standing is STARTED or (story.not_before and story.not_before.timestamp() < now)
            for vm in story.vms
        }

    def close(self, stories: Iterable[Story], now: float) -> None:
        """These are over, unless they came back, in another wave."""
        for story in stories:
            if self.open.get(story.key) is story:
                self._close(story, now)

    def _close(self, story: Story, now: float) -> None:
        del self.open[story.key]
        self._count(story.sender, -_weight(story.event.resources))
        if len(self.past) < MAX_WAITING:  # who writes them deletes what is written, the first ones
            self.past.append(PastEvent.closed_at(now, story))
        if story.event.event_type in VANISHING and story.standing is not CANCELED:
            self._vanished |= dict.fromkeys(story.vms, now)
        self._closed[story.key] = Closed(story.event.key, story.standing, now, story.nth, story.over or from_unix(now))


def _owners(sender: str) -> tuple[str, str, str]:
    """Whose bounds an event counts for: everybody's, those of the group, and of the VM that reported it first."""
    subscription, group, _ = sender.split("/", 2)
    return "", f"{subscription}/{group}/", sender


def _weight(resources: tuple[str, ...]) -> int:
    """As how many open events one counts that affects these VMs."""
    return 1 + sum(map(len, resources)) // NAMES_OF_ONE


def _reopens(closed: Closed, report: Report) -> bool:
    """What looked canceled was not; how it ended was not known; or the EventId was listed again, as another event."""
    if report.reason == "came_back":
        return report.time > closed.over
    return closed.standing in (CANCELED, ENDED) and STRENGTH[report.change] > closed.standing
