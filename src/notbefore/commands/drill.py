"""``notbefore drill``: an exercise through the real routes and sinks, to test that people are
reached.

Like a real change, it goes through the outbox and the courier of the agent that runs with this
configuration. It closes the alerts and incidents that it opens, even if no route would. If it is
killed, its deliveries expire.
"""

import argparse
import socket
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.agent.control_socket import ask_agent
from notbefore.agent.operations import ExerciseRequest, OutboxReply, OutboxRequest, Request
from notbefore.commands.options import (
    add_config_file,
    add_json,
    load_configuration,
    print_json,
    seconds,
    table,
)
from notbefore.config.model import Config
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery, deliveries
from notbefore.core.document import SCHEDULED, STARTED, USER, Document, Event
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.lifecycle import diff
from notbefore.core.record import Vm
from notbefore.core.routing import Route, Routing
from notbefore.core.tracked import Observation, Tracked
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.simulator.state import NAMED
from notbefore.store.file import StoredChange
from notbefore.wording.records import record_of

LOOK_INTERVAL: Final = 0.1  # seconds between two checks of the exercise's deliveries
# seconds after ``--wait`` until its deliveries expire, even if the drill was killed
SPARE: Final = 5.0
SCENARIOS: Final = {name: scenario.event_type for name, scenario in NAMED.items()}
UNENDED: Final = "its attempt has not ended, and may still be accepted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, the sink, the scenario, and the time to wait."""
    add_config_file(parser, "the YAML file that the running agent has read")
    parser.add_argument(
        "--sink", metavar="NAME", help="send to this sink only; the routes are ignored"
    )
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default="reboot",
        metavar="NAME",
        help=f"the kind of event (default reboot): {', '.join(SCENARIOS)}",
    )
    add_json(parser, "one JSON object")
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="the state directory of the agent, whatever the configuration says",
    )
    parser.add_argument(
        "--wait",
        default="30s",
        metavar="DURATION",
        help="for how long failed attempts are repeated (default 30s)",
    )


def run(options: argparse.Namespace) -> int:
    """Send the exercise; return 0 if every sink was reached. Raises ``NotBeforeError``."""
    if options.config is None:
        raise ConfigError("drill: expected CONFIG, the YAML file that the running agent has read")
    config = load_configuration(options, sending=False)
    patience = seconds("--wait", options.wait)
    routing = _routing(config, options.sink, patience + SPARE)
    vm = _vm(config)
    steps = [
        _step(change, routing, vm) for change in _changes(SCENARIOS[options.scenario], vm.name)
    ]
    # an incident stays open until its sink gets the event's end
    alerting = {name for name, terms in routing.sinks.items() if terms.keeps_incidents}
    *before, last = ({one.sink for one in step.deliveries} for step in steps)
    unclosed = sorted((set().union(*before) & alerting) - last)
    if unclosed:
        closing = Route(sinks=tuple(unclosed), announce_by="all")
        steps.append(_step(steps[-1].change, Routing((closing,), routing.sinks), vm))
    left = {one.delivery_id: one for one in _send(Path(config.state.dir), steps, patience)}

    sent = sorted((one for step in steps for one in step.deliveries), key=attrgetter("sink"))
    rows = [_row(config.sinks[one.sink].kind, one, left.get(one.delivery_id)) for one in sent]
    tried = {one.sink for one in sent}
    accepted = {(row["sink"], row["change"]) for row in rows if row["result"] == "delivered"}
    opened = accepted | {(row["sink"], row["change"]) for row in rows if row["error"] == UNENDED}
    missed = {one.sink for one in sent if (one.sink, one.kind) not in accepted}
    end = steps[-1].change
    report = {
        "event_id": end.event.event_id,
        "results": rows,
        "reached": sorted(tried - missed),
        "not_reached": sorted(missed),
        "without_route": sorted(config.sinks.keys() - tried) if options.sink is None else [],
        "closed_by_drill": unclosed,
        "still_open": sorted(
            {sink for sink, _ in opened if (sink, end.kind) not in accepted} & alerting
        ),
    }
    if options.json:
        print_json([report])
    else:
        _show(report)
    return 0 if rows and not missed else 1


def _routing(config: Config, sink: str | None, lasts: float) -> Routing:
    if not config.sinks:
        raise ConfigError("this configuration has no sink: nobody would be notified")
    # every step of an exercise is sent, even if the event is over
    own = {"expire_on_end": False, "expire_after": lasts}
    terms = {
        name: msgspec.structs.replace(one, **own) for name, one in config.routing.sinks.items()
    }
    if sink is None:
        return Routing(config.routes, terms)
    if sink not in config.sinks:
        raise ConfigError(f"--sink: there is no sink {sink!r} (known: {', '.join(config.sinks)})")
    return Routing((Route(sinks=(sink,), announce_by="all"),), terms)


