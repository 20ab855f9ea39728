"""The fleet's figures: ``python benchmarks/fleet.py [--events 200] [--vms 100]``.

Changes a second: of the reading, of the merge, of the fold with both, and end to end of one instance through the
tests' Event Hub peer. Resident memory of that instance with its records read. Times depend on the load of the machine.
"""

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.change import LIFECYCLE_KINDS
from notbefore.core.record import Record
from notbefore.fleet.partition import Item, Partition
from notbefore.fleet.reading import Report, read
from notbefore.fleet.waves import Grouping
from support.agent import eventually
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import body, report, vm
from support.hub import Hub
from support.peers import HttpPeer

STEPS = [kind for kind in LIFECYCLE_KINDS if kind in {"announced", "started", "finished"}]
RESULTS = ("news", "known", "late")


def reports(events: int, vms: int) -> list[Record]:
    """Every VM of a scale set reports three steps of each event, which affects one of them; ten scale sets."""
    begin = datetime.now(UTC) - timedelta(seconds=events)
    sets = [[vm(f"set{number}_{one}", scale_set=f"set{number}") for one in range(vms)] for number in range(10)]
    return [
        report(who, step, f"E{event}", at=begin + timedelta(seconds=event), resources=[group[event % vms].name])
        for event in range(events)
        for group in (sets[event % len(sets)],)
        for step in STEPS
        for who in group
    ]


def rate(what: str, count: int, seconds: float) -> None:
    print(f"{what}: {count / seconds:,.0f} changes/s")


def pure(bodies: list[bytes]) -> None:
    """What the core takes in, in the time of this process alone."""
    begin = time.process_time()
    found = [one for one in map(read, bodies) if isinstance(one, Report)]
    rate("reading", len(found), time.process_time() - begin)
    fold = Partition("0", Grouping(), 3600, lambda *_: None)
    begin = time.process_time()
    for one in found:
        fold._report(one, 0.0)  # noqa: SLF001 - the merge without the reading
    rate("merge alone", len(found), time.process_time() - begin)
    fold = Partition("0", Grouping(), 3600, lambda *_: None)
    items = [Item(data, number, str(number), 1e9 + number / 1000) for number, data in enumerate(bodies)]
    begin = time.process_time()
    made = sum(1 for item in items for _ in fold.add(item))
    rate("fold", len(items), time.process_time() - begin)
    print(f"notifications: {made}")


def end_to_end(records: list[Record], directory: Path) -> None:
    """From the hub to the stories, with the hub's log full at the start."""
    with Hub(directory) as hub, HttpPeer() as hook:
        send(hub, records)
        begin = time.monotonic()
        with RunningFleet(configured(directory, hub, hook.url), directory / "state") as fleet:
            fleet.ready()

            def taken_in() -> bool:
                names = (f'notbefore_fleet_records_total{{result="{one}"}}' for one in RESULTS)
                return sum(fleet.metric(name) or 0.0 for name in names) >= len(records)

            eventually(taken_in, patience=600)
            seconds = time.monotonic() - begin
            status = Path(f"/proc/{fleet.process.pid}/status").read_text(encoding="ascii")
            used = sum(float(part) for part in _stat(fleet.process.pid))
            resident = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    rate("end to end, with the start of the instance", len(records), seconds)
    rate("end to end, by the instance's CPU time", len(records), used)
    print(f"resident: {int(resident) / 1024:.0f} MiB")


def _stat(process: int) -> list[float]:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return [int(field) / 100 for field in fields[11:13]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--vms", type=int, default=100, help="of each of ten scale sets")
    options = parser.parse_args()
    records = reports(options.events, options.vms)
    print(f"{len(records)} changes of {options.events} events")
    pure([body(one) for one in records])
    with tempfile.TemporaryDirectory() as directory:
        end_to_end(records, Path(directory))


if __name__ == "__main__":
    main()
