"""``notbefore drill``: an exercise through the real routes and sinks, to test that the people are reached.

It needs no agent, and does not touch the state of one: it has an outbox of its own, which is deleted at the end.
What it opens it closes again, also where the routes would not, and where somebody interrupts it.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TextIO

import msgspec
from msgspec import Struct

from notbefore.commands.options import add_json
from notbefore.commands.tables import print_json, table
from notbefore.config.load import load
from notbefore.config.model import Config
from notbefore.config.sinks import MessageSettings
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery, DeliveryResult, Routing, deliveries
from notbefore.core.document import SCHEDULED, STARTED, Document, Event
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.core.routing import SEVERITIES, Match, Route, Severity
from notbefore.core.tracked import Observation, Tracked
from notbefore.courier.main import Courier
from notbefore.courier.message import Message, Sink
from notbefore.courier.orders import Orders
from notbefore.courier.redact import Redactor, known_secrets
from notbefore.courier.render import Renderer
from notbefore.courier.sinks import make
from notbefore.errors import ConfigError, ImdsError
from notbefore.imds.client import ImdsClient
from notbefore.imds.identity import fetch_vm
from notbefore.logs import set_up
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME, StoredChange, StoredState

SCENARIOS: Final = {  # name -> event type, seconds of notice, expected interruption
    "freeze": ("Freeze", 900, 9),
    "reboot": ("Reboot", 900, None),
    "redeploy": ("Redeploy", 600, None),
    "preempt": ("Preempt", 30, None),
    "terminate": ("Terminate", 300, None),
}

STEPS: Final = {  # `--change` -> what the documents list, one after the other; the end comes after them
    None: ("scheduled", "started"),
    "announced": ("scheduled",),
    "updated": ("scheduled", "moved"),
    "started": ("started",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and what to exercise."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file that names the sinks")
    parser.add_argument("--sink", metavar="NAME", help="send to this sink only; the routes are ignored")
    parser.add_argument("--scenario", choices=SCENARIOS, default="reboot", help="the kind of event (default reboot)")
    parser.add_argument(
        "--change",
        choices=[name for name in STEPS if name is not None],
        help="the last change before the end: announced, updated or started (default: announced, then started)",
    )
    parser.add_argument(
        "--resolve",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end the event, so that what it opened is closed (default); --no-resolve leaves it open",
    )
    parser.add_argument(
        "--severity", choices=SEVERITIES, help="the severity of the messages, instead of that of the routes"
    )
    add_json(parser, "one JSON object")
    parser.add_argument(
        "--wait", default="30s", metavar="DURATION", help="for how long failed attempts are repeated (default 30s)"
    )


def run(options: argparse.Namespace) -> int:
    """Send the exercise; returns 0 if every sink was reached. Raises ``ConfigError``."""
    config = load(options.config, os.environ, {})
    routing = _routing(config, options.sink, options.severity)
    try:
        patience = Duration(options.wait).seconds
    except ValueError as error:
        raise ConfigError(f"--wait: {error}") from None
    redact = Redactor(known_secrets(config.sinks))
    set_up("text", "critical", redact)  # errors are shown in the table
    vm = _vm(config)
    *steps, end = changes(options.scenario, vm.name, datetime.now(UTC), STEPS[options.change])
    with tempfile.TemporaryDirectory() as directory:
        exercise = Exercise(config, routing, vm, Path(directory), redact)
        try:
            for change in steps:
                exercise.send(change, patience)
        finally:
            with closing(exercise):
                if options.resolve:
                    exercise.send(end, patience)
                    exercise.close_alerts(end, patience)
        report = DrillReport.of(exercise, config, end, routed=options.sink is None)
    if options.json:
        print_json([report], sys.stdout)
    else:
        show(report, sys.stdout)
    return 0 if report.results and not report.not_reached and not (report.still_open and options.resolve) else 1


def _routing(config: Config, sink: str | None, severity: Severity | None) -> Routing:
    if not config.sinks:
        raise ConfigError("there is no sink in this configuration: nobody would be notified")
    # every step of an exercise is sent, also when the event is over already
    terms = {name: msgspec.structs.replace(one, expire_on_end=False) for name, one in config.routing.sinks.items()}
    if sink is None:
        routes = config.routes or (Route(Match(scope=("self",)), tuple(config.sinks)),)
        return Routing(tuple(msgspec.structs.replace(one, severity=severity or one.severity) for one in routes), terms)
    if sink not in config.sinks:
        raise ConfigError(f"--sink: there is no sink {sink!r} (known: {', '.join(config.sinks)})")
    return Routing((Route(sinks=(sink,), announce_by="all", severity=severity),), terms)


def _vm(config: Config) -> Vm:
    client = ImdsClient(config.imds.endpoint)
    try:
        known = fetch_vm(client)
    except ImdsError:
        known = Vm()
    finally:
        client.close()
    name = config.vm.name or known.name or socket.gethostname()
    return msgspec.structs.replace(known, name=name, record_tags=config.records.tags)


def changes(scenario: str, vm: str, now: datetime, steps: tuple[str, ...] = STEPS[None]) -> list[Change]:
    """Return the changes of a made-up event on the VM named ``vm``: a change for each of ``steps``, and its end."""
    event_type, notice, duration = SCENARIOS[scenario]
    not_before = (now + timedelta(seconds=notice)).replace(microsecond=0)
    event = Event(
        event_id=f"EXERCISE-{uuid.uuid4()}",
        event_type=event_type,
        event_status=SCHEDULED,
        resources=(vm,),
        not_before=not_before,
        description="Exercise: somebody runs `notbefore drill`.",
        event_source="User",
        duration=duration,
    )
    listings = {
        "scheduled": event,
        "moved": msgspec.structs.replace(
            event, not_before=(now + timedelta(seconds=notice + 300)).replace(microsecond=0)
        ),
        "started": msgspec.structs.replace(event, event_status=STARTED, not_before=None),
    }
    tracked, found = Tracked(), list[Change]()
    for number, listed in enumerate((*((listings[name],) for name in steps), ())):
        step = diff(
            tracked,
            Document(number, listed),
            Observation(Instant(now + timedelta(seconds=number), date=now + timedelta(seconds=number)), vm),
        )
        tracked = step.tracked
        found += step.changes
    return found


class Result(Struct, frozen=True):
    """One attempt at one delivery; ``took`` in seconds."""

    delivery: Delivery
    settled: DeliveryResult
    took: float


class RecordingOutbox:
    """The outbox, which also notes the result of each attempt."""

    def __init__(self, outbox: Outbox) -> None:
        self.results: list[Result] = []
        self._outbox = outbox
        self._leased: dict[str, tuple[Delivery, float]] = {}
        self.release_leases = outbox.release_leases
        self.sinks_with_work = outbox.sinks_with_work

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """See ``Outbox.exchange``."""
        for result in turn.results:
            delivery, since = self._leased[result.delivery_id]
            self.results.append(Result(delivery, result, result.time - since))
        leased = self._outbox.exchange(turn)
        self._leased |= {one.delivery_id: (one, time.time()) for one in leased}
        return leased


class Exercise:
    """An outbox of its own, and a courier in this process."""

    def __init__(self, config: Config, routing: Routing, vm: Vm, directory: Path, redact: Redactor) -> None:
        self._routing = routing
        self._vm = vm
        self._redact = redact
        self._store = Store(directory)
        self._outbox = Outbox(directory / FILE_NAME)
        self._recording = RecordingOutbox(self._outbox)
        self.unclosed: tuple[str, ...] = ()  # the sinks whose alerts no route closes
        # linger=0: the courier ends as soon as nothing is due
        self._orders = Orders(
            str(directory / FILE_NAME), config.sinks, config.messages, hidden=config.hidden, patient=False, linger=0.0
        )

    def send(self, change: Change, patience: float, routing: Routing | None = None) -> None:
        """Deliver one change; failed attempts are repeated for ``patience`` seconds."""
        line = Record.of(change, self._vm, exercise=True).line()
        self._store.commit(
            StoredState(), [StoredChange(change, line, deliveries(change, line, routing or self._routing, self._vm))]
        )
        ahead = max(0.0, change.time.timestamp() - time.time())  # the steps are a second apart
        deadline = time.monotonic() + ahead + patience
        while (due := self._outbox.next_due()) is not None:
            wait = due - time.time()
            if time.monotonic() + wait > deadline:
                return
            time.sleep(max(0.0, wait))
            with closing(Courier(self._recording, self._orders, self._make, self._redact)) as courier:
                courier.run()

    def close_alerts(self, end: Change, patience: float) -> None:
        """Send the end to the sinks that keep an alert of the event, and to which no route sends it."""
        tried = {one.delivery.sink for one in self.results if one.delivery.kind == end.kind}
        self.unclosed = tuple(sorted(self.open_alerts(end) - tried))
        if self.unclosed:
            terms = self._routing.sinks
            self.send(end, patience, Routing((Route(sinks=self.unclosed, announce_by="all"),), terms))

    def open_alerts(self, end: Change) -> set[str]:
        """The sinks that keep an alert of the event, accepted its beginning, and have not accepted its end."""
        accepted = [one for one in self.results if one.settled.result == "delivered"]
        alerts = {one.delivery.sink for one in accepted if not self._routing.sinks[one.delivery.sink].approvals}
        return alerts - {one.delivery.sink for one in accepted if one.delivery.kind == end.kind}

    def _make(self, name: str) -> Sink:
        return make(name, self._orders.sinks[name], self._orders.messages)

    @property
    def results(self) -> list[Result]:
        """The result of each attempt, in order."""
        return self._recording.results

    def close(self) -> None:
        """Close the files."""
        with closing(self._outbox):
            self._store.close()


class DrillRow(Struct, frozen=True):
    """What came of one message at one sink; ``took_seconds`` is for the last attempt."""

    sink: str
    kind: str
    change: str
    result: str
    took_seconds: float
    attempts: int
    error: str


class DrillReport(Struct, frozen=True):
    """What ``drill --json`` prints; the lists are names of sinks."""

    event_id: str
    results: list[DrillRow]
    reached: list[str]
    not_reached: list[str]
    without_route: list[str]  # no route sends this to them
    closed_by_drill: list[str]  # no route sends the end of an event to them
    still_open: list[str]  # they keep an alert, which somebody has to close

    @classmethod
    def of(cls, exercise: Exercise, config: Config, end: Change, *, routed: bool) -> "DrillReport":
        """What the exercise showed; ``routed``: it went by the routes, and not to one sink."""
        rows = _rows(exercise.results, config)
        missed = {row.sink for row in rows if row.result != "delivered"}
        tried = {row.sink for row in rows}
        return cls(
            event_id=end.event.event_id,
            results=rows,
            reached=sorted(tried - missed),
            not_reached=sorted(missed),
            without_route=sorted(config.sinks.keys() - tried) if routed else [],
            closed_by_drill=list(exercise.unclosed),
            still_open=sorted(exercise.open_alerts(end)),
        )


def _rows(results: list[Result], config: Config) -> list[DrillRow]:
    last: dict[tuple[str, str], tuple[Result, int]] = {}
    for result in results:
        key = (result.delivery.sink, result.delivery.kind)
        last[key] = (result, last.get(key, (result, 0))[1] + 1)
    words = {"delivered": "delivered", "retry": "failed", "dead": "refused"}
    return [
        DrillRow(
            sink=sink,
            kind=config.sinks[sink].kind,
            change=kind,
            result=words[result.settled.result],
            took_seconds=round(result.took, 3),
            attempts=attempts,
            error=result.settled.error or _fallback(result, config),
        )
        for (sink, kind), (result, attempts) in sorted(last.items(), key=lambda item: item[0][0])
    ]


def _fallback(result: Result, config: Config) -> str:
    """Why the built-in text was sent instead of the user's template; empty where the template worked."""
    settings = config.sinks[result.delivery.sink].settings
    if not result.settled.fallback or not isinstance(settings, MessageSettings):
        return ""
    why = Renderer(settings, config.messages).trouble(Message.of(result.delivery))
    return f"the template failed ({why}): the built-in text was sent"


def show(report: DrillReport, out: TextIO) -> None:
    """Print the report for people."""
    if not report.results:
        out.write("No route matches this event: nobody was notified.\n")
        return
    rows = [
        (row.sink, row.kind, row.change, row.result, f"{row.took_seconds:.2f}s", str(row.attempts), row.error)
        for row in report.results
    ]
    table(("SINK", "KIND", "CHANGE", "RESULT", "TOOK", "ATTEMPTS", "ERROR"), rows, out)
    sentences = (
        ("Reached: {}.", report.reached),
        ("NOT reached: {}.", report.not_reached),
        ("No route sends this to: {}.", report.without_route),
        (
            "No route sends the end of an event to {}: what is opened there stays open. This exercise has closed it.",
            report.closed_by_drill,
        ),
        (f"STILL OPEN: {{}}. Close the alert of {report.event_id} there by hand.", report.still_open),
    )
    out.writelines(f"\n{text.format(', '.join(names))}\n" for text, names in sentences if names)
