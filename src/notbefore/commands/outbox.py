"""``notbefore outbox``: look at the deliveries that wait, send dead letters again, delete deliveries."""

import argparse
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from notbefore.commands.options import add_json, add_state, load_state_configuration
from notbefore.commands.tables import print_json, table
from notbefore.config.model import Config
from notbefore.core.delivery import STATES, Delivery
from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.core.sentence import rfc3339
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.store.lock import no_courier
from notbefore.store.outbox import Outbox
from notbefore.store.spare import file_in_use

ACTIONS: Final = {
    "list": "show which deliveries wait, and why",
    "show": "show everything about some deliveries",
    "retry": "send dead letters again",
    "drop": "delete deliveries that were not sent",
}


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
    if getattr(options, "all", False) and options.ids:
        raise ConfigError(f"outbox {options.action}: expected ids or --all, not both")
    config = load_state_configuration(options)
    state_dir = Path(config.state.dir)
    with closing(Outbox(file_in_use(state_dir))) as outbox:
        sink = getattr(options, "sink", None)
        if sink is not None and sink not in config.sinks and not outbox.rows(sink=sink, limit=1):
            raise ConfigError(f"--sink: the outbox holds nothing for {sink!r}, and --config has no such sink")
        chosen = outbox.rows(options.state, sink) if options.action == "list" else _chosen(outbox, options)
        if options.action in ("list", "show"):
            _print(chosen, options)
            return 0
        with no_courier(state_dir) as nobody:
            if nobody:
                outbox.free(one.delivery_id for one in chosen)
        if options.action == "retry":
            done, what = _retry(outbox, chosen, config), "will be sent again now if the agent is running"
        else:
            done, what = outbox.drop([one.delivery_id for one in chosen]), "dropped"
    left = len(chosen) - done
    if options.json:
        print_json([{"done": done, "being_sent": left}], sys.stdout)
    else:
        rest = f", {left} left as they are: they are being sent" if left else ""
        sys.stdout.write(f"{done} {what}{rest}.\n")
    return 0


def _retry(outbox: Outbox, chosen: list[Delivery], config: Config) -> int:
    terms, now = config.routing.sinks, time.time()
    return sum(
        outbox.retry([one.delivery_id], now, terms[one.sink].expire_after if one.sink in terms else None)
        for one in chosen
    )


def _chosen(outbox: Outbox, options: argparse.Namespace) -> list[Delivery]:
    if getattr(options, "all", False):
        dead = outbox.rows("dead", options.sink)
        if options.action == "drop":
            return dead
        return _timely(dead, outbox.listed_events(), sys.stderr if options.json else sys.stdout)
    if not options.ids:
        every = "" if options.action == "show" else ", or --all"
        raise ConfigError(f"outbox {options.action}: expected ids (see `notbefore outbox list`){every}")
    found: list[Delivery] = []
    for prefix in options.ids:
        matching = outbox.find(prefix)
        if len(matching) != 1:
            found_words = "Several delivery ids start" if matching else "No delivery id starts"
            raise NotBeforeError(f"{found_words} with {prefix!r}. `notbefore outbox list` shows the ids.")
        found += matching
    return found


def _timely(dead: list[Delivery], listed: set[str], out: TextIO) -> list[Delivery]:
    """Leave out announcements of events that are over: they could wake somebody, and no later message corrects them."""
    found = [one for one in dead if one.event_key in listed or not one.expires_with_event]
    if len(found) < len(dead):
        out.write(f"{len(dead) - len(found)} left out: their events are over. To send one all the same, give its ID.\n")
    return found


def _print(rows: Iterable[Delivery], options: argparse.Namespace) -> None:
    if options.json:
        print_json(map(_fields, rows), sys.stdout)
    elif options.action == "list":
        _print_table(rows)
    else:
        for one in rows:
            values = _fields(one) | {"record": msgspec.json.decode(one.record)}
            sys.stdout.write(msgspec.json.format(json_line(values)).decode() + "\n")


def _print_table(rows: Iterable[Delivery]) -> None:
    now = time.time()
    shown = [
        (
            one.delivery_id[:8],
            one.state,
            one.sink,
            one.kind,
            one.severity,
            span(now - one.created),
            _due(one, now),
            str(one.attempts),
            one.event_key,
            one.error[:80],
        )
        for one in rows
    ]
    if not shown:
        sys.stdout.write("The outbox is empty.\n")
    head = ("ID", "STATE", "SINK", "CHANGE", "SEVERITY", "AGE", "DUE", "ATTEMPTS", "EVENT", "ERROR")
    table(head, shown, sys.stdout)


def _due(one: Delivery, now: float) -> str:
    if one.state == "dead":
        return "-"
    return "now" if one.due <= now else f"in {span(one.due - now)}"


def _fields(one: Delivery) -> dict[str, Any]:
    times = {name: rfc3339(datetime.fromtimestamp(getattr(one, name), UTC)) for name in ("created", "due", "expires")}
    return msgspec.structs.asdict(one) | times | {"record": msgspec.Raw(one.record)}
