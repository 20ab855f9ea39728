"""False reports about the lives of events: ``python benchmarks/lives.py [--lives N] [--agents N]``.

Real agents watch events of a simulated IMDS. They are killed, stopped and frozen, and IMDS fails.
At the end, each record of their history is compared with what really happened.

Printed: the number of false reports, of unknown outcomes, and of those among them whose start was
reported. Exits with 1 unless the first and the last are 0. ``--lives 1000`` takes some ten minutes.

``tests/integration/test_truth.py`` tests the same across a boot.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final, NamedTuple

from _machine import Imds, describe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.azure import STARTED, body, item

AT_ONCE: Final = 25  # events that one IMDS lists
BATCH_EVERY: Final = 50.0  # seconds between two batches of ``AT_ONCE`` events
SHORTEST_START: Final = 30.0  # seconds for which Azure lists a started event, at least
WATCHED: Final = 16.0  # seconds by which an event may be seen late, and still counts as seen
SLACK: Final = 2.0  # seconds: ``Date`` and NotBefore count whole ones
NOISE: Final = 1.5  # seconds for which the machine itself may delay a process
STOP_PATIENCE: Final = 60.0  # seconds
SHOWN: Final = 20  # false reports
PREFIX: Final = "azure.scheduled_event."
VM: Final = "vm-0"
TYPES: Final = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
RESOURCES: Final = ([VM], [VM, "vm-1"], ["vm-1"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    dice = random.Random(options.seed)
    begin = time.time() + 3
    lives_of_each = -(-options.lives // options.agents)  # rounded up
    print(describe())
    print(f"{lives_of_each * options.agents} lives, {options.agents} agents, seed {options.seed}")
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.agents) as pool:
        trials: list[Trial] = []
        for number in range(options.agents):
            lives = planned_lives(lives_of_each, dice, begin)
            state = Path(directory, str(number))
            trials.append(Trial(state, lives, random.Random(dice.random())))
        histories = list(pool.map(Trial.run, trials))

    total = Verdict()
    for trial, history in zip(trials, histories, strict=True):
        total.add(trial, history)
    print(
        f"{total.reports} reports, {total.ends} of an end: {len(total.false)} false (limit: 0),"
        f" {total.unknown} outcomes unknown, {total.unknown_after_start} of them although the"
        " start was reported (limit: 0)"
    )
    for report in total.false[:SHOWN]:
        print("FALSE", report)
    sys.exit(bool(total.false or total.unknown_after_start))


# ---- the plan


@dataclass(frozen=True)
class Life:
    """What really happens to one event; times in Unix seconds."""

    event_id: str
    event_type: str
    resources: list[str]
    announced: float
    not_before: float
    starts: float | None  # ``None``: it is canceled
    ends: float

    def has_started(self, when: float) -> bool:
        return self.starts is not None and self.starts <= when

    def item(self, now: float) -> dict[str, Any]:
        """Return the event as Azure lists it."""
        event = item(
            self.event_id, EventType=self.event_type, Resources=self.resources, DurationInSeconds=-1
        )
        if self.has_started(now):
            return event | STARTED
        return event | {"NotBefore": formatdate(self.not_before, usegmt=True)}


def planned_lives(count: int, dice: random.Random, begin: float) -> list[Life]:
    """Plan the lives of the events of one agent, in batches."""
    lives: list[Life] = []
    for number in range(count):
        batch = number // AT_ONCE
        announced = begin + batch * BATCH_EVERY + dice.uniform(0, 20)
        lives.append(planned_life(number, dice, announced))
    return lives


def planned_life(number: int, dice: random.Random, announced: float) -> Life:
    """Plan a life that Azure may give an event."""
    notice = dice.uniform(4, 20)
    not_before = float(int(announced + notice) + 1)
    possible_starts = {
        "on time": not_before + 0.2,
        "early": announced + dice.uniform(1, notice),
        "at once": announced,
        "canceled": None,
    }
    course = dice.choice(["on time", "on time", "early", "at once", "canceled"])
    starts = possible_starts[course]
    if starts is None:
        ends = announced + dice.uniform(1, notice)
    else:
        ends = starts + dice.uniform(SHORTEST_START, SHORTEST_START + 15)
    return Life(
        event_id=f"life-{number}",
        event_type=dice.choice(TYPES),
        resources=dice.choice(RESOURCES),
        announced=announced,
        not_before=not_before,
        starts=starts,
        ends=ends,
    )


# ---- the agents


class Period(NamedTuple):
    """A period in Unix seconds."""

    begin: float
    end: float


class Trial:
    """Runs one agent after another on one state directory, and disturbs them and their IMDS."""

    def __init__(self, state: Path, lives: list[Life], dice: random.Random) -> None:
        self.lives = lives
        self._dice = dice
        self._fails_until = 0.0  # IMDS answers 500
        self._is_unreadable_until = 0.0  # a field of each event cannot be read
        self.pauses: list[Period] = []  # in which no agent ran, or it was frozen
        self.freezes: list[Period] = []  # the pauses that an agent survived
        self._state = state
        self._imds = Imds(VM, self._document)
        self._process = self._start()

    def run(self) -> list[dict[str, Any]]:
        """Disturb the agents until all events have ended; return the history."""
        disturbances: list[Callable[[], None]] = [
            self._stop_agent,
            self._kill_agent,
            self._freeze,
            self._freeze,
            self._let_imds_fail,
            self._let_imds_be_unreadable,
            self._do_nothing,
        ]
        end = max(life.ends for life in self.lives) + 2
        while time.time() < end:
            disturb = self._dice.choice(disturbances)
            disturb()
            time.sleep(self._dice.uniform(0.5, 6))
        self._fails_until = 0.0
        time.sleep(3)
        self._end(signal.SIGTERM)
        self._imds.close()
        return self._history()

    def _history(self) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self._state / "notbefore.db")) as database:
            rows = database.execute("SELECT record FROM history ORDER BY seq")
            return [json.loads(record) for (record,) in rows]

    def _document(self) -> bytes | None:
        """Return what IMDS lists now; ``None``: it answers 500."""
        now = time.time()
        if now < self._fails_until:
            return None
        items = [life.item(now) for life in self.lives if life.announced <= now < life.ends]
        if now < self._is_unreadable_until:
            items = [{**event, "Resources": 17} for event in items]

        # each beginning, start and end counts, even if several happen between two polls
        incarnation = 0
        for life in self.lives:
            for moment in (life.announced, life.starts, life.ends):
                if moment is not None and moment <= now:
                    incarnation += 1
        return body(*items, incarnation=incarnation)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "notbefore", "run"]
        command += ["--imds", self._imds.url]
        command += ["--listen", "127.0.0.1:0"]
        command += ["--state-dir", str(self._state)]
        variables = {"NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "error"}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | variables)

    def _end(self, number: int) -> None:
        """End the agent by a signal."""
        self._process.send_signal(number)
        self._process.wait(STOP_PATIENCE)

    # ---- disturbances

    def _stop_agent(self) -> None:
        self._restart(signal.SIGTERM)

    def _kill_agent(self) -> None:
        self._restart(signal.SIGKILL)

    def _restart(self, number: int) -> None:
        """End the agent by a signal, and start it again after a while."""
        begin = time.time()
        self._end(number)
        time.sleep(self._dice.choice([0.0, 0.5, 3.0, 8.0, 20.0]))
        self._process = self._start()
        time.sleep(1)
        self.pauses.append(Period(begin, time.time()))

    def _freeze(self) -> None:
        """Stop the process for a while; sometimes its first polls afterwards fail."""
        begin = time.time()
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.5, 9))
        if self._dice.random() < 0.5:
            self._fails_until = time.time() + 0.5
        self._process.send_signal(signal.SIGCONT)
        freeze = Period(begin, time.time())
        self.freezes.append(freeze)
        self.pauses.append(freeze)

    def _let_imds_fail(self) -> None:
        self._fails_until = time.time() + self._dice.choice([0.5, 2.0, 8.0, 25.0])

    def _let_imds_be_unreadable(self) -> None:
        self._is_unreadable_until = time.time() + 0.5

    def _do_nothing(self) -> None:
        pass


# ---- the verdict


class Verdict:
    """Counts reports, and collects the false ones."""

    def __init__(self) -> None:
        self.reports = 0
        self.ends = 0
        self.unknown = 0  # events
        self.unknown_after_start = 0
        self.false: list[str] = []  # in words, with the record

    def add(self, trial: Trial, history: list[dict[str, Any]]) -> None:
        """Judge the history of a trial."""
        lives = {life.event_id: life for life in trial.lives}
        longest_pause = max((pause.end - pause.begin for pause in trial.pauses), default=0.0)
        unknown: set[str] = set()
        started: set[str] = set()
        for record in history:
            report = Report(record)
            life = lives[report.event_id]
            freeze = longest_freeze(life, trial.freezes)
            for mistake in mistakes(report, life, longest_pause, freeze):
                self.false.append(f"{mistake}: {json.dumps(record)}")

            self.reports += 1
            if report.outcome is not None:
                self.ends += 1
            if report.outcome == "unknown":
                unknown.add(report.event_id)
            if report.change == "started":
                started.add(report.event_id)
        self.unknown += len(unknown)
        self.unknown_after_start += len(unknown & started)


class Report:
    """A record of the history."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record
        self.event_id: str = record[f"{PREFIX}id"]
        self.change: str = record[f"{PREFIX}change"]
        self.outcome: str | None = self.get("outcome")
        self.time = datetime.fromisoformat(record["time"]).timestamp()

    def get(self, name: str) -> Any:
        """Return a field of the event, or ``None``."""
        return self._record.get(f"{PREFIX}{name}")

    @property
    def first_seen(self) -> float:
        """When the event was first seen, in Unix seconds."""
        return datetime.fromisoformat(self.get("first_seen")).timestamp()


