"""``notbefore events``: what is listed now, as a running agent knows it."""

import argparse
import sys
from typing import Any, Final, TextIO

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.fleet_events import OF_FLEET
from notbefore.commands.tables import NOTHING, due, remarks, table
from notbefore.commands.watch import DIM, RED, SOON, YELLOW, Board, show, watch
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
    agent, board = agent_client(options), OF_FLEET if options.fleet else OF_AGENT
    if options.watch:
        return watch(board, agent, sys.stdout)
    answer = agent.ask(board.path)
    show(board, answer, sys.stdout, as_json=options.json)
    if not options.json and not options.fleet:
        show_approvals(answer["events"], sys.stdout)
    return 0


def show_approvals(events: list[dict[str, Any]], out: TextIO) -> None:
    """Print what the approval rules say of the events; nothing without rules."""
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


def _by_urgency(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What is started, then by NotBefore."""
    return sorted(answer["events"], key=lambda event: (event["event_status"] != "Started", event["not_before"] or "9"))


def _title(answer: dict[str, Any]) -> str:
    vm = (answer["vm"] or {}).get("name") or "this VM"
    return f"Scheduled events of {vm}: {len(answer['events'])} listed."


def _row(event: dict[str, Any], left: float | None) -> tuple[str, ...]:
    return (
        event["event_type"],
        event["event_status"],
        event["scope"],
        event["not_before"] or "-",
        due(left),
        span(event["expected_duration_seconds"]),
        ", ".join(event["resources"]),
        event["event_id"],
        event["event_source"] or "-",
    )


def _style(event: dict[str, Any], left: float | None) -> str:
    if event["scope"] == "peer":
        return DIM
    if event["event_status"] == "Started":
        return RED
    return YELLOW if left is not None and left < SOON else ""


OF_AGENT: Final = Board(
    path="/api/v1/events",
    head=("TYPE", "STATUS", "SCOPE", "NOT BEFORE", "DUE", "EXPECTED", "RESOURCES", "EVENT ID", "SOURCE"),
    listed=_by_urgency,
    title=_title,
    remarks=remarks,
    nothing=NOTHING,
    row=_row,
    style=_style,
)
