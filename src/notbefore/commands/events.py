"""``notbefore events``: what is listed now, as a running agent knows it."""

import argparse
import sys
from typing import Any, Final, TextIO

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.fleet_events import WAVES, show_waves
from notbefore.commands.options import add_json
from notbefore.commands.tables import due, print_json, table
from notbefore.core.document import STARTED
from notbefore.core.duration import span
from notbefore.errors import NotBeforeError

# the first three fit into 60 columns: `watch` cuts what is longer, and `approve` needs the id whole
HEAD: Final = ("EVENT ID", "TYPE", "DUE", "STATUS", "SCOPE", "NOT BEFORE", "EXPECTED", "SOURCE", "RESOURCES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the agent is, and the form of the answer."""
    add_agent(parser)
    parser.add_argument(
        "--fleet", action="store_true", help="ask an instance of `notbefore fleet` what is coming over the fleet"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Show the listed events; returns the exit code. Raises ``NotBeforeError`` where no agent or no IMDS answers."""
    client = agent_client(options)
    if options.fleet:
        show_waves(client.ask(WAVES), sys.stdout, as_json=options.json)
        return 0
    answer = client.ask("/api/v1/events")
    show_events(answer, sys.stdout, as_json=options.json)
    if answer["silence"]:  # an error is no empty list
        raise NotBeforeError(f"it is not known what is scheduled now: {answer['silence']}")
    return 0


def show_events(answer: dict[str, Any], out: TextIO, *, as_json: bool = False) -> None:
    """Print what is started, then by NotBefore."""
    events = sorted(answer["events"], key=lambda one: (one["event_status"] != STARTED, one["not_before"] or "9"))
    if as_json:
        print_json(events, out)
        return
    out.writelines(f"{text}\n" for text in _remarks(answer))
    table(HEAD, [_row(event) for event in events], out)


def _remarks(answer: dict[str, Any]) -> list[str]:
    """Sentences above the listed events. That nothing is scheduled is said only where it is known."""
    if answer["unreadable"]:
        return [f"{answer['unreadable']} listed events cannot be read: the agent's log says why."]
    if answer["silence"]:
        return ["What was listed when IMDS last answered:"] if answer["events"] else []
    return [] if answer["events"] else ["Nothing is scheduled."]


def _row(event: dict[str, Any]) -> tuple[str, ...]:
    return (
        event["event_id"],
        event["event_type"],
        due(event["seconds_to_not_before"]),
        event["event_status"],
        event["scope"],
        event["not_before"] or "-",
        span(event["expected_duration_seconds"]),
        event["event_source"] or "-",
        ", ".join(event["resources"]),
    )
