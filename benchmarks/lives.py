"""What real agents claim of the lives of events, while they are killed, stopped, frozen and booted, and IMDS fails.

Plays an IMDS of its own, starts the installed command, disturbs it, and holds each record of the history against what
really happened. Prints how many reports were false (the bar is 0), and how many outcomes unknown.
`python benchmarks/lives.py --lives 1000` takes some ten minutes.
"""

import argparse
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

AT_ONCE = 25  # events listed by one IMDS
SHORTEST_START = 30.0  # seconds that Azure keeps a started event listed, at least
WATCHED = 16.0  # seconds by which a sight may be late and still count as seen
SLACK = 2.0  # seconds: ``Date`` and NotBefore count whole ones
NOISE = 1.5  # seconds for which the machine itself may hold up a process
PREFIX = "azure.scheduled_event."
NAME = "vm-0"


@dataclass
class Life:
    """One event as it really is; times in Unix seconds."""

    event_id: str
    event_type: str
    resources: list[str]
    announced: float
    not_before: float
    starts: float | None  # None: it is canceled
    ends: float

    def item(self, now: float) -> dict[str, Any] | None:
        """As Azure lists it at ``now``; None: not."""
        if not self.announced <= now < self.ends:
            return None
        started = self.starts is not None and now >= self.starts
        return {
            "EventId": self.event_id,
            "EventStatus": "Started" if started else "Scheduled",
            "EventType": self.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": self.resources,
            "NotBefore": "" if started else format_datetime(datetime.fromtimestamp(self.not_before, UTC), usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }


def planned(number: int, chance: random.Random, begins: float) -> Life:
    """A life that Azure may give an event."""
    notice = chance.uniform(4, 20)
    due = float(int(begins + notice) + 1)
    fate = chance.choice(["on time", "on time", "early", "at once", "canceled"])
    starts: float | None = due + 0.2
    if fate == "early":
        starts = begins + chance.uniform(1, notice)
    elif fate == "at once":
        starts = begins
    elif fate == "canceled":
        starts = None
    ends = (
        starts + chance.uniform(SHORTEST_START, SHORTEST_START + 15) if starts else begins + chance.uniform(1, notice)
    )
    types = ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
    resources = chance.choice([[NAME], [NAME, "vm-1"], ["vm-1"]])
    return Life(f"life-{number}", chance.choice(types), resources, begins, due, starts, ends)


@dataclass
class Azure:
    """One IMDS, and what it says."""

    lives: list[Life]
    away_until: float = 0.0
    spoilt_until: float = 0.0  # a field of each event cannot be read
    lock: threading.Lock = field(default_factory=threading.Lock)

    def document(self) -> bytes:
        """What is listed now."""
        now = time.time()
        with self.lock:
            items = [item for one in self.lives if (item := one.item(now)) is not None]
            # each beginning, start and end is a step of its own, however seldom somebody asks
            steps = (moment for one in self.lives for moment in (one.announced, one.starts, one.ends))
            incarnation = sum(moment is not None and moment <= now for moment in steps)
            if now < self.spoilt_until:
                items = [{**one, "Resources": 17} for one in items]
            return json.dumps({"DocumentIncarnation": incarnation, "Events": items}).encode()

    def serve(self) -> ThreadingHTTPServer:
        """Serve it at a port of its own, on loopback."""
        azure = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if time.time() < azure.away_until:
                    self.send_error(500)
                    return
                identity = {"compute": {"name": NAME, "vmId": "0-0-0"}}
                is_identity = self.path.startswith("/metadata/instance")
                body = json.dumps(identity).encode() if is_identity else azure.document()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(ConnectionError):  # the agent was killed while it asked
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


class Subject:
    """One agent after another on one state directory, and what is done to them."""

    def __init__(self, directory: Path, azure: Azure, chance: random.Random) -> None:
        self.directory, self.azure, self.chance = directory, azure, chance
        self.server = azure.serve()
        self.pauses: list[tuple[float, float]] = []  # in which the agent did not run, in Unix seconds
        self.done: dict[str, int] = {}
        config = directory / "agent.yml"
        port = self.server.server_address[1]
        config.write_text(
            f"imds: {{endpoint: 'http://127.0.0.1:{port}', interval: 200ms}}\n"
            f"server: {{listen: '127.0.0.1:0'}}\nstate: {{dir: '{directory}/state'}}\nlog: {{level: error}}\n"
        )
        self.command = [str(Path(sys.executable).with_name("notbefore")), "run", str(config)]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """An agent."""
        return subprocess.Popen(self.command, stdout=subprocess.DEVNULL)

    def end(self, number: int) -> None:
        """End the agent by a signal."""
        self.process.send_signal(number)
        self.process.wait(60)

    def disturb(self) -> None:
        """One thing that may happen."""
        what = self.chance.choice(["kill", "stop", "freeze", "freeze", "away", "boot", "spoil", "nothing"])
        self.done[what] = self.done.get(what, 0) + 1
        begin = time.time()
        if what in ("kill", "stop", "boot"):
            self.end(signal.SIGTERM if what == "stop" or self.chance.random() < 0.5 else signal.SIGKILL)
            time.sleep(self.chance.choice([0.0, 0.5, 3.0, 8.0, 20.0]))
            if what == "boot":
                self.boot_another()
            self.process = self.start()
            time.sleep(1)
        elif what == "freeze":
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.5, 9))
            self.process.send_signal(signal.SIGCONT)
        elif what == "away":
            self.azure.away_until = time.time() + self.chance.choice([0.5, 2.0, 8.0, 25.0])
        elif what == "spoil":
            self.azure.spoilt_until = time.time() + 0.5
        if what in ("kill", "stop", "boot", "freeze"):
            self.pauses.append((begin, time.time()))

    def boot_another(self) -> None:
        """What lies on the disk is of another boot."""
        path = self.directory / "state" / "notbefore.db"
        if not path.exists():  # it was killed before it had begun
            return
        with closing(sqlite3.connect(path)) as db, db:
            for key in ("seen", "last_running"):
                for (stored,) in db.execute("SELECT body FROM meta WHERE key = ?", (key,)).fetchall():
                    instant = msgspec.msgpack.decode(stored)
                    if instant is not None:
                        changed = msgspec.msgpack.encode(instant | {"boot": f"another {time.time()}"})
                        db.execute("UPDATE meta SET body = ? WHERE key = ?", (changed, key))

    def run(self, until: float) -> None:
        """Disturb it until then, and let it see the end of everything."""
        while time.time() < until:
            self.disturb()
            time.sleep(self.chance.uniform(0.5, 6))
        self.azure.away_until = 0.0
        time.sleep(3)
        self.end(signal.SIGTERM)
        self.server.shutdown()

    def records(self) -> list[dict[str, Any]]:
        """The history, as the last agent left it."""
        with closing(sqlite3.connect(self.directory / "state" / "notbefore.db")) as db:
            return [json.loads(record) for (record,) in db.execute("SELECT record FROM history ORDER BY seq")]


