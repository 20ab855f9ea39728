"""The completions of bash, zsh and fish, from the parsers of the commands, with ``shtab``.

For ``tools/reference.py``.
"""

import argparse
import importlib
import re
from typing import Any, Final, get_args

import shtab

from notbefore.commands.main import COMMANDS, DESCRIPTION, VERSION
from notbefore.config.model import LogLevel

COMPLETE: Final[dict[str, Any]] = {  # what follows an option or an argument, by its metavar
    "CONFIG": shtab.FILE,
    "FILE": shtab.FILE,
    "DIR": shtab.DIRECTORY,
}
# likewise, where the configuration checks the word, and not the parser
WORDS: Final = {"LEVEL": get_args(LogLevel)}


class CompletedParser(argparse.ArgumentParser):
    """Tells ``shtab`` what follows options and arguments. Its subparsers do so too."""

    has_options_only = False  # the arguments of a command with subcommands are left out

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an option or an argument."""
        is_option = names[0].startswith("-")
        if self.has_options_only and not is_option:
            elsewhere = argparse.ArgumentParser()
            return elsewhere.add_argument(*names, **settings)

        action: Any = super().add_argument(*names, **settings)
        if action.choices is None and action.metavar in COMPLETE:
            action.complete = COMPLETE[action.metavar]
        if action.choices is None and action.metavar in WORDS:
            action.choices = WORDS[action.metavar]
        added: argparse.Action = action
        return added


def completion(shell: str) -> str:
    """Return the script for a shell."""
    script = _with_config_of_fleet(shell, shtab.complete(whole_parser(), shell))
    lines = [line.rstrip() for line in script.splitlines()]
    return "\n".join(lines).rstrip() + "\n"


def _with_config_of_fleet(shell: str, script: str) -> str:
    """Complete `notbefore fleet` with its subcommands and with files.

    ``shtab`` completes one or the other, but not both.
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


def whole_parser() -> CompletedParser:
    """Return one parser with all commands. The program itself makes the parser of one command."""
    parser = CompletedParser("notbefore", description=DESCRIPTION)
    parser.add_argument(*VERSION, action="version", version="", help="show the version")
    _add_commands(parser, [name for name in COMMANDS if " " not in name])
    return parser


def _add_commands(parser: CompletedParser, names: list[str]) -> None:
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in names:
        text = COMMANDS[name]
        command = commands.add_parser(name.split()[-1], help=text, description=text)
        subcommands = [other for other in COMMANDS if other.startswith(f"{name} ")]
        command.has_options_only = bool(subcommands)
        module_name = re.sub("[- ]", "_", name)
        module: Any = importlib.import_module(f"notbefore.commands.{module_name}")
        module.add_arguments(command)
        if subcommands:
            _add_commands(command, subcommands)
