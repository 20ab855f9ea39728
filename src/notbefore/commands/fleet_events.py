"""``notbefore events --fleet``: what is coming over the fleet, as an instance of ``notbefore fleet`` knows it."""

from typing import Any, Final, TextIO

from notbefore.commands.tables import due, print_json, table
from notbefore.core.text import escaped, some_of

WAVES: Final = "/api/v1/fleet/events"  # where an instance answers
HEAD: Final = (
    "TYPE", "STATUS", "NOT BEFORE", "DUE", "EVENTS", "VMS", "REPORTED BY", "REGION", "GROUP", "EVENT ID", "NAMES",
)  # fmt: skip
NOTHING: Final = "Nothing is coming over the fleet."
MAX_SHOWN: Final = 5  # names of affected VMs in a row
MAX_NAMES: Final = 20  # of silent VMs in a line


def show_waves(answer: dict[str, Any], out: TextIO, *, as_json: bool = False) -> None:
    """Print the waves that an instance answers at ``WAVES``."""
    if as_json:
        print_json(answer["waves"], out)
        return
    out.writelines(f"{escaped(text)}\n" for text in _remarks(answer))
    table(HEAD, [_row(wave) for wave in answer["waves"]], out)


def _remarks(answer: dict[str, Any]) -> list[str]:
    """Who is silent or missing, and that nothing is coming, where that is known."""
    if answer["trouble"]:
        doubt = "This may be old, or not all" if answer["waves"] else "It is not known what is coming"
        said = [f"{doubt}: {answer['trouble']}."]
    else:
        said = [] if answer["waves"] else [NOTHING]
    return said + [
        f"{len(names)} {'VM is' if len(names) == 1 else 'VMs are'} {what}: {some_of(names, MAX_NAMES)}"
        for what, names in (("silent", answer["silent"]), ("missing", answer["missing"]))
        if names
    ]


def _row(wave: dict[str, Any]) -> tuple[str, ...]:
    return (
        wave["event_type"],
        wave["status"],
        f"{wave['not_before'][:19]}Z" if wave["not_before"] else "-",  # to the second
        due(wave["seconds_to_not_before"]),
        f"{wave['events']} ({wave['over']} over)" if wave["over"] else str(wave["events"]),
        str(len(wave["vms"])),
        str(wave["reported_by"]),
        wave["region"] or "-",
        wave["scale_set"] or wave["resource_group"] or "-",
        wave["event_id"],
        some_of(wave["vms"], MAX_SHOWN),
    )