def troubles(record: dict[str, Any], life: Life, subject: Subject) -> list[str]:
    """What is not true of a record."""
    get = {name.removeprefix(PREFIX): value for name, value in record.items()}.get
    kind, seen = get("change"), datetime.fromisoformat(record["time"]).timestamp()
    first = datetime.fromisoformat(str(get("first_seen"))).timestamp()
    started = life.starts is not None and life.starts <= seen
    wrong = {
        "it has not started": kind in ("started", "finished") and not started,
        "it has not finished": get("outcome") == "finished" and not started,
        "it was not canceled": kind == "canceled" and life.starts is not None,
        "it is not over": kind in ("canceled", "finished", "ended") and seen < life.ends - 0.1,
        # whom it affects may have been unreadable at first
        "nothing was updated": kind == "updated" and get("previous_scope") != "unknown",
        "the scope is wrong": get("scope") not in ("self" if NAME in life.resources else "peer", "unknown"),
    }
    return [words for words, is_wrong in wrong.items() if is_wrong] + wrong_durations(get, life, subject, first)


def wrong_durations(get: Any, life: Life, subject: Subject, first: float) -> list[str]:
    """Which durations of a record are not true; ``first`` is when the event was seen first."""
    found = []
    for name, begin, end in (
        ("scheduled", life.announced, life.starts or life.ends),
        ("started", life.starts, life.ends),
    ):
        value = get(f"{name}_seconds")
        if value is not None and (begin is None or value < 0 or abs(value - (end - begin)) > WATCHED):
            found.append(f"{name} {value}")
    notice = get("notice_seconds")
    if notice is not None:
        expected = max(0.0, life.not_before - first) if life.starts != life.announced else 0.0
        if abs(notice - expected) > SLACK and not (notice == 0 and life.starts is not None and life.starts <= first):
            found.append(f"notice {notice}, not {expected}")
        if first - life.announced > WATCHED:
            found.append(f"notice of an event that was seen {first - life.announced:.1f} s late")
    interruption = get("interruption_seconds")
    if interruption is not None:
        longest = max((end - begin for begin, end in subject.pauses), default=0.0)
        if not 0 <= interruption <= longest + NOISE:
            found.append(f"interruption {interruption}, at most {longest:.1f}")
    return found


