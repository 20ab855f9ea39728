"""``PartitionFigures``: what is counted of the partitions, until somebody reads it."""

from collections import Counter
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.fleet.hub_records import Poison

RESULTS: Final = ("news", "known", "late", "beat", "skipped", "poison")
"""What a record was: it changed a story; it did not; its event is over; a sign of life; of no use here; unreadable."""


class Unread(Struct, frozen=True):
    """A record that could not be used, and where it is in the hub."""

    partition: str
    sequence: int
    poison: Poison


class PartitionFigures(Struct):
    """What was counted since the start, of all partitions that this instance has had."""

    records: Counter[str] = msgspec.field(default_factory=Counter)  # by RESULTS
    poison: Counter[str] = msgspec.field(default_factory=Counter)  # by reason
    given_up: int = 0
    missing: int = 0  # records that were gone before they were read
    unread: list[Unread] = []  # until somebody logs them
    failures: list[Exception] = []  # errors that nobody foresaw, until somebody logs them
