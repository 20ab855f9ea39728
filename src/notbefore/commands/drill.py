"""``notbefore drill``: send an exercise through the real routes and sinks, to test them.

Like a real event, it goes through the outbox and the courier of the agent that runs with this
configuration. It closes the alerts and incidents that it opens, even if no route would. If it is
killed, its deliveries expire.
"""

import argparse
import socket
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from notbefore.commands.options import (
    add_config_file,
    add_json,
    load_configuration,
    print_json,
    seconds,
    table,
)
from notbefore.commands.samples import changes_of
from notbefore.config.model import Config
from notbefore.core.change import Change
from notbefore.core.delivery import Delivery, deliveries
from notbefore.core.document import SCHEDULED, STARTED, USER, Event
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.record import FleetFacts, Vm
from notbefore.core.routing import Route, Routing, Terms
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.process.control_socket import ask_agent
from notbefore.process.operations import ExerciseRequest, OutboxReply, OutboxRequest
from notbefore.simulator.state import NAMED
from notbefore.store.file import StoredChange
from notbefore.wording.records import record_of

LOOK_INTERVAL: Final = 0.1  # seconds between two checks of the exercise's deliveries
# seconds after ``--wait`` until its deliveries expire, even if the drill was killed
SPARE: Final = 5.0
# a drill plays an event to its end, so it has none that is canceled
SCENARIOS: Final = {
    name: scenario.event_type for name, scenario in NAMED.items() if not scenario.canceled_after
}
UNROUTED_END: Final = (
    "No route sends the end of an event to {}. A sink that has accepted a message of an event gets"
    " its end all the same, and so it got the end of this exercise."
)
VANISHED_VM: Final = (
    " But once a Preempt or a Terminate has deleted a VM, no other VM sends the end there."
)
UNENDED: Final = "its attempt did not end in time, and may be accepted after all"


class Source(Struct, frozen=True):
    """The sender of the exercise, and the VM that it is about."""

    name: str  # of the VM that the exercise affects
    vm: Vm  # in the records
    routed: Vm  # that routes match
    facts: FleetFacts | None = None  # of a fleet, before the exercise has started

    def facts_at(self, change: Change) -> FleetFacts | None:
        """Return the facts at a change of the exercise; ``None`` if no fleet sends it."""
        if self.facts is None:
            return None
        if change.outcome is not None:
            return replace(self.facts, fleet_over=1)
        if change.kind == "started":
            return replace(self.facts, fleet_under_way=1)
        return self.facts


class SinkResult(Struct, frozen=True):
    """The result of one message to one sink."""

    sink: str
    kind: str  # of the sink
    change: str
    result: Literal["delivered", "refused", "failed", "not sent"] = "delivered"
    error: str = ""


class DrillReport(Struct, frozen=True):
    """The result of an exercise; all but the results are names of sinks."""

    event_id: str
    results: list[SinkResult]
    reached: list[str]
    not_reached: list[str]
    without_route: list[str]
    closed_by_drill: list[str]  # no route sends the end of the event there
    still_open: list[str]  # a person has to close the alert or incident


def add_arguments(parser: argparse.ArgumentParser, owner: str = "the agent") -> None:
    """Add the configuration, the sink, the scenario, and the time to wait."""
    add_config_file(parser, f"the YAML file that {owner} has read")
    parser.add_argument(
        "--sink", metavar="NAME", help="send to this sink only, and ignore the routes"
    )
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default="reboot",
        metavar="NAME",
        help=f"the kind of event (default reboot): {', '.join(SCENARIOS)}",
    )
    add_json(parser, "print one JSON object")
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help=f"the state directory of {owner}, whatever the configuration says",
    )
    parser.add_argument(
        "--wait",
        default="30s",
        metavar="DURATION",
        help="how long to repeat failed attempts (default 30s)",
    )


