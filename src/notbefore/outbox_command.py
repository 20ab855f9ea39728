"""``notbefore outbox``: look at what waits to be delivered, send dead letters again, take something out."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from notbefore.config import load
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.events.delivery import STATES, Delivery, Terms
from notbefore.events.duration import span
from notbefore.events.record import json_line, rfc3339
from notbefore.show import table
from notbefore.store.outbox import Outbox
from notbefore.store.store import FILE_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    parser.add_argument("action", choices=("list", "show", "retry", "drop"))
    parser.add_argument("ids", nargs="*", metavar="ID", help="deliveries, by the beginning of their ids")
    parser.add_argument("--all", action="store_true", help="retry, drop: every dead letter (of --sink)")
    parser.add_argument("--sink", help="only those to this sink")
    parser.add_argument("--state", choices=STATES, help="list: only those in this state")
    parser.add_argument("--config", type=Path, help="the agent's configuration, for its state.dir")
    parser.add_argument("--state-dir", help="where the agent keeps its state")
    parser.add_argument("--json", action="store_true", help="JSON, one object a line")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    config = load(options.config, os.environ, {"state.dir": options.state_dir}, sending=False)
    with closing(Outbox(Path(config.state.dir) / FILE_NAME)) as outbox:
        if (
            options.sink is not None
            and options.sink not in config.sinks
            and not outbox.rows(sink=options.sink, limit=1)
        ):
            raise ConfigError(f"--sink: nothing is kept for a sink {options.sink!r}, and --config names none")
        if options.action == "list":
            _list(outbox.rows(options.state, options.sink), as_json=options.json)
            return 0
        chosen = _chosen(outbox, options)
        if options.action == "show":
            _show(chosen)
        elif options.action == "retry":
            done = outbox.retry([one.delivery_id for one in chosen], time.time(), Terms().expire_after)
            sys.stdout.write(f"{done} will be sent again now, if `notbefore run` is running.\n")
        else:
            done = outbox.drop([one.delivery_id for one in chosen], time.time())
            left = len(chosen) - done
            sys.stdout.write(f"{done} dropped" + (f", {left} left: on their way\n" if left else "\n"))
    return 0


def _chosen(outbox: Outbox, options: argparse.Namespace) -> list[Delivery]:
    if options.all:
        return outbox.rows("dead", options.sink)
    if not options.ids:
        raise ConfigError(f"outbox {options.action}: expected ids (see `notbefore outbox list`), or --all")
    found: list[Delivery] = []
    for prefix in options.ids:
        matching = outbox.find(prefix)
        if len(matching) != 1:
            raise NotBeforeError(f"{prefix}: {'no delivery begins' if not matching else 'several deliveries begin'} so")
        found += matching
    return found


def _list(rows: Iterable[Delivery], *, as_json: bool) -> None:
    now = time.time()
    if as_json:
        for one in rows:
            sys.stdout.write(json_line(_fields(one)).decode() + "\n")
        return
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
    head = ("ID", "STATE", "SINK", "CHANGE", "SEVERITY", "AGE", "DUE", "ATTEMPTS", "EVENT", "WHY")
    table(head, shown, sys.stdout)


def _due(one: Delivery, now: float) -> str:
    if one.state == "dead":
        return "-"
    return "now" if one.due <= now else f"in {span(one.due - now)}"


def _fields(one: Delivery) -> dict[str, Any]:
    times = {name: rfc3339(datetime.fromtimestamp(getattr(one, name), UTC)) for name in ("created", "due", "expires")}
    return msgspec.structs.asdict(one) | times | {"record": msgspec.Raw(one.record)}


def _show(rows: Iterable[Delivery]) -> None:
    for one in rows:
        values = _fields(one) | {"record": msgspec.json.decode(one.record)}
        sys.stdout.write(msgspec.json.format(json_line(values)).decode() + "\n")
