"""``notbefore events``: show the listed events that a running agent knows, or the coming events of
a fleet.
"""

import argparse
import sys
from typing import Any, Final

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.options import add_json, due, print_json, table
from notbefore.core.duration import span
from notbefore.core.text import escaped, some_of
from notbefore.errors import NotBeforeError

# the first three fit into 60 columns: `watch` cuts longer lines, and `approve` needs the whole id
HEAD: Final = (
    "EVENT ID",
    "TYPE",
    "DUE",
    "STATUS",
    "SCOPE",
    "NOT BEFORE",
    "EXPECTED",
    "SOURCE",
    "RESOURCES",
)

WAVES_HEAD: Final = (
    "TYPE",
    "STATUS",
    "NOT BEFORE",
    "DUE",
    "EVENTS",
    "VMS",
    "REPORTED BY",
    "REGION",
    "GROUP",
    "EVENT ID",
    "NAMES",
)
NAMES_IN_WAVE: Final = 5  # of VMs, in a row of the table
SILENT_NAMES: Final = 20  # of silent or missing VMs, in a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the agent's address, ``--fleet`` and ``--json``."""
    add_agent(parser)
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="ask an instance of `notbefore fleet` for the events of the fleet",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Show the listed events; return the exit code.

    Raises ``NotBeforeError`` if the agent or IMDS does not answer.
    """
    client = agent_client(options)
    answer = client.ask("/api/v1/fleet/events" if options.fleet else "/api/v1/events")
    if options.json:
        print_json(answer["waves" if options.fleet else "events"])
    elif options.fleet:
        show_waves(answer)
    else:
        show_events(answer)
    if unknown := answer[
        "trouble" if options.fleet else "silence"
    ]:  # an error must not look like an empty list
        raise NotBeforeError(f"it is not known what is scheduled now: {unknown}")
    return 0


def show_events(answer: dict[str, Any]) -> None:
    """Print the events. Say that nothing is scheduled only if that is known."""
    events = answer["events"]
    if answer["unreadable"]:
        sys.stdout.write(
            f"{answer['unreadable']} listed events cannot be read: the agent's log says why.\n"
        )
    elif answer["silence"] and events:
        sys.stdout.write("Events that were listed when IMDS last answered:\n")
    elif not answer["silence"] and not events:
        sys.stdout.write("Nothing is scheduled.\n")
    table(HEAD, [_row(event) for event in events])


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


def show_waves(answer: dict[str, Any]) -> None:
    """Print silent and missing VMs, then the waves of a fleet.

    Say that no event is scheduled only if that is known.
    """
    waves, said = answer["waves"], []
    if answer["trouble"]:
        said += ["This may be outdated or incomplete:"] if waves else []
    elif not waves:
        said.append("No event is scheduled.")
    for what in ("silent", "missing"):
        if names := answer[what]:
            vms = "VM is" if len(names) == 1 else "VMs are"
            said.append(f"{len(names)} {vms} {what}: {some_of(names, SILENT_NAMES)}")
    sys.stdout.writelines(f"{escaped(text)}\n" for text in said)
    table(WAVES_HEAD, [_wave(wave) for wave in waves])


def _wave(wave: dict[str, Any]) -> tuple[str, ...]:
    return (
        wave["event_type"],
        wave["status"],
        f"{wave['not_before'][:19]}Z" if wave["not_before"] else "-",  # to the second
        due(wave["seconds_to_not_before"]),
        f"{wave['events']} ({wave['over']} over)" if wave["over"] else str(wave["events"]),
        str(len(wave["vms"])),
        str(wave["reported_by"]),
        wave["region"] or "-",
        wave["group"] or "-",
        wave["event_id"],
        some_of(wave["vms"], NAMES_IN_WAVE),
    )