def longest_freeze(life: Life, freezes: list[Period]) -> float:
    """Return the seconds of the longest freeze in which an event started or was started."""
    longest = 0.0
    for freeze in freezes:
        is_listed = life.announced < freeze.begin and freeze.end < life.ends
        if life.starts is not None and life.starts < freeze.end and is_listed:
            longest = max(longest, freeze.end - max(freeze.begin, life.starts))
    return longest


def mistakes(report: Report, life: Life, longest_pause: float, freeze: float) -> Iterator[str]:
    """Yield what is not true of a report.

    ``longest_pause``: of all agents of the trial. ``freeze``: see ``longest_freeze``.
    """
    has_started = life.has_started(report.time)
    if report.change in ("started", "finished") and not has_started:
        yield "it has not started"
    if report.outcome == "finished" and not has_started:
        yield "it has not finished"
    if report.change == "canceled" and life.starts is not None:
        yield "it was not canceled"
    if report.change in ("canceled", "finished", "ended") and report.time < life.ends - 0.1:
        yield "it has not ended"
    # an update is true if it was not readable at first whom the event affects
    if report.change == "updated" and report.get("previous_scope") != "unknown":
        yield "nothing was updated"
    scope = "self" if VM in life.resources else "peer"
    if report.get("scope") not in (scope, "unknown"):
        yield "the scope is wrong"
    yield from mistakes_of_interruption(report.get("interruption_seconds"), longest_pause, freeze)
    yield from mistakes_of_durations(report, life)
    yield from mistakes_of_notice(report, life)


