"""``notbefore outbox``: list the waiting deliveries, send deliveries again, delete deliveries.

``list`` and ``show`` ask the agent over its socket, or with ``--url`` over HTTP. ``retry`` and
``drop`` use only the socket, because the HTTP interface changes nothing.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

import msgspec

from notbefore.agent.outbox_answer import DeliverySummary, OutboxAnswer, outbox_answer
from notbefore.commands.client import ADDRESS, AgentClient, add_address, agent_client
from notbefore.commands.options import (
    add_json,
    add_state,
    load_configuration,
    print_json,
    state_directory,
    table,
)
from notbefore.commands.owner import ask_owner
from notbefore.config.model import Config
from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.process.control_socket import listens
from notbefore.process.operations import OutboxReply, OutboxRequest

ACTIONS: Final = {
    "list": "show which deliveries wait, and why",
    "show": "show everything about some deliveries",
    "retry": "send deliveries again now: dead letters, or pending ones by their ids",
    "drop": "delete deliveries that were not sent",
}
READING: Final = ("list", "show")
SHORT_ID: Final = 8  # characters
PATH: Final = "/api/v1/outbox"
MAX_ERROR: Final = 80  # characters in a row of the table; `show` has all of it
HEAD: Final = (
    "ID",
    "STATE",
    "SINK",
    "CHANGE",
    "SEVERITY",
    "AGE",
    "DUE",
    "ATTEMPTS",
    "EVENT",
    "ERROR",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions, and the options that choose the agent and the deliveries."""
    add_actions(parser)


def add_actions(
    parser: argparse.ArgumentParser, owner: str = "the agent", *, over_http: bool = True
) -> None:
    """Add the actions, and the options that choose the owner of the outbox and the deliveries.

    ``over_http``: whether ``READING`` actions can ask it over HTTP.
    """
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        sentence = f"{text[0].upper()}{text[1:]}."
        action = actions.add_parser(name, help=text, description=sentence, allow_abbrev=False)
        action.set_defaults(ids=[], all=False, sink=None)
        add_state(action, owner)
        if not over_http:
            action.set_defaults(url=None)
        elif name in READING:
            add_address(action)
        else:
            for option in ADDRESS:  # to say why they are refused
                action.add_argument(option, help=argparse.SUPPRESS)
        if name != "show":
            action.add_argument("--sink", metavar="NAME", help="only deliveries to this sink")
        if name == "list":
            add_json(action)
            continue
        several = "*"  # none are needed with --all
        if name == "show":
            several = "+"
        action.add_argument(
            "ids", nargs=several, metavar="ID", help="a delivery id, or the beginning of one"
        )
        if name != "show":
            action.add_argument(
                "--all",
                action="store_true",
                help="all dead letters; with --sink, only those of this sink",
            )


def run(options: argparse.Namespace) -> int:
    """Carry out the action; return the exit code. Raises ``NotBeforeError``."""
    check(options)
    if options.url is not None:
        _show(options, _ask_address(options))
        return 0

    config = load_configuration(options, sending=False)
    return carry_out(options, config, state_directory(options, config))


