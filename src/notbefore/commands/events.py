"""``notbefore events``: what is listed now, as a running agent knows it."""

import argparse
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.tables import print_json, remarks, table
from notbefore.core.duration import span


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the agent is, and the form of the answer."""
    add_agent(parser)
    parser.add_argument(
        "--fleet", action="store_true", help="ask an instance of `notbefore fleet` what is coming over the fleet"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON, one object a line")
    form.add_argument("--watch", action="store_true", help="show it anew each second, with countdowns, until Ctrl-C")


def run(options: argparse.Namespace) -> int:
    """Show the listed events; returns the exit code. Raises ``NotBeforeError`` when no agent answers."""
    if options.fleet:
        from notbefore.commands.fleet_events import run_fleet  # noqa: PLC0415 - as below

        return run_fleet(agent_client(options), as_json=options.json, watching=options.watch)
    if options.watch:
        from notbefore.commands.watch import watch  # noqa: PLC0415 - imports what is needed only here

        return watch(agent_client(options), sys.stdout)
    show_events(agent_client(options).ask("/api/v1/events"), sys.stdout, as_json=options.json)
    return 0


def show_events(answer: dict[str, Any], out: TextIO, *, as_json: bool) -> None:
    """Print the agent's answer: a table of the events, and one of what the approval rules say of them."""
    events = answer["events"]
    if as_json:
        print_json(events, out)
        return
    out.writelines(f"{text}\n" for text in remarks(answer, datetime.now(UTC)))
    head = ("TYPE", "STATUS", "SCOPE", "NOT BEFORE", "IN", "EXPECTED", "SOURCE", "RESOURCES", "EVENT ID")
    table(head, [_row(event) for event in events], out)
    approvals = [(event["event_id"], _approval_words(event["approval"])) for event in events if event.get("approval")]
    if approvals:
        out.write("\n")
        table(("EVENT ID", "APPROVAL"), approvals, out)


def _approval_words(approval: dict[str, Any]) -> str:
    """What the rules would do with an event, and why."""
    by = f" by {approval['rule']}" if approval["rule"] else ""
    words = f"{approval['action']}{by}: {approval['reason']}"
    if approval["at"]:
        words += f", from {approval['at']} on"
    if approval["mode"] != "on" and approval["action"] == "approve":
        words += f"; but nothing is sent: {approval['off'] or 'approval.dry_run is true'}"
    return words + (f" [{approval['state']}]" if approval["state"] else "")


def _row(event: dict[str, Any]) -> tuple[str, ...]:
    return (
        event["event_type"],
        event["event_status"],
        event["scope"],
        event["not_before"] or "-",
        span(event["seconds_to_not_before"]),
        span(event["expected_duration_seconds"]),
        event["event_source"] or "-",
        ", ".join(event["resources"]),
        event["event_id"],
    )
