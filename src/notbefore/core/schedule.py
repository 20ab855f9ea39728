"""``Schedule``: what is next, by time and then by how urgent it is. Pure."""

import heapq
from typing import Generic, TypeVar

K = TypeVar("K", bound=str | tuple[str, ...])
Urgency = tuple[int, bool, float, int]  # the smallest is the most urgent
NONE: Urgency = (0, False, 0.0, 0)


class Schedule(Generic[K]):
    """Keys, each with a time, and how urgent it is from then on; what was ``put`` last of a key counts."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, Urgency]] = {}
        self._later: list[tuple[float, Urgency, K]] = []  # heaps; what differs from ``_entries`` is outdated
        self._ready: list[tuple[Urgency, float, K]] = []

    def put(self, key: K, time: float, urgency: Urgency = NONE) -> None:
        """From this time on it is ready."""
        if self._entries.get(key) != (time, urgency):
            self._entries[key] = time, urgency
            heapq.heappush(self._later, (time, urgency, key))
            if len(self._later) + len(self._ready) > 4 * len(self._entries) + 64:  # most of them are outdated
                self._ready, self._later = [], [(*entry, key) for key, entry in self._entries.items()]
                heapq.heapify(self._later)

    def drop(self, key: K) -> None:
        """Forget a key, if it is there."""
        self._entries.pop(key, None)

    def pop(self, now: float) -> K | None:
        """Take the most urgent key that is ready; ``None``: there is none."""
        while self._later and self._later[0][0] <= now:
            time, urgency, key = heapq.heappop(self._later)
            heapq.heappush(self._ready, (urgency, time, key))
        while self._ready:
            urgency, time, key = heapq.heappop(self._ready)
            if self._entries.get(key) == (time, urgency):
                del self._entries[key]
                return key
        return None

    def first(self) -> float | None:
        """When a key is ready next, or has been since; ``None``: there is none."""
        while self._ready:
            urgency, time, key = self._ready[0]
            if self._entries.get(key) == (time, urgency):
                return time
            heapq.heappop(self._ready)
        while self._later:
            time, urgency, key = self._later[0]
            if self._entries.get(key) == (time, urgency):
                return time
            heapq.heappop(self._later)
        return None
