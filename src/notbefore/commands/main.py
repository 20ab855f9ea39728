"""The command line: parser and exit codes.

Each command is a module in this folder, imported only when it is called.
"""

import argparse
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TextIO

from notbefore import __version__
from notbefore.core.text import escaped, one_of
from notbefore.errors import ConfigError, NotBeforeError

# not from docstrings: `python -OO` has none
DESCRIPTION: Final = (
    "notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."
)
EXIT_CODES: Final = """\
Exit codes: 0 done · 1 it failed while running (no agent answers, for example) · 2 the command line
or the configuration is wrong · 3 it cannot start (address in use, state held by another agent) ·
130 Ctrl-C ended it; `run`, `fleet`, `simulate` and `demo` then stop cleanly, with 0.
"""

OK: Final = 0
FAILED: Final = 1
WRONG: Final = 2
CANNOT_START: Final = 3
INTERRUPTED: Final = 130  # as shells report a process that SIGINT has ended
PIPE_CLOSED: Final = errno.EINVAL if sys.platform == "win32" else errno.EPIPE
# errors of standard output that are no bug
UNWRITABLE: Final = (
    PIPE_CLOSED,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)

HELP_WIDTH: Final = 80
DOCUMENTS: Final = "documents: https://github.com/notbefore/notbefore/tree/main/docs"
# name -> description. The command `check-config` is the module check_config, with the functions
# add_arguments and run
COMMANDS: Final = {
    "run": "watch the events of this VM, and serve metrics, a page and an API",
    "fleet": "read the changes of all VMs from an Event Hub, and notify of each event once",
    "fleet approve": "let Azure start an event of the fleet now, for all VMs that it affects",
    "fleet drill": "send an exercise through the routes and sinks of a running instance",
    "fleet outbox": "manage the deliveries of a running instance: list, show, retry, drop",
    "fleet mute": "send no notifications of matching events for some time",
    "fleet report": "show how Azure treated the fleet, from its history",
    "check-config": "check a configuration, and show its mistakes",
    "events": "show the events that are listed now, from a running agent",
    "history": "show the latest changes of events",
    "health": "ask a running agent whether it is healthy: exit code 0 if it is",
    "drill": "send an exercise through the real routes and sinks, and show who was reached",
    "approve": "let Azure start an event now, for all VMs that it affects",
    "outbox": "manage the deliveries that wait: list, show, retry, drop",
    "event-source": "register the source of the sink `windows_event_log` in Windows",
    "simulate": "serve a simulated IMDS, for trials and tests",
    "demo": "show how events are announced, start and finish, with a simulator in fast motion",
}
VERSION: Final = ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments``: by default those of the process."""
    _open_closed_streams()
    _set_encoding()
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        try:
            return _run(arguments)
        finally:
            # now, because a failure at the end of the interpreter could not be reported
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        # so that the final flush cannot fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != PIPE_CLOSED:  # `notbefore history | head` is not worth a message
            sys.stderr.write(f"notbefore: standard output cannot be written: {error.strerror}\n")
        return FAILED


def _open_closed_streams() -> None:
    """Replace a closed standard stream, so that no file or connection gets its descriptor.

    They are opened in the order of their descriptors, because each gets the lowest free one.
    """
    if sys.stdin is None:
        sys.stdin = _open_nothing("r")
    if sys.stdout is None:
        sys.stdout = _open_nothing("w")
    if sys.stderr is None:
        sys.stderr = _open_nothing("w")


def _open_nothing(mode: Literal["r", "w"]) -> TextIO:
    stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - to the end of the process
    os.set_inheritable(stream.fileno(), True)  # noqa: FBT003 - positional only; for the courier
    return stream


def _set_encoding() -> None:
    """Let standard output and error show the code of each character that a terminal lacks."""
    encoding = None
    if sys.platform == "win32":  # files and pipes would get the letters of the code page
        encoding = "utf-8"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _run(words: Sequence[str]) -> int:
    if any(word in VERSION for word in words):
        sys.stdout.write(f"notbefore {__version__}\n")
        return OK
    try:
        options = parsed(words)
        with _interrupts():
            code: int = _module(options.command).run(options)
        return code
    except NotBeforeError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MemoryError, RuntimeError, ImportError) as error:
        if not _is_short_of_resources(error):
            raise
        reason = str(error) or "no memory"
        sys.stderr.write(
            f"notbefore: the system refuses more memory or threads ({reason}). Raise"
            " the limits: `ulimit -v` and `ulimit -u`, or MemoryMax= and TasksMax= of the unit.\n"
        )
        return CANNOT_START


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` inside the ``with``, so that a command can clean up.

    Outside of it, Ctrl-C ends the process at once: see ``__main__``.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _print_error(error: NotBeforeError) -> None:
    texts = [str(error)]
    if isinstance(error, ConfigError) and error.mistakes:
        texts = [str(mistake) for mistake in error.mistakes]
    sys.stderr.writelines(f"notbefore: {escaped(text)}\n" for text in texts)


def _is_short_of_resources(error: Exception) -> bool:
    """Whether the system refused memory or a thread.

    If it was for a thread or a shared library, only the text of Python's error says so.
    """
    if isinstance(error, MemoryError):
        return True
    return "start new thread" in str(error) or "failed to map segment" in str(error)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the command and its options.

    Help or a mistake ends the process, as usual with argparse. Each command's module adds its
    arguments. Only the called module is imported, because imports cost memory.
    """
    words = _in_usual_order(words)
    command, other_words = _split_command(words)
    if command not in COMMANDS:
        _show_help(command, words)
    text = COMMANDS[command]
    parser = _parser(f"notbefore {command}", f"{text[0].upper()}{text[1:]}.", DOCUMENTS)
    _module(command).add_arguments(parser)
    return parser.parse_args(other_words, argparse.Namespace(command=command))


def _in_usual_order(words: Sequence[str]) -> Sequence[str]:
    """Return `events --help` for `help events`, and `run --config FILE` for `--config FILE run`."""
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    if words[:1] == ["--config"]:
        return [*words[2:], *words[:2]]
    if words and words[0].startswith("--config="):
        return [*words[1:], words[0]]
    return words


def _split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the command and the other words.

    `fleet report` is one command; the configuration of this name is `fleet ./report`.
    """
    if " ".join(words[:2]) in COMMANDS:
        return " ".join(words[:2]), words[2:]
    if words:
        return words[0], words[1:]
    return "", ()


def _show_help(command: str, words: Sequence[str]) -> NoReturn:
    """Show the help for all commands, or the mistake, and end the process."""
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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line ends of descriptions, at a width that does not depend on the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        name,
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,  # --allow is not --allow-approval
    )


def _module(command: str) -> Any:
    return importlib.import_module(f"notbefore.commands.{re.sub('[- ]', '_', command)}")