def run(options: argparse.Namespace) -> int:
    """Send the exercise; return 0 if every sink was reached. Raises ``NotBeforeError``."""
    if options.config is None:
        raise ConfigError("drill: expected CONFIG, the YAML file that the running agent has read")
    config = load_configuration(options, sending=False)
    check_sink(config, options.sink)
    vm = _vm(config)
    return send_and_report(options, config, Source(name=vm.name, vm=vm, routed=vm))


def send_and_report(options: argparse.Namespace, config: Config, source: Source) -> int:
    """Send the exercise, and print its report; return 0 if every sink was reached.

    Raises ``NotBeforeError``.
    """
    patience = seconds("--wait", options.wait)
    routing = _routing(config, options.sink, patience + SPARE)

    changes = exercise_changes(SCENARIOS[options.scenario], source.name)
    end = changes[-1]
    steps = [_step(change, routing, source) for change in changes]
    unclosed = _unclosed_sinks(steps, routing)
    if unclosed:
        closing = Route(sinks=tuple(unclosed), announce_by="all")
        steps.append(_step(end, Routing((closing,), routing.sinks), source))
    unaccepted = _send(Path(config.state.dir), steps, patience)

    results = _results(config, steps, unaccepted)
    missed = {result.sink for result in results if result.result != "delivered"}
    without_route = config.sinks.keys() - {result.sink for result in results}
    if options.sink is not None:
        without_route = set()
    report = DrillReport(
        event_id=end.event.event_id,
        results=results,
        reached=sorted({result.sink for result in results} - missed),
        not_reached=sorted(missed),
        without_route=sorted(without_route),
        closed_by_drill=unclosed,
        still_open=_open_sinks(results, routing, end=end.kind),
    )
    if options.json:
        print_json([report])
    else:
        _print_report(report, source)

    if results and not missed:
        return 0
    return 1


def check_sink(config: Config, sink: str | None) -> None:
    """Raise ``ConfigError`` if the configuration has no sinks, or not the one that is given."""
    if not config.sinks:
        raise ConfigError(
            "this configuration has no sink, so no one would be notified: add one to `sinks`"
        )
    if sink is not None and sink not in config.sinks:
        raise ConfigError(f"--sink: there is no sink {sink!r} (known: {', '.join(config.sinks)})")


def _routing(config: Config, sink: str | None, seconds_to_live: float) -> Routing:
    """Return the routing of the exercise; all goes to ``sink``, if one is given."""
    terms: dict[str, Terms] = {}
    for name, configured in config.routing.sinks.items():
        # every step of an exercise is sent, even if the event is over
        terms[name] = replace(configured, expire_on_end=False, expire_after=seconds_to_live)
    if sink is None:
        return Routing(config.routes, terms)
    return Routing((Route(sinks=(sink,), announce_by="all"),), terms)


def _vm(config: Config) -> Vm:
    """Return the identity of this VM, as far as the agent knows it."""
    reply = ask_agent(Path(config.state.dir), OutboxRequest("show", event_key=""), OutboxReply)
    vm = reply.vm or Vm()
    name = vm.name or config.vm.name or socket.gethostname()
    return replace(vm, name=name, record_tags=config.records.tags)


def exercise_changes(event_type: str, vm: str) -> list[Change]:
    """Return the changes of a made-up event on a VM, a second apart.

    It is announced, started and finished; an advice is announced and withdrawn.
    """
    now = datetime.now(UTC)
    documented = EVENT_TYPES[event_type]
    not_before: datetime | None = None  # an advice has none
    if not documented.is_advice:
        notice = timedelta(seconds=documented.promised_notice)
        not_before = (now + notice).replace(microsecond=0)
    scheduled = Event(
        event_id=f"EXERCISE-{uuid.uuid4()}",
        event_type=event_type,
        event_status=SCHEDULED,
        resources=(vm,),
        not_before=not_before,
        description="Exercise: someone runs `notbefore drill`.",
        event_source=USER,
        duration=documented.drill_interruption,
    )
    started = replace(scheduled, event_status=STARTED, not_before=None)

    listings: list[tuple[Event, ...]] = [(scheduled,), (started,), ()]
    if documented.is_advice:
        listings = [(scheduled,), ()]

    return changes_of(listings, now, vm)