def mistakes_of_interruption(
    interruption: float | None, longest_pause: float, freeze: float
) -> Iterator[str]:
    if interruption is None:
        return
    if not 0 <= interruption <= longest_pause + NOISE:
        yield f"interruption {interruption} s, the longest pause is {longest_pause:.1f} s"
    if interruption < freeze - NOISE:
        yield f"interruption {interruption} s in a freeze of {freeze:.1f} s"


def mistakes_of_durations(report: Report, life: Life) -> Iterator[str]:
    scheduled = report.get("scheduled_seconds")
    if scheduled is not None:
        duration = (life.starts or life.ends) - life.announced
        if scheduled < 0 or abs(scheduled - duration) > WATCHED:
            yield f"scheduled for {scheduled} s, not {duration:.1f} s"

    started = report.get("started_seconds")
    if started is not None:
        if life.starts is None:
            yield f"started for {started} s, but it never started"
        elif started < 0 or abs(started - (life.ends - life.starts)) > WATCHED:
            yield f"started for {started} s, not {life.ends - life.starts:.1f} s"


def mistakes_of_notice(report: Report, life: Life) -> Iterator[str]:
    notice = report.get("notice_seconds")
    if notice is None:
        return
    first_seen = report.first_seen
    expected = 0.0
    if life.starts != life.announced:
        expected = max(0.0, life.not_before - first_seen)
    had_started_when_seen = notice == 0 and life.has_started(first_seen)
    if abs(notice - expected) > SLACK and not had_started_when_seen:
        yield f"notice {notice} s, not {expected:.1f} s"
    if first_seen - life.announced > WATCHED:
        yield f"notice of an event that was seen {first_seen - life.announced:.1f} s late"


if __name__ == "__main__":
    main()
