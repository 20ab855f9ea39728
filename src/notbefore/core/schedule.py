"""``Schedule``: what is next, by time and then by how urgent it is. Pure."""

from bisect import bisect_left, insort
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=str | tuple[str, ...])
Urgency = tuple[int, bool, float, int]  # the smallest is the most urgent


class Schedule(Generic[K]):
    """Keys, each with a time, and how urgent it is from then on; what was ``put`` last of a key counts."""

    def __init__(self) -> None:
        self._later: list[tuple[float, Urgency, K]] = []  # sorted, as the next one is
        self._ready: list[tuple[Urgency, float, K]] = []
        self._places: dict[K, tuple[list[Any], Any]] = {}  # of each key: the list that it is in, and as what

    def put(self, key: K, time: float, urgency: Urgency = (0, False, 0.0, 0)) -> None:
        """From this time on it is ready."""
        self.drop(key)
        self._add(key, self._later, (time, urgency, key))

    def drop(self, key: K) -> None:
        """Forget a key, if it is there."""
        if key in self._places:
            queue, entry = self._places.pop(key)
            del queue[bisect_left(queue, entry)]

    def pop(self, now: float) -> K | None:
        """Take the most urgent key that is ready; ``None``: there is none."""
        while self._later and self._later[0][0] <= now:
            time, urgency, key = self._later.pop(0)
            self._add(key, self._ready, (urgency, time, key))
        if not self._ready:
            return None
        found = self._ready[0][2]
        self.drop(found)
        return found

    def first(self) -> float | None:
        """When a key is ready next, or has been since; ``None``: there is none."""
        if self._ready:
            return self._ready[0][1]
        return self._later[0][0] if self._later else None

    def _add(self, key: K, queue: list[Any], entry: Any) -> None:
        insort(queue, entry)
        self._places[key] = queue, entry
