"""What real agents claim of the lives of events, while they are killed, stopped and frozen, and
IMDS fails.

Plays an IMDS, starts the installed command, disturbs it, and holds each record of the history
against what really happened. Prints how many reports were false (the bar is 0), and how many
outcomes unknown. What a boot does to them is in tests/integration/test_truth.py. `--lives 1000`
takes some ten minutes.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple

from _machine import Imds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.azure import STARTED, body, item

AT_ONCE = 25  # events listed by one IMDS
SHORTEST_START = 30.0  # seconds that Azure keeps a started event listed, at least
WATCHED = 16.0  # seconds by which a sight may be late and still count as seen
SLACK = 2.0  # seconds: ``Date`` and NotBefore count whole ones
NOISE = 1.5  # seconds for which the machine itself may hold up a process
PREFIX = "azure.scheduled_event."
NAME = "vm-0"
DISTURBANCES = ("kill", "stop", "freeze", "freeze", "away", "spoil", "nothing")


class Life(NamedTuple):
    """One event as it really is; times in Unix seconds."""

    event_id: str
    event_type: str
    resources: list[str]
    announced: float
    not_before: float
    starts: float | None  # None: it is canceled
    ends: float

    def item(self, now: float) -> dict[str, Any]:
        """As Azure lists it at ``now``."""
        started = self.starts is not None and now >= self.starts
        found = item(
            self.event_id, EventType=self.event_type, Resources=self.resources, DurationInSeconds=-1
        )
        return found | (
            STARTED if started else {"NotBefore": formatdate(self.not_before, usegmt=True)}
        )


def planned(number: int, chance: random.Random, begins: float) -> Life:
    """A life that Azure may give an event."""
    notice = chance.uniform(4, 20)
    due = float(int(begins + notice) + 1)
    starts = {
        "on time": due + 0.2,
        "early": begins + chance.uniform(1, notice),
        "at once": begins,
    }.get(chance.choice(["on time", "on time", "early", "at once", "canceled"]))
    ends = begins + chance.uniform(1, notice)
    if starts is not None:
        ends = starts + chance.uniform(SHORTEST_START, SHORTEST_START + 15)
    types = ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
    resources = chance.choice([[NAME], [NAME, "vm-1"], ["vm-1"]])
    return Life(f"life-{number}", chance.choice(types), resources, begins, due, starts, ends)


class Subject:
    """One agent after another on one state directory, its IMDS, and what is done to them."""

    def __init__(self, directory: Path, lives: list[Life], chance: random.Random) -> None:
        self.lives = lives
        self.chance = chance
        # IMDS answers 500; a field of each event cannot be read
        self.away_until = 0.0
        self.spoilt_until = 0.0
        self.pauses: list[
            tuple[float, float]
        ] = []  # in which the agent did not run, in Unix seconds
        # the same, of an agent that lived on
        self.freezes: list[tuple[float, float]] = []
        self.imds = Imds(NAME, self.document)
        self.file = directory / "notbefore.db"
        self.process = self.start()

    def document(self) -> bytes | None:
        """What is listed now."""
        now = time.time()
        if now < self.away_until:
            return None
        items = [life.item(now) for life in self.lives if life.announced <= now < life.ends]
        if now < self.spoilt_until:
            items = [{**listed, "Resources": 17} for listed in items]
        # each beginning, start and end is a step of its own, however seldom somebody asks
        incarnation = 0
        for life in self.lives:
            for moment in (life.announced, life.starts, life.ends):
                incarnation += moment is not None and moment <= now
        return body(*items, incarnation=incarnation)

    def start(self) -> subprocess.Popen[bytes]:
        """An agent."""
        command = [
            sys.executable,
            "-m",
            "notbefore",
            "run",
            "--imds",
            self.imds.url,
            "--listen",
            "127.0.0.1:0",
        ]
        variables = {"NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "error"}
        command += ["--state-dir", str(self.file.parent)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | variables)

    def end(self, number: int) -> None:
        """End the agent by a signal."""
        self.process.send_signal(number)
        self.process.wait(60)

    def disturb(self) -> None:
        """One thing that may happen."""
        what = self.chance.choice(DISTURBANCES)
        begin = time.time()
        if what in ("kill", "stop"):
            self.end(
                signal.SIGTERM if what == "stop" or self.chance.random() < 0.5 else signal.SIGKILL
            )
            time.sleep(self.chance.choice([0.0, 0.5, 3.0, 8.0, 20.0]))
            self.process = self.start()
            time.sleep(1)
        elif what == "freeze":
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.5, 9))
            if self.chance.random() < 0.5:  # the first polls after it fail
                self.away_until = time.time() + 0.5
            self.process.send_signal(signal.SIGCONT)
            self.freezes.append((begin, time.time()))
        elif what == "away":
            self.away_until = begin + self.chance.choice([0.5, 2.0, 8.0, 25.0])
        elif what == "spoil":
            self.spoilt_until = begin + 0.5
        if what in ("kill", "stop", "freeze"):
            self.pauses.append((begin, time.time()))

    def run(self) -> list[dict[str, Any]]:
        """Disturb it and let it see the end of everything.

        Returns the history, as the last agent left it.
        """
        until = max(life.ends for life in self.lives) + 2
        while time.time() < until:
            self.disturb()
            time.sleep(self.chance.uniform(0.5, 6))
        self.away_until = 0.0
        time.sleep(3)
        self.end(signal.SIGTERM)
        self.imds.close()
        with closing(sqlite3.connect(self.file)) as db:
            return [
                json.loads(record)
                for (record,) in db.execute("SELECT record FROM history ORDER BY seq")
            ]


def frozen(life: Life, freezes: list[tuple[float, float]]) -> float:
    """Seconds of the longest freeze in which an event started, or was Started all the time."""
    longest = 0.0
    for begin, end in freezes:
        has_started = life.starts is not None and life.starts < end
        if has_started and begin > life.announced and end < life.ends:
            longest = max(longest, end - max(begin, life.starts or begin))
    return longest


def troubles(
    record: dict[str, Any], life: Life, longest_pause: float, longest_freeze: float
) -> Iterator[str]:
    """What is not true of a record.

    ``longest_freeze``: see ``frozen``.
    """
    get = {name.removeprefix(PREFIX): value for name, value in record.items()}.get
    kind = get("change")
    seen = datetime.fromisoformat(record["time"]).timestamp()
    started = life.starts is not None and life.starts <= seen
    wrong = {
        "it has not started": kind in ("started", "finished") and not started,
        "it has not finished": get("outcome") == "finished" and not started,
        "it was not canceled": kind == "canceled" and life.starts is not None,
        "it is not over": kind in ("canceled", "finished", "ended") and seen < life.ends - 0.1,
        # whom it affects may have been unreadable at first
        "nothing was updated": kind == "updated" and get("previous_scope") != "unknown",
        "the scope is wrong": (
            get("scope") not in ("self" if NAME in life.resources else "peer", "unknown")
        ),
        "the interruption": not 0 <= (get("interruption_seconds") or 0) <= longest_pause + NOISE,
    }
    yield from (words for words, is_wrong in wrong.items() if is_wrong)
    interruption = get("interruption_seconds")
    if interruption is not None and interruption < longest_freeze - NOISE:
        yield f"interruption {interruption} in a freeze of {longest_freeze:.1f} s"
    for name, begin, end in (
        ("scheduled", life.announced, life.starts or life.ends),
        ("started", life.starts, life.ends),
    ):
        value = get(f"{name}_seconds")
        if value is not None and (
            begin is None or value < 0 or abs(value - (end - begin)) > WATCHED
        ):
            yield f"{name} {value}"
    if (notice := get("notice_seconds")) is not None:
        first = datetime.fromisoformat(str(get("first_seen"))).timestamp()
        expected = max(0.0, life.not_before - first) if life.starts != life.announced else 0.0
        if abs(notice - expected) > SLACK and not (
            notice == 0 and life.starts is not None and life.starts <= first
        ):
            yield f"notice {notice}, not {expected}"
        if first - life.announced > WATCHED:
            yield f"notice of an event that was seen {first - life.announced:.1f} s late"


def main() -> None:
    """Run as many lives as asked for, spread over the agents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    begin = time.time()
    share = -(-options.lives // options.agents)
    print(f"{share * options.agents} lives, {options.agents} agents, seed {options.seed}")
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.agents) as pool:
        subjects = []
        for number in range(options.agents):
            lives = [
                planned(one, chance, begin + 3 + one // AT_ONCE * 50 + chance.uniform(0, 20))
                for one in range(share)
            ]
            subjects.append(
                Subject(Path(directory, str(number)), lives, random.Random(chance.random()))
            )
        histories = list(pool.map(Subject.run, subjects))
    false = list[str]()
    timid = 0
    unknown = 0
    for subject, records in zip(subjects, histories, strict=True):
        by_id = {life.event_id: life for life in subject.lives}
        longest = max((end - begin for begin, end in subject.pauses), default=0.0)
        for record in records:
            life = by_id[record[PREFIX + "id"]]
            wrongs = troubles(record, life, longest, frozen(life, subject.freezes))
            false += [f"{words}: {json.dumps(record)}" for words in wrongs]
        uncertain = {
            record[PREFIX + "id"]
            for record in records
            if record.get(PREFIX + "outcome") == "unknown"
        }
        started = {
            record[PREFIX + "id"] for record in records if record[PREFIX + "change"] == "started"
        }
        timid = timid + len(uncertain & started)
        unknown = unknown + len(uncertain)
    whole = [record for records in histories for record in records]
    ended = sum(PREFIX + "outcome" in record for record in whole)
    print(
        f"{len(whole)} reports of {ended} ends: {len(false)} false (bar 0), {unknown} outcomes"
        " unknown,",
        end=" ",
    )
    print(f"{timid} of them though the start was reported (bar 0)")
    for report in false[:20]:
        print("FALSE", report)
    sys.exit(1 if false or timid else 0)


if __name__ == "__main__":
    main()
