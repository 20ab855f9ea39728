"""``Elsewhere``: the waves of other partitions that may continue in this one. Pure.

When partitions are added to the hub, the records of a VM may come to another partition. A wave then
continues there with the first record about one of its events, under the same event key.
"""

from collections.abc import Iterable, Mapping

from notbefore.fleet.snapshot import Snapshot
from notbefore.fleet.story import Story
from notbefore.fleet.wave import Wave, copied


class Elsewhere:
    """The waves that other partitions had when partitions were added.

    ``waves``: by event key, changed in place. ``open_events``: those of this partition, by
    ``Story.key``.
    """

    def __init__(self, waves: dict[str, Wave], open_events: Mapping[str, Story]) -> None:
        self._waves = waves
        self._open_events = open_events
        # the key of an event that is not open here -> the event key of its wave
        self._event_keys: dict[str, str] = {}

    def index(self) -> None:
        """Find the events of these waves that are not open here."""
        self._event_keys.clear()
        for event_key, wave in self._waves.items():
            for story in wave.stories.values():
                if story.key not in self._open_events:
                    self._event_keys[story.key] = event_key

    def expect(self, others: Iterable[Snapshot]) -> None:
        """Expect the waves that these partitions have, and no longer those expected before."""
        self._waves.clear()
        for other in others:
            for wave in copied(other.waves).values():
                self._waves[wave.event_key] = wave
        self.index()

    def add(self, wave: Wave) -> None:
        """Expect another wave; the caller must ``index`` again."""
        copy = copied({wave.labels: wave})
        self._waves[wave.event_key] = copy[wave.labels]

    def take(self, key: str) -> Wave | None:
        """Return the wave of an event, which continues here, and expect it no longer.

        Its stories are those of events that are not open here. ``None`` if no wave has the event.
        The caller must ``index`` again, once it has opened the events.
        """
        event_key = self._event_keys.get(key)
        if event_key is None:
            return None

        wave = self._waves.pop(event_key)
        for story in list(wave.stories.values()):
            if story.key in self._open_events:
                del wave.stories[story.event.key]  # its id is that of another event here
        return wave

    def forget(self, now: float, limit: float) -> None:
        """Forget the waves that no record here was about; ``limit``: see ``Story.deadline``."""
        for event_key, wave in list(self._waves.items()):
            if all(now > story.deadline(limit) for story in wave.stories.values()):
                del self._waves[event_key]
                self.index()
