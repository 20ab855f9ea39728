"""``notbefore events --fleet``: what is coming over the fleet, as an instance of ``notbefore fleet`` knows it."""

import sys
from typing import Any, Final, TextIO

from notbefore.commands.client import AgentClient
from notbefore.commands.tables import print_json, table
from notbefore.commands.watch import RED, SOON, YELLOW, Board, watch, whole_seconds
from notbefore.core.text import escaped

HEAD: Final = ("TYPE", "STATUS", "NOT BEFORE", "IN", "EVENTS", "VMS", "REPORTED BY", "REGION", "SCALE SET", "EVENT ID")
NOTHING: Final = "Nothing is coming over the fleet."
MAX_NAMES: Final = 20  # of silent VMs in a line


def run_fleet(instance: AgentClient, *, as_json: bool, watching: bool) -> int:
    """Show what an instance knows, or watch it; returns the exit code. Raises ``NotBeforeError``."""
    if watching:
        return watch(instance, sys.stdout, OF_FLEET)
    show(instance.ask(OF_FLEET.path), sys.stdout, as_json=as_json)
    return 0


def show(answer: dict[str, Any], out: TextIO, *, as_json: bool) -> None:
    """Print the answer of an instance: a table of the waves, the most urgent first, and the VMs that are silent."""
    waves = answer["waves"]
    if as_json:
        print_json(waves, out)
        return
    out.writelines(f"{escaped(text)}\n" for text in _remarks(answer))
    table(HEAD, [_row(wave, wave["seconds_to_not_before"]) for wave in waves], out)


def _remarks(answer: dict[str, Any], _now: object = None) -> list[str]:
    """Who is silent or missing, and that nothing is coming."""
    return ([] if answer["waves"] else [NOTHING]) + [
        f"{len(names)} {'VM is' if len(names) == 1 else 'VMs are'} {what}: {', '.join(names[:MAX_NAMES])}"
        + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
        for what, names in (("silent", answer["silent"]), ("missing", answer["missing"]))
        if names
    ]


def _title(answer: dict[str, Any]) -> str:
    return f"{len(answer['waves'])} waves of events over the fleet, {answer['heard']} VMs heard from."


def _row(wave: dict[str, Any], left: float | None) -> tuple[str, ...]:
    return (
        wave["event_type"],
        wave["status"],
        wave["not_before"] or "-",
        whole_seconds(left),
        str(wave["events"]),
        str(len(wave["vms"])),
        str(wave["reported_by"]),
        wave["region"] or "-",
        wave["scale_set"] or "-",
        wave["event_id"],
    )


def _style(wave: dict[str, Any], left: float | None) -> str:
    if wave["status"] == "started":
        return RED
    return YELLOW if left is not None and left < SOON else ""


OF_FLEET: Final = Board(
    path="/api/v1/fleet/events",
    head=HEAD,
    listed=lambda answer: answer["waves"],
    title=_title,
    remarks=_remarks,
    nothing=NOTHING,
    row=_row,
    style=_style,
)
