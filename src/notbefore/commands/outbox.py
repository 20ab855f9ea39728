"""``notbefore outbox``: list the waiting deliveries, send deliveries again, delete deliveries."""

import argparse
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from notbefore.agent.control_socket import listens
from notbefore.agent.operations import OutboxReply, OutboxRequest
from notbefore.commands.options import (
    add_json,
    add_state,
    load_configuration,
    print_json,
    state_directory,
    table,
)
from notbefore.commands.owner import ask_owner
from notbefore.core.delivery import Delivery, Lane
from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.core.text import rfc3339
from notbefore.errors import ConfigError, NotBeforeError

ACTIONS: Final = {
    "list": "show which deliveries wait, and why",
    "show": "show everything about some deliveries",
    "retry": "send deliveries again now: dead letters, or pending ones by their ids",
    "drop": "delete deliveries that were not sent",
}

SHOWN: Final = (  # of a delivery, as JSON
    *(
        "delivery_id",
        "event_key",
        "sink",
        "kind",
        "severity",
        "note",
        "fallback",
        "others",
        "expires_with_event",
    ),
    *("state", "attempts", "error"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions, and the options that choose deliveries."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(ids=[], all=False, sink=None)
        add_state(action)
        if name != "show":
            action.add_argument("--sink", metavar="NAME", help="only deliveries to this sink")
        if name == "list":
            add_json(action)
            continue
        several = "+" if name == "show" else "*"
        action.add_argument(
            "ids", nargs=several, metavar="ID", help="a delivery id, or the beginning of one"
        )
        if name != "show":
            action.add_argument(
                "--all", action="store_true", help="all dead letters (of --sink, if given)"
            )


def run(options: argparse.Namespace) -> int:
    """Carry out the action; return the exit code. Raises ``NotBeforeError``."""
    if options.action in ("retry", "drop") and bool(options.ids) == options.all:
        raise ConfigError(
            f"outbox {options.action}: expected ids (see `notbefore outbox list`), or --all"
        )
    if not all(options.ids):
        raise NotBeforeError("An id is empty. `notbefore outbox list` shows the ids.")
    config = load_configuration(options, sending=False)
    request = OutboxRequest(
        action="show" if options.action == "list" else options.action,
        ids=tuple(options.ids),
        state="dead" if options.all else None,
        sink=options.sink,
    )
    directory = state_directory(options, config)
    reply = ask_owner(directory, request, OutboxReply)
    if options.sink is not None and options.sink not in config.sinks and not reply.rows:
        raise ConfigError(
            f"--sink: the outbox has no delivery for {options.sink!r}, and --config has no such"
            " sink"
        )
    if options.action == "list" and options.json:
        print_json([_fields(row, reply) for row in reply.rows])
    elif options.action == "list":
        _print_table(reply)
    elif options.action == "show":
        for row in reply.rows:
            sys.stdout.write(msgspec.json.format(json_line(_fields(row, reply))).decode() + "\n")
    elif options.all and not reply.rows and not reply.left_out:
        sys.stdout.write(
            "No dead letters were found. For pending deliveries, give their IDs instead of --all.\n"
        )
    else:
        again = f"will be sent again {'now' if listens(directory) else 'when the agent runs'}"
        _report(reply, "dropped" if options.action == "drop" else again)
    return 0


def _report(reply: OutboxReply, what: str) -> None:
    """Print the result of ``retry`` or ``drop``."""
    if reply.left_out:
        sys.stdout.write(
            f"{reply.left_out} left out: their events are over. To send one anyway, give its ID.\n"
        )
    left = len(reply.rows) - reply.done
    rest = f", {left} left as they are: they are being sent" if left else ""
    sys.stdout.write(f"{reply.done} {what}{rest}.\n")


def _print_table(reply: OutboxReply) -> None:
    if not reply.rows:
        sys.stdout.write("The outbox is empty.\n")
    now = time.time() - reply.shift
    head = ("ID", "STATE", "SINK", "CHANGE", "SEVERITY", "AGE", "DUE", "ATTEMPTS", "EVENT", "ERROR")
    rows = []
    before: dict[Lane, str] = {}  # the delivery that the next ones of a lane wait for
    for row in reply.rows:
        due = "now" if row.due <= now else f"in {span(row.due - now)}"
        due = (
            "-"
            if row.state == "dead"
            else f"after {before[row.lane]}"
            if row.lane in before
            else due
        )
        if row.queued:
            before[row.lane] = row.delivery_id[:8]
        named = (row.delivery_id[:8], row.state, row.sink, row.kind, row.severity)
        rows.append(
            (
                *named,
                span(max(0.0, now - row.created)),
                due,
                str(row.attempts),
                row.event_key,
                row.error[:80],
            )
        )
    table(head, rows)


def _fields(row: Delivery, reply: OutboxReply) -> dict[str, Any]:
    times = {"created": row.created, "due": row.due, "expires": row.expires}
    return {
        **{name: getattr(row, name) for name in SHOWN},
        **{
            name: rfc3339(datetime.fromtimestamp(time + reply.shift, UTC))
            for name, time in times.items()
        },
        "listed": row.event_key in reply.listed,
        "record": msgspec.json.decode(row.record),
    }
