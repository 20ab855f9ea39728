"""The command line: parser and exit codes. Each command is a module of this room, imported only when it is called."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from notbefore.core.text import escaped
from notbefore.errors import ConfigError, ListenError, NotBeforeError, StoreError

# no docstrings: the agent may run with `python -OO`, which has none
DESCRIPTION: Final = "notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."
EXIT_CODES: Final = """\
Exit codes: 0 done · 1 it failed while running (no agent answers, for example) · 2 the command line or the configuration
is wrong · 3 it cannot start (address in use, state held by another agent).
"""

OK: Final = 0
FAILED: Final = 1
WRONG: Final = 2
CANNOT_START: Final = 3

COMMANDS: Final = {  # `check-config` is the module check_config, with the functions add_arguments and run
    "run": "watch the events of this VM; serve metrics, page and API",
    "fleet": "read the changes of all VMs from an Event Hub, and notify of each event once",
    "fleet-report": "show how Azure treated the fleet, from its history",
    "check-config": "read a configuration: show what is wrong with it, or all values in use",
    "discover": "look for IMDS, and show what was found where",
    "events": "show what is listed now, as a running agent knows it",
    "history": "show the last changes",
    "health": "ask a running agent whether it is healthy: exit code 0 if it is",
    "drill": "send an exercise through the real routes and sinks, and show who was reached",
    "approve": "let Azure start an event now, for all VMs that it affects",
    "outbox": "look at the deliveries that wait: list, show, retry, drop",
    "simulate": "serve a simulated IMDS, to try everything against",
    "demo": "watch events be announced, start and finish: a simulator and an agent, in fast time",
    "version": "show the version",
}
DOCUMENTS: Final = "documents: https://github.com/notbefore/notbefore/tree/main/docs"
EXAMPLES: Final = {
    "run": "notbefore run /etc/notbefore/notbefore.yml",
    "check-config": "notbefore check-config --connect /etc/notbefore/notbefore.yml",
    "discover": "notbefore discover",
    "events": "notbefore events --watch",
    "history": "notbefore history --since 1h",
    "health": "notbefore health --ready",
    "drill": "notbefore drill /etc/notbefore/notbefore.yml --sink oncall",
    "approve": "notbefore approve C7061BAC-AFDC-4513-B24B-AA5F13A16123 --reason 'drained'",
    "outbox": "notbefore outbox list --state dead",
    "fleet": "notbefore fleet /etc/notbefore/fleet.yml",
    "fleet-report": "notbefore fleet report --since 90d --html report.html",
    "simulate": "notbefore simulate --scenario user-reboot --speed 60",
    "demo": "notbefore demo --keep",
    "version": "notbefore version",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``arguments`` are those of the process unless given."""
    words = joined(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(words)
    options = parser.parse_args(words)
    if options.version:
        options.command = "version"
    if options.command is None:
        parser.print_help()
        return WRONG
    try:
        code: int = _module(options.command).run(options)
        return code
    except NotBeforeError as error:
        sys.stderr.write(f"notbefore: {escaped(str(error))}\n")
        return _exit_code(error)
    except BrokenPipeError:  # `notbefore history | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing may be flushed into the broken pipe
        return FAILED
    except KeyboardInterrupt:
        return FAILED


def joined(words: Sequence[str]) -> Sequence[str]:
    """Return the words with `fleet report` as the command that it is; a configuration of that name is `./report`."""
    two = "-".join(words[:2])
    return [two, *words[2:]] if two in COMMANDS else words


def make_parser(words: Sequence[str], *, every: bool = False) -> argparse.ArgumentParser:
    """Return a parser that knows all commands by name, and the arguments of the one that ``words`` name.

    The arguments of a command stand in its module, and importing it costs memory: a running agent has only its own.
    ``every``: those of all commands, for the completion and the man page.
    """
    parser = argparse.ArgumentParser(
        prog="notbefore",
        description=DESCRIPTION,
        epilog=f"{EXIT_CODES}\n{DOCUMENTS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help=COMMANDS["version"])
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        # no abbreviations: --allow is not --allow-approval
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {EXAMPLES[name]}\n\n{DOCUMENTS}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == asked or every:
            _module(name).add_arguments(command)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"notbefore.commands.{command.replace('-', '_')}")


def _exit_code(error: NotBeforeError) -> int:
    if isinstance(error, ConfigError):
        return WRONG
    return CANNOT_START if isinstance(error, (ListenError, StoreError)) else FAILED
