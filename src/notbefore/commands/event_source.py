"""``notbefore event-source``: register the source of entries in the event log of Windows.

The source names a file with message texts. ``EventCreate.exe``, a part of Windows, has the text
``%1`` for the ids from 1 to 1000: the first text of an entry.
"""

import argparse
import re
import sys
from typing import Final

from notbefore.config.sinks import SOURCE_NAME, WindowsEventLog
from notbefore.errors import ConfigError, NotBeforeError

ACTIONS: Final = {
    "register": "add the source to the log Application, as an administrator",
    "remove": "remove the source; its entries stay",
}
DONE: Final = {"register": "registered", "remove": "removed"}
SOURCES: Final = r"SYSTEM\CurrentControlSet\Services\EventLog\Application"
MESSAGE_FILE: Final = r"%SystemRoot%\System32\EventCreate.exe"
ALL_TYPES: Final = 7  # error, warning and information


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and the name of the source."""
    texts = [f"{name}: {text}" for name, text in ACTIONS.items()]
    parser.add_argument("action", choices=tuple(ACTIONS), help="; ".join(texts))
    parser.add_argument(
        "--source",
        default=WindowsEventLog().source,
        metavar="NAME",
        help="the `source` of the sink (default notbefore)",
    )


def run(options: argparse.Namespace) -> int:
    """Carry out the action; return 0. Raises ``NotBeforeError`` if Windows refuses it."""
    if not re.fullmatch(SOURCE_NAME, options.source):
        raise ConfigError("--source: expected letters, digits, blanks and . _ -")
    try:
        if options.action == "register":
            register(options.source)
        else:
            remove(options.source)
    except PermissionError:
        raise NotBeforeError("Windows refuses it: run the command as administrator") from None
    sys.stdout.write(f"The source {options.source} is {DONE[options.action]}.\n")
    return 0


if sys.platform == "win32":
    import winreg

    def register(source: str) -> None:
        """Add the source to the registry. Raises ``OSError``."""
        with winreg.CreateKey(winreg.HKEY_LOCAL_MACHINE, f"{SOURCES}\\{source}") as key:
            winreg.SetValueEx(key, "EventMessageFile", 0, winreg.REG_EXPAND_SZ, MESSAGE_FILE)
            winreg.SetValueEx(key, "TypesSupported", 0, winreg.REG_DWORD, ALL_TYPES)

    def remove(source: str) -> None:
        """Remove the source from the registry.

        Raises ``NotBeforeError`` if it is not there, and ``OSError``.
        """
        try:
            winreg.DeleteKey(winreg.HKEY_LOCAL_MACHINE, f"{SOURCES}\\{source}")
        except FileNotFoundError:
            raise NotBeforeError(f"there is no source {source}") from None

else:

    def register(source: str) -> None:
        """Raise ``NotBeforeError``: there is no event log."""
        raise NotBeforeError(f"only Windows has an event log: {source} cannot be registered here")

    def remove(source: str) -> None:
        """Raise ``NotBeforeError``: there is no event log."""
        raise NotBeforeError(f"only Windows has an event log: {source} cannot be removed here")
