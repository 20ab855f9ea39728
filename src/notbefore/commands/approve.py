"""``notbefore approve EVENT_ID``: let Azure start an event now.

The command shows the effect and the affected VMs, and asks whether to approve the event.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from notbefore.commands.options import add_state, due, load_configuration, state_directory
from notbefore.core.duration import span
from notbefore.core.record import Record
from notbefore.core.text import escaped, one_line
from notbefore.core.tracked import PendingEvent
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.process.control_socket import (
    MAX_REASON,
    MAX_USER,
    ControlReply,
    ControlRequest,
    ask_agent,
)
from notbefore.wording.texts import effect


class ScopeWords(NamedTuple):
    """The words for the VMs of an event, as seen from this VM."""

    before_one: str  # before `VM: ` and the name, if the event names a single VM
    after_several: str  # after the names, if it names several


SCOPE_WORDS: Final = {
    "self": ScopeWords("this", ""),
    "peer": ScopeWords("ANOTHER", ", and this VM is none of them"),
    "fleet": ScopeWords("the", ""),
}
UNKNOWN_SCOPE: Final = ScopeWords("perhaps this", ", perhaps this one")  # this VM has no name yet


def add_arguments(
    parser: argparse.ArgumentParser,
    owner: str = "the agent",
    listing: str = "notbefore events",
) -> None:
    """Add the event, the confirmation, the record, and the state directory of the owner.

    ``listing``: the command that shows the events.
    """
    parser.add_argument("event_id", metavar="EVENT_ID", help=f"see `{listing}`")
    parser.add_argument(
        "--yes", action="store_true", help="approve without asking for confirmation"
    )
    parser.add_argument("--reason", default="", help="why, for the record")
    parser.add_argument(
        "--without-resources",
        action="store_true",
        help="approve the event even if its Resources name no VM",
    )
    parser.add_argument(
        "--unchanged",
        metavar="FILE",
        help=(
            "approve only if the event is still as in this record: a file with its JSON, or - for"
            " standard input"
        ),
    )
    add_state(parser, owner)


def run(options: argparse.Namespace) -> int:
    """Show the event, ask, and approve it; return the exit code. Raises ``NotBeforeError``."""
    config = load_configuration(options, sending=False)
    return approve(options, state_directory(options, config))


def approve(options: argparse.Namespace, directory: Path) -> int:
    """Ask the owner of a state directory to show the event, and to approve it.

    Result and errors are those of ``run``.
    """
    expected: Record | None = None
    if options.unchanged is not None:
        expected = _read_record(options.unchanged)
    if len(options.reason) > MAX_REASON:
        raise ConfigError(f"--reason: expected at most {MAX_REASON} characters")

    shown = ask_agent(directory, ControlRequest(options.event_id), ControlReply)
    if shown.event is None:
        raise NotBeforeError(shown.words)
    if expected is not None and _facts(expected) != _facts(shown.event):
        raise NotBeforeError(
            "nothing was sent: the event is no longer the one in the record: see `notbefore events`"
        )
    sys.stdout.write(describe(shown.event))
    if shown.words:  # there is nothing left to decide
        sys.stdout.write(escaped(shown.words) + "\n")
        return 0
    if not options.yes and not _ask_for_confirmation():
        sys.stdout.write("Nothing was sent.\n")
        return 1

    sudo_user = os.environ.get("SUDO_USER", "")[:MAX_USER]  # the agent uses it only if root asks
    request = ControlRequest(
        event_id=options.event_id,
        content=shown.content,
        reason=options.reason,
        sudo_user=sudo_user,
        without_resources=options.without_resources,
    )
    reply = ask_agent(directory, request, ControlReply)
    sys.stdout.write(escaped(reply.words) + "\n")
    if reply.done:
        return 0
    return 1


def _read_record(path: str) -> Record:
    """Read the record in a file or from standard input; raises ``ConfigError`` if there is none."""
    try:
        if path == "-":
            return Record.read(sys.stdin.buffer.read())
        return Record.read(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"--unchanged: {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--unchanged: {path}: this is no record of an event: {error}") from None


def _facts(event: Record | PendingEvent) -> tuple[object, ...]:
    """Return the facts that an operator approves.

    They are the event, its effect, the affected VMs and the expected interruption.
    """
    return (
        event.event_id.casefold(),
        event.event_type,
        event.event_source,
        sorted({name.casefold() for name in event.resources}),
        event.expected_duration_seconds,
    )


def describe(event: PendingEvent) -> str:
    """Return a text about the event, for the operator who is asked to approve it."""
    names = [one_line(name) for name in event.resources]
    event_type = one_line(event.event_type)
    status = one_line(event.event_status)
    head = f"{event_type} {one_line(event.event_id)}, {status}"
    if event.seconds_to_not_before is not None:
        head += f", NotBefore {due(event.seconds_to_not_before)}"
    subject = "Each affected VM"
    if len(names) == 1:
        subject = "The VM"

    lines = [
        head,
        one_line(event.description or ""),
        effect(event.event_type, affected=subject, duration=event.expected_duration_seconds),
        f"Expected interruption: {span(event.expected_duration_seconds)}",
        f"Approving lets Azure start it at once, for {_affected(names, event.scope)}.",
    ]
    return "".join(f"{line}\n" for line in lines if line)


def _affected(names: list[str], scope: str) -> str:
    """Return the words for the affected VMs."""
    words = SCOPE_WORDS.get(scope, UNKNOWN_SCOPE)
    if not names:
        return "VMs that Azure does not name"
    if len(names) == 1:
        return f"{words.before_one} VM: {names[0]}"
    return f"all {len(names)} VMs: {', '.join(names)}{words.after_several}"


def _ask_for_confirmation() -> bool:
    """Return whether the operator types yes."""
    if not sys.stdin.isatty():
        raise NotBeforeError(
            "cannot ask for confirmation (standard input is not a terminal): use --yes"
        )
    sys.stdout.write("Type yes to approve: ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().casefold() == "yes"