def _step(change: Change, routing: Routing, source: Source) -> StoredChange:
    """Return a change of the exercise with its deliveries.

    It has no reminders. It has no fallbacks, because a sink that fails is to be named, and no other
    sink is to be used for it.
    """
    line = record_of(change, source.vm, exercise=True, fleet=source.facts_at(change)).line()
    messages: list[Delivery] = []
    for delivery in deliveries(change, line, routing, source.routed):
        if delivery.kind == change.kind:
            messages.append(replace(delivery, fallback=(), fallback_at=None))
    return StoredChange(change, line, tuple(messages))


def _sinks_of(step: StoredChange) -> set[str]:
    return {delivery.sink for delivery in step.deliveries}


def _unclosed_sinks(steps: list[StoredChange], routing: Routing) -> list[str]:
    """Return the sinks in which the event would stay open: no route sends them the end."""
    *earlier_steps, last_step = steps
    notified: set[str] = set()
    for step in earlier_steps:
        notified |= _sinks_of(step)
    unclosed = notified - _sinks_of(last_step)
    return sorted(sink for sink in unclosed if routing.sinks[sink].needs_end)


class _ExerciseOutbox:
    """The deliveries of an exercise in the outbox of the running agent."""

    def __init__(self, state_dir: Path, event_key: str) -> None:
        self._state_dir = state_dir
        self._event_key = event_key
        self._lost_before = 0  # deliveries that had left the outbox unsent before the exercise
        self._dropped = 0  # deliveries of the exercise that were dropped here

    def send(self, steps: list[StoredChange]) -> OutboxReply:
        """Let the agent send the exercise; return its deliveries."""
        request = ExerciseRequest(self._event_key, steps)
        reply = ask_agent(self._state_dir, request, OutboxReply)
        self._lost_before = reply.lost
        return reply

    def show(self) -> OutboxReply:
        """Return the deliveries that are in the outbox."""
        request = OutboxRequest("show", event_key=self._event_key)
        return ask_agent(self._state_dir, request, OutboxReply)

    def drop(self) -> OutboxReply:
        """Drop all deliveries but those that the courier has; return those that were there."""
        request = OutboxRequest("drop", event_key=self._event_key)
        reply = ask_agent(self._state_dir, request, OutboxReply)
        self._dropped += reply.done
        return reply

    def has_lost_none(self, reply: OutboxReply) -> bool:
        """Whether every delivery that has left the outbox was accepted, or dropped here."""
        return reply.lost == self._lost_before + self._dropped


def _send(state_dir: Path, steps: list[StoredChange], patience: float) -> list[Delivery]:
    """Let the agent send the steps, and repeat failed attempts for ``patience`` seconds.

    Return the deliveries that were not accepted. Raises ``NotBeforeError`` if the result is not
    known.
    """
    end = steps[-1].change
    deadline = end.time.timestamp() + patience
    outbox = _ExerciseOutbox(state_dir, end.event.key)
    reply = outbox.send(steps)
    while _has_attempts_left(reply, deadline):
        time.sleep(LOOK_INTERVAL)
        reply = outbox.show()

    reply = outbox.drop()
    if not outbox.has_lost_none(reply):
        raise NotBeforeError(
            "it is not known who was reached: a reload, an operator or a lack of room has removed"
            " deliveries from the outbox meanwhile. Run the drill again"
        )
    unaccepted = {delivery.delivery_id: delivery for delivery in reply.rows}
    _wait_for_attempts(outbox, unaccepted, deadline + SPARE)
    return list(unaccepted.values())


