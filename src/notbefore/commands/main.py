"""The command line: parser and exit codes. Each command is a module of this room, imported only when it is called."""

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import notbefore
from notbefore.core.text import escaped, one_of
from notbefore.errors import ConfigError, NotBeforeError

# no docstrings: the agent may run with `python -OO`, which has none
DESCRIPTION: Final = "notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."
EXIT_CODES: Final = """\
Exit codes: 0 done · 1 it failed while running (no agent answers, for example) · 2 the command line or the configuration
is wrong · 3 it cannot start (address in use, state held by another agent).
"""

OK: Final = 0
FAILED: Final = 1
WRONG: Final = 2
UNWRITABLE: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a standard output

HELP_WIDTH: Final = 80  # characters
DOCUMENTS: Final = "documents: https://github.com/notbefore/notbefore/tree/main/docs"
# name: what it does. `check-config` is the module check_config, with the functions add_arguments and run
COMMANDS: Final = {
    "run": "watch the events of this VM; serve metrics, page and API",
    "fleet": "read the changes of all VMs from an Event Hub, and notify of each event once",
    "fleet mute": "notify nobody of some events for a time",
    "fleet report": "show how Azure treated the fleet, from its history",
    "check-config": "read a configuration: show what is wrong with it",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``arguments`` are those of the process unless given."""
    if sys.stdout is None:  # it is closed: no file or connection may get its number
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter is shown its number
    try:
        try:
            return _run(understood(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # here, and not at the interpreter's end: there nobody can say why it failed
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing may be flushed into it at the end
        if not isinstance(error, BrokenPipeError):  # `notbefore history | head` is no failure to speak of
            sys.stderr.write(f"notbefore: standard output cannot be written: {error.strerror}\n")
        return FAILED


def _run(words: Sequence[str]) -> int:
    parser = make_parser(words)
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        parser.error(f"there is no command {command!r}{one_of(command, COMMANDS)}")
    options, unknown = parser.parse_known_args(words)
    if unknown:  # `parse_args` would show the usage of `notbefore` instead of that of the command
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.version or options.command == "version":
        sys.stdout.write(f"notbefore {notbefore.__version__}\n")
        return OK
    if options.command is None:
        parser.print_help()
        return WRONG
    try:
        code: int = _module(options.command).run(options)
        return code
    except NotBeforeError as error:
        lines = error.mistakes if isinstance(error, ConfigError) and error.mistakes else (error,)
        sys.stderr.writelines(f"notbefore: {escaped(str(line))}\n" for line in lines)
        return error.exit_code
    except KeyboardInterrupt:
        return FAILED


def understood(words: Sequence[str]) -> Sequence[str]:
    """Return the words as the parser takes them: `help events` as `events --help`, `fleet report` as one command.

    A configuration called `report` is `./report`.
    """
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    two = " ".join(words[:2])
    return [two, *words[2:]] if two in COMMANDS else words


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that knows the command that ``words`` name, with its arguments; without one all, by name.

    The arguments of a command stand in its module, and importing it costs memory: a running agent has only its own.
    """
    parser = argparse.ArgumentParser(
        prog="notbefore",
        description=DESCRIPTION,
        epilog=f"{EXIT_CODES}\n{DOCUMENTS}",
        formatter_class=_Help,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("-V", "--version", action="store_true", help=COMMANDS["version"])
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        text = COMMANDS[name]
        # no abbreviations: --allow is not --allow-approval
        command = commands.add_parser(
            name,
            help=text,
            prog=f"notbefore {name}",
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=DOCUMENTS,
            allow_abbrev=False,
            formatter_class=_Help,
        )
        command.set_defaults(parser=command)
        command.add_argument("--version", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == asked and name != "version":
            _module(name).add_arguments(command)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """To learn the width of the terminal argparse imports what is 0.4 MiB, for each argument that is added."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)


def _module(command: str) -> Any:
    return importlib.import_module(f"notbefore.commands.{re.sub('[- ]', '_', command)}")