def judge(subject: Subject) -> tuple[int, int, int, list[str]]:
    """Reports, unknown outcomes, outcomes that were known to be certain, and what is false."""
    lives = {one.event_id: one for one in subject.azure.lives}
    false, unknown, timid, started = [], 0, 0, set[str]()
    records = subject.records()
    for record in records:
        key = record[PREFIX + "id"]
        false += [f"{key}: {words}: {json.dumps(record)}" for words in troubles(record, lives[key], subject)]
        if record[PREFIX + "change"] == "started":
            started.add(key)
        if record.get(PREFIX + "outcome") == "unknown":
            unknown += 1
            timid += key in started
    return len(records), unknown, timid, false


def main() -> None:
    """Run as many lives as asked for, spread over the agents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, begin = random.Random(options.seed), time.time()
    share = -(-options.lives // options.agents)
    waves = -(-share // AT_ONCE)
    with tempfile.TemporaryDirectory() as directory:
        subjects, threads = [], []
        for number in range(options.agents):
            place = Path(directory) / str(number)
            place.mkdir()
            lives = [
                planned(one, chance, begin + 3 + one // AT_ONCE * 50 + chance.uniform(0, 20)) for one in range(share)
            ]
            subject = Subject(place, Azure(lives), random.Random(chance.random()))
            subjects.append(subject)
            until = max(one.ends for one in lives) + 2
            threads.append(threading.Thread(target=subject.run, args=(until,)))
        print(f"{share * options.agents} lives in {waves} waves, {options.agents} agents, seed {options.seed}")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reports = unknown = timid = 0
        false: list[str] = []
        for subject in subjects:
            found = judge(subject)
            reports, unknown, timid = reports + found[0], unknown + found[1], timid + found[2]
            false += found[3]
        done = {what: sum(subject.done.get(what, 0) for subject in subjects) for what in sorted(subjects[0].done)}
        ended = sum(len({r[PREFIX + "id"] for r in s.records() if r.get(PREFIX + "outcome")}) for s in subjects)
        print(f"done to them: {done}; {time.time() - begin:.0f} s")
        print(
            f"{reports} reports of {ended} ended events: {len(false)} false (bar 0), {unknown} outcomes unknown,",
            end=" ",
        )
        print(f"{timid} of them though the start was reported (bar 0)")
        for one in false[:20]:
            print("FALSE", one)
        sys.exit(1 if false or timid else 0)


if __name__ == "__main__":
    main()
