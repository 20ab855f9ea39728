"""``Room``: how many events may be open, so that what one VM invents costs no other VM's event anything. Pure."""

from collections import Counter
from typing import Final

MAX_OPEN: Final = 20_000  # events that are open
MAX_OPEN_OF_GROUP: Final = 5_000  # of them in one resource group, whose VMs can report what they like of each other
MAX_OPEN_OF_ONE: Final = 1_000  # of them reported by one VM first
NAMES_OF_ONE: Final = 4_096  # characters of affected VMs' names: an event with more of them counts as several


class Room:
    """Counts the open events of a partition: in all, by group, and by the VM that reported them first."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def take(self, sender: str, more: int) -> bool:
        """Count an event, or what it has become more or less; ``False``: there is no room, and nothing was counted."""
        subscription, group, _ = sender.split("/", 2)
        whose = {"": MAX_OPEN, f"{subscription}/{group}/": MAX_OPEN_OF_GROUP, sender: MAX_OPEN_OF_ONE}
        if more > 0 and any(self._taken[one] + more > bound for one, bound in whose.items()):
            return False
        for one in whose:
            self._taken[one] += more
            if not self._taken[one]:
                del self._taken[one]
        return True


def weight(resources: tuple[str, ...]) -> int:
    """As how many open events one counts that affects these VMs."""
    return 1 + sum(map(len, resources)) // NAMES_OF_ONE
