"""``Listing``: the events of an agent or of a fleet, as commands show them."""

from typing import Any, Final, NamedTuple

from notbefore.commands.client import AgentClient
from notbefore.commands.options import due, table_lines
from notbefore.core.duration import span
from notbefore.core.text import counted, escaped, some_of
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
UNKNOWN: Final = "it is not known what is scheduled now"
VM_STATES: Final = {
    "silent": "silent",
    "missing": "missing",
    "without_agent": "without an agent, as far as Azure names them",
}
"""A field of the answer that names VMs -> their state, in words."""
NAMES_IN_WAVE: Final = 5  # of VMs, in a row of the table
SILENT_NAMES: Final = 20  # of silent or missing VMs, in a line


class Listing(NamedTuple):
    """The answer of an agent or a fleet about the listed events."""

    items: list[dict[str, Any]]  # as the API has them
    notes: list[str]  # sentences above the table
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]  # one for each item
    problem: str  # why it is not known what is scheduled; else empty

    @property
    def lines(self) -> list[str]:
        """The sentences and the table."""
        return [*map(escaped, self.notes), *table_lines(self.head, self.rows)]


def ask(client: AgentClient, *, fleet: bool) -> Listing:
    """Ask an agent, or an instance of a fleet, what is listed. Raises ``NotBeforeError``."""
    if fleet:
        return wave_listing(client.ask("/api/v1/fleet/events"))
    return event_listing(client.ask("/api/v1/events"))


def event_listing(answer: dict[str, Any]) -> Listing:
    """Return an agent's answer. Say that nothing is scheduled only if that is known."""
    events = answer["events"]
    notes: list[str] = []
    if answer["unreadable"]:
        unreadable = counted(answer["unreadable"], "listed event")
        notes.append(f"{unreadable} cannot be read: the agent's log says why.")
    elif answer["silence"] and events:
        notes.append("Events that were listed when IMDS last answered:")
    elif not answer["silence"] and not events:
        notes.append("Nothing is scheduled.")
    return Listing(events, notes, HEAD, [_event_row(event) for event in events], answer["silence"])


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


def wave_listing(answer: dict[str, Any]) -> Listing:
    """Return a fleet's answer: silent and missing VMs, those without an agent, and the waves.

    Say that no event is scheduled only if that is known.
    """
    waves = answer["waves"]
    notes: list[str] = []
    if answer["trouble"] and waves:
        notes.append("This may be outdated or incomplete:")
    if not answer["trouble"] and not waves:
        notes.append("No event is scheduled.")
    for field, state in VM_STATES.items():
        names = answer.get(field, [])
        if names:
            notes.append(f"{_vms_are(len(names))} {state}: {some_of(names, SILENT_NAMES)}")
    rows = [_wave_row(wave) for wave in waves]
    return Listing(waves, notes, WAVES_HEAD, rows, answer["trouble"])


def _vms_are(count: int) -> str:
    if count == 1:
        return "1 VM is"
    return f"{count} VMs are"


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
    """Return the names of VMs, with a mark after those that report nothing themselves."""
    names: list[str] = []
    for name in vms:
        if name in without_agent:
            names.append(f"{name} (no agent)")
        else:
            names.append(name)
    return names
