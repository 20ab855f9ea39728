"""``notbefore events``: what is listed now, as a running agent knows it."""

import argparse
import sys
from typing import Any, Final, TextIO

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.fleet_events import OF_FLEET
from notbefore.commands.options import add_json
from notbefore.commands.tables import Listing, due, remarks, show_listing, table
from notbefore.core.document import STARTED
from notbefore.core.duration import span
from notbefore.errors import NotBeforeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the agent is, and the form of the answer."""
    add_agent(parser)
    parser.add_argument(
        "--fleet", action="store_true", help="ask an instance of `notbefore fleet` what is coming over the fleet"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Show the listed events; returns the exit code. Raises ``NotBeforeError`` where no agent or no IMDS answers."""
    listing = OF_FLEET if options.fleet else OF_AGENT
    answer = agent_client(options).ask(listing.path)
    show_listing(listing, answer, sys.stdout, as_json=options.json)
    if not options.json and not options.fleet:
        show_approvals(answer["events"], sys.stdout)
    if answer.get("silence"):  # an error is no empty list
        raise NotBeforeError(f"it is not known what is scheduled now: {answer['silence']}")
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
    return sorted(answer["events"], key=lambda event: (event["event_status"] != STARTED, event["not_before"] or "9"))


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


OF_AGENT: Final = Listing(
    path="/api/v1/events",
    # the first three fit into 60 columns: `watch` cuts what is longer, and `approve` needs the id whole
    head=("EVENT ID", "TYPE", "DUE", "STATUS", "SCOPE", "NOT BEFORE", "EXPECTED", "SOURCE", "RESOURCES"),
    listed=_by_urgency,
    remarks=remarks,
    row=_row,
)
