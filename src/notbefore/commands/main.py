"""The command line: parser and exit codes.

Each command is a module in this folder, imported only when it is called.
"""

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from notbefore import __version__
from notbefore.core.text import escaped, one_of
from notbefore.errors import ConfigError, NotBeforeError

# not from docstrings: `python -OO` has none
DESCRIPTION: Final = (
    "notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."
)
EXIT_CODES: Final = """\
Exit codes: 0 done · 1 it failed while running (no agent answers, for example) · 2 the command line
or the configuration is wrong · 3 it cannot start (address in use, state held by another agent).
"""

OK: Final = 0
FAILED: Final = 1
WRONG: Final = 2
CANNOT_START: Final = 3
# what a closed pipe gives
NOBODY_READS: Final = errno.EINVAL if sys.platform == "win32" else errno.EPIPE
# of standard output
UNWRITABLE: Final = (
    NOBODY_READS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)

# without a width, argparse imports 0.4 MiB to find one
HELP: Final = partial(argparse.RawDescriptionHelpFormatter, width=80)
DOCUMENTS: Final = "documents: https://github.com/notbefore/notbefore/tree/main/docs"
# name -> description. `check-config` is the module check_config, with the functions add_arguments
# and run
COMMANDS: Final = {
    "run": "watch the events of this VM; serve metrics, page and API",
    "fleet": "read the changes of all VMs from an Event Hub, and notify of each event once",
    "fleet mute": "notify nobody of some events for a time",
    "fleet report": "show how Azure treated the fleet, from its history",
    "check-config": "read a configuration, and show its mistakes",
    "events": "show the listed events that a running agent knows",
    "history": "show the last changes",
    "health": "ask a running agent whether it is healthy: exit code 0 if it is",
    "drill": "send an exercise through the real routes and sinks, and show who was reached",
    "approve": "let Azure start an event now, for all VMs that it affects",
    "outbox": "look at the deliveries that wait: list, show, retry, drop",
    "simulate": "serve a simulated IMDS, for trials and tests",
    "demo": "watch events be announced, start and finish: a simulator and an agent, in fast time",
}
VERSION: Final = ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments``: by default those of the process."""
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # in the order of their descriptors
        if getattr(sys, name) is None:  # it is closed: no file or connection may get its descriptor
            nothing = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - to the end of the process
            os.set_inheritable(nothing.fileno(), True)  # noqa: FBT003 - it is so named; for the courier
            setattr(sys, name, nothing)
    # there, files and pipes would get the code page's letters
    encoding = "utf-8" if sys.platform == "win32" else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # shows the code of a character that a terminal lacks
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            # here, because a failure at the interpreter's end could not be reported
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        # so that the final flush cannot fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != NOBODY_READS:  # `notbefore history | head` is not worth a message
            sys.stderr.write(f"notbefore: standard output cannot be written: {error.strerror}\n")
        return FAILED


def _run(words: Sequence[str]) -> int:
    if not {*VERSION}.isdisjoint(words):
        sys.stdout.write(f"notbefore {__version__}\n")
        return OK
    options = parsed(words)
    try:
        code: int = _module(options.command).run(options)
        return code
    except NotBeforeError as error:
        lines = error.mistakes if isinstance(error, ConfigError) and error.mistakes else (error,)
        sys.stderr.writelines(f"notbefore: {escaped(str(line))}\n" for line in lines)
        return error.exit_code
    except KeyboardInterrupt:
        return FAILED
    except (MemoryError, RuntimeError) as error:
        if not _is_short_of_resources(error):
            raise
        sys.stderr.write(
            f"notbefore: the system refuses more memory or threads ({error or 'no memory'}). Raise"
            " the limits: `ulimit -v` and `ulimit -u`, or MemoryMax= and TasksMax= of the unit.\n"
        )
        return CANNOT_START


def _is_short_of_resources(error: Exception) -> bool:
    """Whether the system refused memory, or a thread, for which Python has no error of its own."""
    return isinstance(error, MemoryError) or "start new thread" in str(error)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the command and its options.

    Help or a mistake ends the process, as usual with argparse.

    `help events` is `events --help`; `--config FILE run` is `run --config FILE`.
    `fleet report` is one command; a configuration called `report`
    is `./report`. Each command's module adds its arguments. Only the called module is imported,
    because imports cost memory.
    """
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    elif words[:1] == ["--config"]:
        words = [*words[2:], *words[:2]]
    elif words and words[0].startswith("--config="):
        words = [*words[1:], words[0]]
    two = " ".join(words[:2])
    command, *others = [two, *words[2:]] if two in COMMANDS else words or ("",)
    if command in COMMANDS:
        text = COMMANDS[command]
        parser = _parser(f"notbefore {command}", f"{text[0].upper()}{text[1:]}.", DOCUMENTS)
        _module(command).add_arguments(parser)
        return parser.parse_args(others, argparse.Namespace(command=command))
    parser = _parser("notbefore", DESCRIPTION, f"{EXIT_CODES}\n{DOCUMENTS}")
    parser.add_argument(*VERSION, action="store_true", help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    if command and not command.startswith("-"):
        parser.error(f"there is no command {command!r}{one_of(command, COMMANDS)}")
    parser.parse_args(words)
    parser.print_help()
    raise SystemExit(WRONG)


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    # no abbreviations: --allow is not --allow-approval
    return argparse.ArgumentParser(
        name, description=description, epilog=epilog, allow_abbrev=False, formatter_class=HELP
    )


def _module(command: str) -> Any:
    return importlib.import_module(f"notbefore.commands.{re.sub('[- ]', '_', command)}")
