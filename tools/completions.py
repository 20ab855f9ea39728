"""The completions of bash, zsh and fish, from the parsers of the commands, with ``shtab``.

For ``tools/reference.py``.
"""

import argparse
import importlib
import re
from typing import Any, Final

import shtab

from notbefore.commands.main import COMMANDS, DESCRIPTION, VERSION

COMPLETE: Final[dict[str, Any]] = {  # what follows an option or an argument, by its metavar
    "CONFIG": shtab.FILE,
    "FILE": shtab.FILE,
    "DIR": shtab.DIRECTORY,
}


def completion(shell: str) -> str:
    """Return the script for a shell."""
    script = _with_config_of_fleet(shell, shtab.complete(whole_parser(), shell))
    lines = [line.rstrip() for line in script.splitlines()]
    return "\n".join(lines).rstrip() + "\n"


def _with_config_of_fleet(shell: str, script: str) -> str:
    """Let `notbefore fleet` be followed by a file, or by another word of the command.

    ``shtab`` knows either, but not both.
    """
    fleet = "_shtab_notbefore_fleet"
    match shell:
        case "bash":
            return f"{script}\n{fleet}_pos_0_COMPGEN=_shtab_compgen_files\n"
        case "zsh":
            words = f"': :{fleet}_commands'"
            return script.replace(words, f"': :{{{fleet}_commands; _files}}'")
        case _:
            files = '-ka "(__fish_complete_path (commandline -ct))"'
            return f"{script}\ncomplete -c notbefore -n '_shtab_notbefore_using fleet' {files}\n"


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands; the command line itself makes that of one command."""
    parser = argparse.ArgumentParser("notbefore", description=DESCRIPTION)
    parser.add_argument(*VERSION, action="version", version="", help="show the version")
    _add_commands(parser, [name for name in COMMANDS if " " not in name])
    return parser


def _add_commands(parser: argparse.ArgumentParser, names: list[str]) -> None:
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in names:
        text = COMMANDS[name]
        command = commands.add_parser(name.split()[-1], help=text, description=text)
        below = [other for other in COMMANDS if other.startswith(f"{name} ")]
        module: Any = importlib.import_module(f"notbefore.commands.{re.sub('[- ]', '_', name)}")
        module.add_arguments(command)
        if below:
            _remove_arguments(command)
            _add_commands(command, below)
        _complete_files(command)


# argparse has no public way to see or change what was added: ``shtab`` reads the same attributes


def _remove_arguments(parser: argparse.ArgumentParser) -> None:
    """Keep only the options."""
    for action in list(parser._actions):  # noqa: SLF001
        if not action.option_strings:
            parser._remove_action(action)  # noqa: SLF001


def _complete_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:  # noqa: SLF001
        if action.choices is None and action.metavar in COMPLETE:
            action.complete = COMPLETE[action.metavar]  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for child in action.choices.values():
                _complete_files(child)
