"""StoredState over a million distinct events: ``python benchmarks/changes.py [--events 1000000]``.

The core alone (diff, totals, samples), then the core with the store, on fewer changes, since each is a commit.
"""

import argparse
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from _machine import resident

from notbefore.core.clock import Instant
from notbefore.core.document import Document, Event
from notbefore.core.lifecycle import DiffResult, diff
from notbefore.core.record import Record
from notbefore.core.tracked import Observation, Tracked
from notbefore.metrics.families import Snapshot, samples
from notbefore.metrics.process import Figures
from notbefore.metrics.totals import Totals
from notbefore.store.state import Store
from notbefore.store.state_file import StoredChange, StoredState

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--stored", type=int, default=20_000)
    options = parser.parse_args()
    core(options.events)
    stored(options.stored)


def document(number: int) -> Document:
    """One event, another at each number."""
    event = Event(
        f"{number:032x}",
        f"Type{number % 1000}",
        "Scheduled",
        "VirtualMachine",
        ("WestNO_0",),
        BEGIN,
        "text",
        "Platform",
        5,
    )
    return Document(number, (event,))


def seen_by(tracked: Tracked, number: int) -> DiffResult:
    """What the document of this number changes, a second after the one before."""
    time = BEGIN + timedelta(seconds=number)
    return diff(tracked, document(number), Observation(Instant(time, date=time), "WestNO_0", 1.0))


def core(events: int) -> None:
    tracked, totals = Tracked(), Totals()
    seen, before, begun = 0, 0.0, time.perf_counter()
    for number in range(events):
        step = seen_by(tracked, number)
        tracked = step.tracked
        for change in step.changes:
            totals = totals.plus(change)
            Record.of(change, None).line()
        seen += len(step.changes)
        if number == min(5_000, events // 10):
            before = resident()
    series = sum(len(family.samples) for family in samples(Snapshot(tracked, totals, Figures(), BEGIN)))
    rate = seen / (time.perf_counter() - begun)
    grown = resident() - before
    print(f"core: {seen} changes of {events} distinct events: {grown:+.1f} MiB (bar 10), {series} series, {rate:.0f}/s")


def stored(changes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store, totals, tracked = Store(Path(directory)), Totals(), Tracked()
        before, begun, seen = 0.0, time.perf_counter(), 0
        for number in range(changes):
            step = seen_by(tracked, number)
            tracked = step.tracked
            for change in step.changes:
                totals = totals.plus(change)
            store.commit(
                StoredState(tracked, totals),
                [StoredChange(change, Record.of(change, None).line()) for change in step.changes],
            )
            seen += len(step.changes)
            if number == changes // 10:
                before = resident()
        rate = changes / (time.perf_counter() - begun)
        size = sum(part.stat().st_size for part in Path(directory).iterdir()) / 1024 / 1024
        grown = resident() - before
        print(
            f"store: {seen} changes, {changes} commits: {grown:+.1f} MiB, {rate:.0f} commits/s, {size:.1f} MiB on disk"
        )
        store.close()


if __name__ == "__main__":
    main()