def _wait_for_attempts(
    outbox: _ExerciseOutbox, unaccepted: dict[str, Delivery], expiry: float
) -> None:
    """Wait until ``expiry`` (Unix seconds) for the attempts that the courier is making.

    Remove from ``unaccepted`` the deliveries that are accepted meanwhile. An attempt that fails is
    not repeated.
    """
    under_way = _ids(outbox.show())
    for delivery_id in under_way:
        unaccepted[delivery_id] = replace(unaccepted[delivery_id], error=UNENDED)

    while under_way and time.time() < expiry:
        time.sleep(LOOK_INTERVAL)
        reply = outbox.drop()
        if outbox.has_lost_none(reply):
            for accepted in under_way - _ids(reply):
                del unaccepted[accepted]
        under_way = _ids(outbox.show())


def _ids(reply: OutboxReply) -> set[str]:
    return {delivery.delivery_id for delivery in reply.rows}


def _has_attempts_left(reply: OutboxReply, deadline: float) -> bool:
    """Whether an attempt follows before ``deadline``, in Unix seconds."""
    now = time.time()
    for delivery in reply.rows:
        next_attempt = max(now, delivery.due + reply.shift)
        if delivery.state == "pending" and next_attempt <= deadline:
            return True
    return False


def _results(
    config: Config, steps: list[StoredChange], unaccepted: list[Delivery]
) -> list[SinkResult]:
    """Return the result of each message, by sink and in the order of the steps."""
    unaccepted_by_id = {delivery.delivery_id: delivery for delivery in unaccepted}
    results: list[SinkResult] = []
    for step in steps:
        for sent in step.deliveries:
            kind = config.sinks[sent.sink].kind
            result = SinkResult(sink=sent.sink, kind=kind, change=sent.kind)
            unaccepted_delivery = unaccepted_by_id.get(sent.delivery_id)
            if unaccepted_delivery is not None:
                result = _failed(result, unaccepted_delivery)
            results.append(result)
    results.sort(key=_sink)
    return results


def _sink(result: SinkResult) -> str:
    return result.sink


def _failed(result: SinkResult, unaccepted: Delivery) -> SinkResult:
    """Return the result of a message that was not accepted."""
    if not unaccepted.error:
        return replace(result, result="not sent", error="no attempt was made")
    if unaccepted.state == "dead":
        return replace(result, result="refused", error=unaccepted.error)
    return replace(result, result="failed", error=unaccepted.error)


def _open_sinks(results: list[SinkResult], routing: Routing, end: str) -> list[str]:
    """Return the sinks in which the event stays open. ``end``: the change that closes it."""
    opened: set[str] = set()
    closed: set[str] = set()
    for result in results:
        if not routing.sinks[result.sink].needs_end:
            continue
        if result.result == "delivered" and result.change == end:
            closed.add(result.sink)
        elif result.result == "delivered" or result.error == UNENDED:
            opened.add(result.sink)
    return sorted(opened - closed)


def _print_report(report: DrillReport, source: Source) -> None:
    """Print the report for people."""
    if not report.results:
        sys.stdout.write("No route matches this event: no one was notified.\n")
        return
    rows = [
        (result.sink, result.kind, result.change, result.result, result.error)
        for result in report.results
    ]
    table(("SINK", "KIND", "CHANGE", "RESULT", "ERROR"), rows)
    _print_sinks("Reached: {}.", report.reached)
    _print_sinks("NOT reached: {}.", report.not_reached)
    _print_sinks("No route sends this to: {}.", report.without_route)
    unrouted_end = UNROUTED_END
    if source.facts is None:  # a fleet sends the end itself, whatever VMs exist
        unrouted_end += VANISHED_VM
    _print_sinks(unrouted_end, report.closed_by_drill)
    _print_sinks(
        f"STILL OPEN: {{}}. Close the alert of {report.event_id} there by hand.",
        report.still_open,
    )


def _print_sinks(sentence: str, sinks: list[str]) -> None:
    if sinks:
        sys.stdout.write(f"\n{sentence.format(', '.join(sinks))}\n")
