"""``notbefore drill``: an exercise through the real routes and sinks, to test that the people are reached.

It goes through the outbox and the courier of the agent that runs with this configuration, as a real change does. What
it opens it closes again, also where the routes would not, and where Ctrl-C interrupts it. One that is killed leaves
open what it has opened.
"""

import argparse
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TextIO

import msgspec
from msgspec import Struct

from notbefore.agent.control_socket import ask_agent
from notbefore.agent.operations import ExerciseReply, ExerciseRequest
from notbefore.commands.options import add_json
from notbefore.commands.tables import print_json, table
from notbefore.config.load import load
from notbefore.config.model import Config
from notbefore.config.sinks import MessageSettings
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery, Routing, deliveries
from notbefore.core.document import (
    EVENT_TYPES,
    FREEZE,
    PROMISED,
    SCHEDULED,
    STARTED,
    USER,
    Document,
    Event,
)
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.outbox import GivenDelivery, SendResult
from notbefore.core.record import Record, Vm
from notbefore.core.routing import SEVERITIES, Match, Route, Severity
from notbefore.core.tracked import Observation, Tracked
from notbefore.courier.message import Message
from notbefore.courier.render import Renderer
from notbefore.errors import ConfigError, ImdsError
from notbefore.imds.client import ImdsClient
from notbefore.imds.identity import fetch_vm
from notbefore.store.store import ExerciseAttempt, StoredChange

LOOK_INTERVAL: Final = 0.1  # seconds between two looks at what has become of a step
NOT_SENT: Final = SendResult("", "returned", "nobody has tried to send it")
WORDS: Final = {  # by the outcome of the last attempt
    "accepted": "delivered",
    "failed": "failed",
    "refused": "refused",
    "returned": "not sent",
}
SCENARIOS: Final = {event_type.lower(): event_type for event_type in EVENT_TYPES}
FREEZE_SECONDS: Final = 9  # the interruption that Azure is made to expect of a Freeze; of the others it says none

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
        "--state-dir", metavar="DIR", help="the state directory of the agent, whatever the configuration says"
    )
    parser.add_argument(
        "--wait", default="30s", metavar="DURATION", help="for how long failed attempts are repeated (default 30s)"
    )


def run(options: argparse.Namespace) -> int:
    """Send the exercise; returns 0 if every sink was reached. Raises ``NotBeforeError``."""
    config = load(options.config, os.environ, {"state.dir": options.state_dir}, sending=False)
    routing = _routing(config, options.sink, options.severity)
    try:
        patience = Duration(options.wait).seconds
    except ValueError as error:
        raise ConfigError(f"--wait: {error}") from None
    vm = _vm(config)
    *steps, end = changes(options.scenario, vm.name, datetime.now(UTC), STEPS[options.change])
    exercise = Exercise(routing, vm, lambda request: ask_agent(Path(config.state.dir), request, ExerciseReply))
    exercise.ask(ExerciseRequest(end.event.key))  # no agent: nothing is begun
    try:
        for change in steps:
            exercise.send(change, patience)
    finally:
        if options.resolve:
            exercise.send(end, patience)
            exercise.close_alerts(end, patience)
        exercise.ask(ExerciseRequest(end.event.key, end=True))
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
    event_type = SCENARIOS[scenario]
    not_before = (now + timedelta(seconds=PROMISED[event_type])).replace(microsecond=0)
    event = Event(
        event_id=f"EXERCISE-{uuid.uuid4()}",
        event_type=event_type,
        event_status=SCHEDULED,
        resources=(vm,),
        not_before=not_before,
        description="Exercise: somebody runs `notbefore drill`.",
        event_source=USER,
        duration=FREEZE_SECONDS if event_type == FREEZE else None,
    )
    listings = {
        "scheduled": event,
        "moved": msgspec.structs.replace(event, not_before=not_before + timedelta(seconds=300)),
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


class Exercise:
    """An exercise through the outbox of the agent that answers ``ask``."""

    def __init__(self, routing: Routing, vm: Vm, ask: Callable[[ExerciseRequest], ExerciseReply]) -> None:
        self._routing = routing
        self._vm = vm
        self.ask = ask
        self.made: dict[tuple[str, str], Delivery] = {}  # by sink and kind
        self.attempts: tuple[ExerciseAttempt, ...] = ()
        self.unclosed: tuple[str, ...] = ()  # the sinks whose alerts no route closes

    def send(self, change: Change, patience: float, routing: Routing | None = None) -> None:
        """Deliver one change; failed attempts are repeated for ``patience`` seconds."""
        line = Record.of(change, self._vm, exercise=True).line()
        made = tuple(
            msgspec.structs.replace(one, patient=False)
            for one in deliveries(change, line, routing or self._routing, self._vm)
        )
        self.made |= {(one.sink, one.kind): one for one in made}
        reply = self.ask(ExerciseRequest(change.event.key, StoredChange(change, line, made)))
        ahead = max(0.0, change.time.timestamp() - time.time())  # the steps are a second apart
        deadline = time.monotonic() + ahead + patience
        while reply.due is not None and time.monotonic() + max(0.0, reply.due) <= deadline:
            time.sleep(LOOK_INTERVAL)
            reply = self.ask(ExerciseRequest(change.event.key))
        self.attempts = reply.attempts

    def close_alerts(self, end: Change, patience: float) -> None:
        """Send the end to the sinks that keep an alert of the event, and to which no route sends it."""
        tried = {one.sink for one in self.attempts if one.kind == end.kind}
        self.unclosed = tuple(sorted(self.open_alerts(end) - tried))
        if self.unclosed:
            terms = self._routing.sinks
            self.send(end, patience, Routing((Route(sinks=self.unclosed, announce_by="all"),), terms))

    def open_alerts(self, end: Change) -> set[str]:
        """The sinks that keep an alert of the event, accepted its beginning, and have not accepted its end."""
        accepted = [one for one in self.attempts if one.result.outcome == "accepted"]
        alerts = {one.sink for one in accepted if not self._routing.sinks[one.sink].approvals}
        return alerts - {one.sink for one in accepted if one.kind == end.kind}


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
        rows = _rows(exercise, config)
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


def _rows(exercise: Exercise, config: Config) -> list[DrillRow]:
    rows = []
    for (sink, kind), made in sorted(exercise.made.items(), key=lambda item: item[0][0]):
        attempts = [one for one in exercise.attempts if (one.sink, one.kind) == (sink, kind)]
        if kind == "reminder" and not attempts:  # it comes later, or never
            continue
        last = attempts[-1] if attempts else ExerciseAttempt(sink, made.kind, NOT_SENT, 0.0)
        row = DrillRow(
            sink=sink,
            kind=config.sinks[sink].kind,
            change=kind,
            result=WORDS[last.result.outcome],
            took_seconds=round(last.took, 3),
            attempts=len(attempts),
            error=last.result.error or (_trouble(made, config) if last.result.template_failed else ""),
        )
        rows.append(row)
    return rows


def _trouble(made: Delivery, config: Config) -> str:
    """Why the built-in text was sent instead of the user's template."""
    settings = config.sinks[made.sink].settings
    if not isinstance(settings, MessageSettings):
        return ""
    given = GivenDelivery(made.delivery_id, made.event_key, made.sink, made.kind, made.severity, made.record)
    why = Renderer(settings, config.messages)(Message.of(given)).trouble
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