def carry_out(options: argparse.Namespace, config: Config, directory: Path) -> int:
    """Ask the owner of a state directory; return the exit code. Raises ``NotBeforeError``."""
    action = options.action
    if action == "list":
        action = "show"
    state: Literal["dead"] | None = None
    if options.all:
        state = "dead"
    request = OutboxRequest(action, tuple(options.ids), state=state, sink=options.sink)
    reply = ask_owner(directory, request, OutboxReply)
    if options.sink is not None and options.sink not in config.sinks and not reply.rows:
        raise ConfigError(
            f"--sink: the outbox has no delivery for {options.sink!r}, and --config has no such"
            " sink: check the name"
        )
    if options.action in READING:
        _show(options, outbox_answer(reply, datetime.now(UTC), with_records=True))
    else:
        _report(options, reply, is_running=listens(directory))
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` or ``NotBeforeError`` for options that do not belong together."""
    action = options.action
    address = [option for option in ADDRESS if _value(options, option) is not None]
    if address and action not in READING:
        raise ConfigError(
            f"outbox {action}: {address[0]} is not possible here, because the HTTP interface is"
            f" read-only. Run `notbefore outbox {action}` on the agent's VM: it uses the control"
            " socket"
        )
    if address and options.url is None:
        raise ConfigError(f"outbox {action}: {address[0]} needs --url")
    for option in ("--socket", "--state-dir"):
        if options.url is not None and _value(options, option) is not None:
            raise ConfigError(f"--url and {option} both name the agent: leave one out")
    if action not in READING and bool(options.ids) == options.all:
        raise ConfigError(f"outbox {action}: expected ids (see `outbox list`), or --all")
    if not all(options.ids):
        raise NotBeforeError("An id is empty. `outbox list` shows the ids.")


def _value(options: argparse.Namespace, option: str) -> str | None:
    value: str | None = getattr(options, option.removeprefix("--").replace("-", "_"), None)
    return value


def _ask_address(options: argparse.Namespace) -> OutboxAnswer:
    """Return the deliveries that the agent gives at ``--url``."""
    client = agent_client(options)
    queries = [f"?id={quote(prefix, safe='')}" for prefix in options.ids]
    if options.sink is not None:
        queries = [f"?sink={quote(options.sink, safe='')}"]
    answers = [_ask(client, f"{PATH}{query}") for query in queries or [""]]

    # two ids may begin the same delivery id
    deliveries: dict[str, DeliverySummary] = {}
    for answer in answers:
        deliveries |= {delivery.delivery_id: delivery for delivery in answer.deliveries}
    return OutboxAnswer(answers[-1].time, tuple(deliveries.values()))


def _ask(client: AgentClient, path: str) -> OutboxAnswer:
    try:
        return msgspec.convert(client.ask(path), OutboxAnswer)
    except msgspec.ValidationError as error:
        raise NotBeforeError(
            f"{client.url}{path}: this is not an outbox ({error}): is --url the address of an"
            " agent?"
        ) from None


def _show(options: argparse.Namespace, answer: OutboxAnswer) -> None:
    """Print the deliveries."""
    if options.action == "show":
        for delivery in answer.deliveries:
            sys.stdout.write(msgspec.json.format(json_line(delivery)).decode() + "\n")
    elif options.json:
        print_json(answer.deliveries)
    else:
        _print_table(answer)


def _print_table(answer: OutboxAnswer) -> None:
    if not answer.deliveries:
        sys.stdout.write("The outbox is empty.\n")
    now = datetime.fromisoformat(answer.time)
    rows: list[tuple[str, ...]] = []
    # sink and event -> the delivery that the next ones wait for
    predecessors: dict[tuple[str, str], str] = {}
    for delivery in answer.deliveries:
        age = (now - datetime.fromisoformat(delivery.created)).total_seconds()
        row = (
            delivery.delivery_id[:SHORT_ID],
            delivery.state,
            delivery.sink,
            delivery.kind,
            delivery.severity,
            span(max(0.0, age)),
            _due(delivery, now, predecessors.get(delivery.lane)),
            str(delivery.attempts),
            delivery.event_key,
            delivery.error[:MAX_ERROR],
        )
        rows.append(row)
        if delivery.queued:
            predecessors[delivery.lane] = delivery.delivery_id[:SHORT_ID]
    table(HEAD, rows)


def _due(delivery: DeliverySummary, now: datetime, predecessor: str | None) -> str:
    """Return when a delivery is sent, for the column DUE."""
    if delivery.state == "dead":
        return "-"
    if predecessor is not None:
        return f"after {predecessor}"
    left = (datetime.fromisoformat(delivery.due) - now).total_seconds()
    if left <= 0:
        return "now"
    return f"in {span(left)}"


def _report(options: argparse.Namespace, reply: OutboxReply, *, is_running: bool) -> None:
    """Print the result of ``retry`` or ``drop``."""
    if options.all and not reply.rows and not reply.left_out:
        sys.stdout.write(
            "No dead letters were found. For pending deliveries, give their IDs instead of --all.\n"
        )
        return

    if reply.left_out:
        sys.stdout.write(
            f"{reply.left_out} left out: their events are over. To send one anyway, give its ID.\n"
        )
    if options.action == "drop":
        result = "dropped"
    elif is_running:
        result = "will be sent again now"
    else:
        result = "will be sent again when the agent runs"
    being_sent = len(reply.rows) - reply.done
    exception = ""
    if being_sent:
        exception = f", {being_sent} left as they are: they are being sent"
    sys.stdout.write(f"{reply.done} {result}{exception}.\n")
