"""``notbefore outbox``: look at the deliveries that wait, send dead letters again, delete deliveries."""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.agent.operations import OutboxReply, OutboxRequest
from notbefore.commands.options import add_json, add_state, load_state_configuration
from notbefore.commands.owner import asking
from notbefore.commands.tables import print_json, table
from notbefore.core.delivery import STATES, Delivery
from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.core.sentence import rfc3339
from notbefore.errors import ConfigError, NotBeforeError

ACTIONS: Final = {
    "list": "show which deliveries wait, and why",
    "show": "show everything about some deliveries",
    "retry": "send dead letters again",
    "drop": "delete deliveries that were not sent",
}

SHOWN: Final = (  # of a delivery, as JSON
    *("delivery_id", "event_key", "sink", "kind", "severity", "note", "fallback", "others"),
    "expires_with_event",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An action, and the deliveries that it is for."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=parser.epilog,
            allow_abbrev=False,
            formatter_class=parser.formatter_class,
        )
        if name != "list":
            action.add_argument("ids", nargs="*", metavar="ID", help="a delivery id, or the beginning of one")
        if name in ("retry", "drop"):
            action.add_argument("--all", action="store_true", help="every dead letter (of --sink)")
        if name != "show":
            action.add_argument("--sink", metavar="NAME", help="only deliveries to this sink")
        if name == "list":
            action.add_argument("--state", choices=STATES, help="only deliveries in this state")
        add_json(action)
        add_state(action)


def run(options: argparse.Namespace) -> int:
    """Carry out the action; returns the exit code. Raises ``NotBeforeError``."""
    every = getattr(options, "all", False)
    ids = tuple(getattr(options, "ids", ()))
    if every and ids:
        raise ConfigError(f"outbox {options.action}: expected ids or --all, not both")
    if options.action != "list" and not ids and not every:
        more = "" if options.action == "show" else ", or --all"
        raise ConfigError(f"outbox {options.action}: expected ids (see `notbefore outbox list`){more}")
    if not all(ids):
        raise NotBeforeError("An empty id names no delivery. `notbefore outbox list` shows the ids.")
    config = load_state_configuration(options)
    sink = getattr(options, "sink", None)
    request = OutboxRequest(
        action="show" if options.action == "list" else options.action,
        ids=ids,
        state="dead" if every else getattr(options, "state", None),
        sink=sink,
    )
    with asking(Path(config.state.dir), OutboxReply) as ask:
        reply = ask(request)
    if sink is not None and sink not in config.sinks and not reply.rows:
        raise ConfigError(f"--sink: the outbox holds nothing for {sink!r}, and --config has no such sink")
    if options.action in ("list", "show"):
        _print(reply, options)
    else:
        _report(reply, options)
    return 0


def _report(reply: OutboxReply, options: argparse.Namespace) -> None:
    """Print what was done."""
    left = len(reply.rows) - reply.done
    if reply.left_out:
        out = sys.stderr if options.json else sys.stdout
        out.write(f"{reply.left_out} left out: their events are over. To send one all the same, give its ID.\n")
    if options.json:
        print_json([{"done": reply.done, "being_sent": left}], sys.stdout)
        return
    what = "will be sent again now if the agent is running" if options.action == "retry" else "dropped"
    rest = f", {left} left as they are: they are being sent" if left else ""
    sys.stdout.write(f"{reply.done} {what}{rest}.\n")


def _print(reply: OutboxReply, options: argparse.Namespace) -> None:
    if options.json:
        print_json([_fields(row, reply) for row in reply.rows], sys.stdout)
    elif options.action == "list":
        _print_table(reply)
    else:
        for row in reply.rows:
            sys.stdout.write(msgspec.json.format(json_line(_fields(row, reply))).decode() + "\n")


def _print_table(reply: OutboxReply) -> None:
    now = time.time() - reply.shift
    shown = []
    for row in reply.rows:
        due = "now" if row.due <= now else f"in {span(row.due - now)}"
        shown.append(
            (
                row.delivery_id[:8],
                row.state,
                row.sink,
                row.kind,
                row.severity,
                span(now - row.created),
                "-" if row.state == "dead" else due,
                str(row.attempts),
                row.event_key,
                row.error[:80],
            )
        )
    if not shown:
        sys.stdout.write("The outbox is empty.\n")
    head = ("ID", "STATE", "SINK", "CHANGE", "SEVERITY", "AGE", "DUE", "ATTEMPTS", "EVENT", "ERROR")
    table(head, shown, sys.stdout)


def _fields(row: Delivery, reply: OutboxReply) -> dict[str, Any]:
    times = {"created": row.created, "due": row.due, "expires": row.expires}
    return {
        **{name: getattr(row, name) for name in SHOWN},
        **{name: rfc3339(datetime.fromtimestamp(time + reply.shift, UTC)) for name, time in times.items()},
        "state": row.state,
        "attempts": row.attempts,
        "error": row.error,
        "listed": row.event_key in reply.listed,
        "record": msgspec.json.decode(row.record),
    }
