"""``PartitionFigures``: what is counted of the partitions, until somebody reads it."""

from collections import Counter
from typing import Final

import msgspec
from msgspec import Struct

RESULTS: Final = ("news", "known", "late", "beat", "skipped", "poison")
"""What a record was: it changed a story; it did not; its event is over; a sign of life; of no use here; unreadable."""


class PartitionFigures(Struct):
    """What was counted since the start, of all partitions that this instance has had."""

    records: Counter[str] = msgspec.field(default_factory=Counter)  # by RESULTS
    poison: Counter[str] = msgspec.field(default_factory=Counter)  # by reason
    errors: Counter[str] = msgspec.field(
        default_factory=Counter
    )  # by part: hub, store, history, or the program (`fold`)
    given_up: int = 0
    missing: int = 0  # records that were gone before they were read
    said: set[tuple[str, str]] = set()  # of which partition, and why, a record that is not used was logged
