"""Functions that commands share: options, the configuration and its overrides, tables, JSON."""

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from notbefore.config.lint import warnings
from notbefore.config.load import examine, load
from notbefore.config.model import Config, LogLevel, default_state_dir
from notbefore.core.duration import Duration, span
from notbefore.core.record import json_line
from notbefore.core.text import escaped
from notbefore.errors import ConfigError
from notbefore.logs import set_up
from notbefore.process.control_socket import NAME as SOCKET_NAME

OVERRIDES: Final = {  # the path of a key -> the option that overrides it
    "server.listen": "--listen",
    "imds.endpoint": "--imds",
    "state.dir": "--state-dir",
    "log.level": "--log-level",
}


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``load_configuration`` reads."""
    add_config_file(parser, "a YAML file; without one, every key has its default")
    parser.add_argument("--listen", metavar="HOST:PORT", help="server.listen: where to serve")
    parser.add_argument(
        "--imds",
        metavar="URL",
        help="imds.endpoint: another IMDS, such as the address of a simulator",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help=f"state.dir: the directory of the state (default {default_state_dir()})",
    )
    add_log_level(parser)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level``."""
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        help=f"log.level: {', '.join(get_args(LogLevel))}",
    )


class _Once(argparse.Action):
    """Stores a value that may be given in several ways, but only once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002 - argparse passes it by position
    ) -> None:
        if values is None:  # a positional argument that is missing
            return
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{self.metavar} is given twice: leave one out")
        setattr(namespace, self.dest, values)


def _file(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a file, got an empty text")
    return Path(text)


def add_config_file(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the file of the configuration, as CONFIG or as ``--config CONFIG``."""
    parser.add_argument(
        "config",
        nargs="?",
        action=_Once,
        type=_file,
        metavar="CONFIG",
        help=text,
    )
    parser.add_argument(
        "--config", action=_Once, type=_file, metavar="CONFIG", help="another way to write CONFIG"
    )


def add_json(
    parser: argparse.ArgumentParser, help_text: str = "print JSON, one object per line"
) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=help_text)


def load_configuration(options: argparse.Namespace, *, sending: bool = True) -> Config:
    """Return the configuration that the options name; raises ``ConfigError``.

    ``sending``: see ``config.load``.
    """
    return load(options.config, os.environ, overrides(options), sending=sending)


def begin(options: argparse.Namespace) -> Config:
    """Return the configuration of an always-on process; set up its log, and log the warnings.

    Raises ``ConfigError``.
    """
    config, places, mistakes = examine(options.config, os.environ, overrides(options))
    if mistakes:
        raise ConfigError.of(mistakes)
    set_up(config.log.format, config.log.level)
    for text in warnings(config, places):
        logging.getLogger("notbefore.config").warning(text)
    return config


def overrides(options: argparse.Namespace) -> dict[str, str | None]:
    """Return the values that override the configuration, by the path of their keys."""
    values: dict[str, str | None] = {}
    for path, option in OVERRIDES.items():
        attribute = option.removeprefix("--").replace("-", "_")
        values[path] = getattr(options, attribute, None)  # a command may lack the option
    return values


def check_arguments(options: argparse.Namespace, command: str) -> list[str]:
    """Return the arguments for ``check-config`` that say what ``command`` was started with."""
    arguments = ["--for", command]
    for path, value in overrides(options).items():
        if value is not None:
            arguments += [OVERRIDES[path], value]
    if options.config is not None:
        arguments += ["--", str(options.config)]
    return arguments


def add_state(parser: argparse.ArgumentParser, owner: str = "the agent") -> None:
    """Add the options that ``state_directory`` reads. ``owner``: of the state directory."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"the configuration of {owner}, which names the state directory",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help=f"the state directory of {owner}, whatever the configuration says",
    )
    parser.add_argument(
        "--socket",
        metavar="FILE",
        help=f"the control socket of {owner}, control.sock in its state directory",
    )


def state_directory(options: argparse.Namespace, config: Config) -> Path:
    """Return the state directory of the agent that the options of ``add_state`` name.

    Raises ``ConfigError``.
    """
    if options.socket is None:
        return Path(config.state.dir)
    if options.state_dir is not None:
        raise ConfigError("--socket and --state-dir name the same directory: leave one out")
    path = Path(options.socket)
    if path.name != SOCKET_NAME:
        raise ConfigError(f"--socket: expected the path of a {SOCKET_NAME}, got {path}")
    return path.parent


def seconds(option: str, text: str) -> float:
    """Return the seconds of an option's duration; raises ``ConfigError``."""
    try:
        return Duration(text).seconds
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table with a head; print nothing without rows."""
    sys.stdout.writelines(f"{line}\n" for line in table_lines(head, rows))


def table_lines(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with a head; none without rows."""
    if not rows:
        return []
    cells = [list(head)]
    for row in rows:
        cells.append([escaped(cell) for cell in row])  # a name could move the cursor

    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[str] = []
    for row_cells in cells:
        padded = [cell.ljust(width) for cell, width in zip(row_cells, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def due(left: float | None) -> str:
    """Return the time to NotBefore for a table: ``in 14m05s``, ``43s ago``, ``-`` if unknown."""
    if left is None:
        return "-"
    text = span(round(abs(left)))
    if left < 0:
        return f"{text} ago"
    return f"in {text}"


def print_json(items: Iterable[object]) -> None:
    """Print one JSON object per line."""
    sys.stdout.writelines(json_line(item).decode() + "\n" for item in items)
