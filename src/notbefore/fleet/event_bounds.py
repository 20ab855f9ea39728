"""``EventBounds``: how many events may be open in a partition. Pure.

What one VM invents takes no room from the events of other VMs.
"""

from collections import Counter
from typing import Final

from notbefore.fleet.story import Story

MAX_OPEN: Final = 20_000  # events that are open
MAX_OPEN_OF_GROUP: Final = 5_000  # of one resource group: its VMs can report anything of each other
MAX_OPEN_OF_ONE: Final = 1_000  # of one VM that reported them first
NAMES_OF_ONE: Final = 4_096  # characters of VMs' names that count as one more open event


class EventBounds:
    """The weights of the open events, and their limits."""

    def __init__(self) -> None:
        self._weights: Counter[str] = Counter()  # of the open events, by the names in ``_limits``

    def is_full(self, story: Story) -> bool:
        """Whether there is no room for one more event like this one."""
        return any(self._weights[name] >= limit for name, limit in _limits(story).items())

    def may_affect(self, story: Story, resources: tuple[str, ...]) -> bool:
        """Whether there is room for an open event to affect these VMs."""
        if _weight(resources) <= _weight(story.event.resources):
            return True
        return not self.is_full(story)

    def add(self, story: Story) -> None:
        """Count an event that was opened."""
        self._count(story, _weight(story.event.resources))

    def remove(self, story: Story) -> None:
        """Count an event no longer."""
        self._count(story, -_weight(story.event.resources))

    def resize(self, story: Story, resources_before: tuple[str, ...]) -> None:
        """Count the VMs of an open event instead of those that it affected before."""
        self._count(story, _weight(story.event.resources) - _weight(resources_before))

    def _count(self, story: Story, weight: int) -> None:
        for name in _limits(story):
            self._weights[name] += weight
            if not self._weights[name]:
                del self._weights[name]


def _limits(story: Story) -> dict[str, int]:
    """Return the limits for an event.

    They are those of the partition, of its resource group, and of the VM that reported it first.
    """
    limits = {"": MAX_OPEN, story.group: MAX_OPEN_OF_GROUP}
    if story.sender:
        limits[story.sender] = MAX_OPEN_OF_ONE
    return limits


def _weight(resources: tuple[str, ...]) -> int:
    """Return how many open events an event with these affected VMs counts as."""
    characters = sum(len(name) for name in resources)
    return 1 + characters // NAMES_OF_ONE
