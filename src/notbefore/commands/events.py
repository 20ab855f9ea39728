"""``notbefore events``: show the listed events that a running agent knows, or the events of a
fleet.
"""

import argparse
import sys
from typing import Any, Final

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.options import add_json, due, print_json, table
from notbefore.core.duration import span
from notbefore.core.text import escaped, some_of
from notbefore.errors import NotBeforeError
from notbefore.wording.phrases import reporters

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
    "APPROVAL",
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
VM_STATES: Final = {
    "silent": "silent",
    "missing": "missing",
    "without_agent": "without an agent, as far as Azure names them",
}
"""A field of the answer that names VMs -> what they are."""
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
    if options.fleet:
        answer = client.ask("/api/v1/fleet/events")
        items = answer["waves"]
        problem = answer["trouble"]
    else:
        answer = client.ask("/api/v1/events")
        items = answer["events"]
        problem = answer["silence"]

    if options.json:
        print_json(items)
    elif options.fleet:
        show_waves(answer)
    else:
        show_events(answer)
    if problem:  # an error must not look like an empty list
        raise NotBeforeError(f"it is not known what is scheduled now: {problem}")
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
    table(HEAD, [_event_row(event) for event in events])


def _event_row(event: dict[str, Any]) -> tuple[str, ...]:
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
        _approval(event),
    )


def _approval(event: dict[str, Any]) -> str:
    """Return what the approval rules do with an event; ``-`` without rules."""
    approval = event.get("approval")  # an older agent does not say it
    if approval is None:
        return "-"
    return str(approval["words"])


def show_waves(answer: dict[str, Any]) -> None:
    """Print silent and missing VMs and those without an agent, then the waves of a fleet.

    Say that no event is scheduled only if that is known.
    """
    waves = answer["waves"]
    lines: list[str] = []
    if answer["trouble"] and waves:
        lines.append("This may be outdated or incomplete:")
    if not answer["trouble"] and not waves:
        lines.append("No event is scheduled.")
    for field, state in VM_STATES.items():
        names = answer.get(field, [])
        if names:
            vms = "VM is" if len(names) == 1 else "VMs are"
            lines.append(f"{len(names)} {vms} {state}: {some_of(names, SILENT_NAMES)}")
    sys.stdout.writelines(f"{escaped(line)}\n" for line in lines)
    table(WAVES_HEAD, [_wave_row(wave) for wave in waves])


def _wave_row(wave: dict[str, Any]) -> tuple[str, ...]:
    not_before = "-"
    if wave["not_before"]:
        not_before = f"{wave['not_before'][:19]}Z"  # to the second
    events = str(wave["events"])
    if wave["over"]:
        events = f"{wave['events']} ({wave['over']} over)"
    by_azure = wave.get("azure_status") is not None  # an older instance does not know it
    names = _marked(wave["vms"], wave.get("without_agent", []))
    return (
        wave["event_type"],
        wave["status"],
        not_before,
        due(wave["seconds_to_not_before"]),
        events,
        str(len(wave["vms"])),
        reporters(wave["reported_by"], by_azure=by_azure),
        wave["region"] or "-",
        wave["group"] or "-",
        wave["event_id"],
        some_of(names, NAMES_IN_WAVE),
    )


def _marked(vms: list[str], without_agent: list[str]) -> list[str]:
    """Return the names of VMs; those that report nothing themselves are marked."""
    return [f"{name} (no agent)" if name in without_agent else name for name in vms]