def _vm(config: Config) -> Vm:
    known = (
        ask_agent(Path(config.state.dir), OutboxRequest("show", event_key=""), OutboxReply).vm
        or Vm()
    )
    name = known.name or config.vm.name or socket.gethostname()
    return msgspec.structs.replace(known, name=name, record_tags=config.records.tags)


def _changes(event_type: str, vm: str) -> list[Change]:
    """Return the changes of a made-up event on a VM, a second apart.

    It is announced, started and finished; an advice is announced and withdrawn.
    """
    now = datetime.now(UTC)
    notice = timedelta(seconds=EVENT_TYPES[event_type].promised_notice)
    is_advice = EVENT_TYPES[event_type].is_advice
    not_before = None if is_advice else (now + notice).replace(microsecond=0)
    event = Event(
        event_id=f"EXERCISE-{uuid.uuid4()}",
        event_type=event_type,
        event_status=SCHEDULED,
        resources=(vm,),
        not_before=not_before,
        description="Exercise: somebody runs `notbefore drill`.",
        event_source=USER,
        duration=EVENT_TYPES[event_type].drill_interruption,
    )
    started = msgspec.structs.replace(event, event_status=STARTED, not_before=None)
    documents = [Document(0, (event,)), Document(1, (started,)), Document(2, ())]
    if is_advice:
        documents.remove(documents[1])

    tracked = Tracked()
    changes: list[Change] = []
    for document in documents:
        at = now + timedelta(seconds=document.incarnation)
        result = diff(tracked, document, Observation(Instant(at, date=at), vm))
        tracked = result.tracked
        changes += result.changes
    return changes


def _send(state_dir: Path, steps: list[StoredChange], patience: float) -> list[Delivery]:
    """Let the agent send the steps, and repeat failed attempts for ``patience`` seconds.

    Return the unaccepted ones.

    Raises ``NotBeforeError`` if the result is not known.
    """
    end = steps[-1].change
    key, deadline = end.event.key, end.time.timestamp() + patience

    def ask(request: Request) -> OutboxReply:
        return ask_agent(state_dir, request, OutboxReply)

    reply = ask(ExerciseRequest(key, steps))
    lost = reply.lost
    # as long as an attempt will follow
    while any(
        row.state == "pending" and max(row.due + reply.shift, time.time()) <= deadline
        for row in reply.rows
    ):
        time.sleep(LOOK_INTERVAL)
        reply = ask(OutboxRequest("show", event_key=key))
    reply = ask(OutboxRequest("drop", event_key=key))
    if reply.lost != lost + reply.done:  # else what has left the outbox was accepted
        raise NotBeforeError(
            "it is not known who was reached: deliveries have left the outbox unsent meanwhile, by"
            " a reload, an operator, or for lack of room"
        )
    under_way = {row.delivery_id for row in ask(OutboxRequest("show", event_key=key)).rows}
    return [
        msgspec.structs.replace(row, error=UNENDED) if row.delivery_id in under_way else row
        for row in reply.rows
    ]


def _step(change: Change, routing: Routing, vm: Vm) -> StoredChange:
    line = record_of(change, vm, exercise=True).line()
    made = deliveries(change, line, routing, vm)
    # no reminders, and no fallback: a sink that fails is to be named, and nobody else to be woken
    # for it
    own = {"fallback": (), "fallback_at": None}
    return StoredChange(
        change,
        line,
        tuple(msgspec.structs.replace(one, **own) for one in made if one.kind == change.kind),
    )


def _row(kind: str, sent: Delivery, left: Delivery | None) -> dict[str, str]:
    """The result of one message to one sink."""
    result, error = "delivered", ""
    if left is not None:
        result, error = "refused" if left.state == "dead" else "failed", left.error
        if not error:
            result, error = "not sent", "no attempt was made"
    return {"sink": sent.sink, "kind": kind, "change": sent.kind, "result": result, "error": error}


def _show(report: dict[str, Any]) -> None:
    """Print the report for people."""
    if not report["results"]:
        sys.stdout.write("No route matches this event: nobody was notified.\n")
        return
    table(
        ("SINK", "KIND", "CHANGE", "RESULT", "ERROR"),
        [tuple(row.values()) for row in report["results"]],
    )
    closed = "real alerts stay open there. This exercise has closed its own."
    sentences = {
        "reached": "Reached: {}.",
        "not_reached": "NOT reached: {}.",
        "without_route": "No route sends this to: {}.",
        "closed_by_drill": f"No route sends the end of an event to {{}}: {closed}",
        "still_open": f"STILL OPEN: {{}}. Close the alert of {report['event_id']} there by hand.",
    }
    sys.stdout.writelines(
        f"\n{text.format(', '.join(report[key]))}\n"
        for key, text in sentences.items()
        if report[key]
    )
