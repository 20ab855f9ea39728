"""What several commands have in common: which configuration, and which of its keys the command line overrides."""

import argparse
import os
from pathlib import Path

from notbefore.config.load import load
from notbefore.config.model import Config, default_state_dir
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, ``--listen``, ``--imds`` and ``--state-dir``: what ``load_configuration`` reads."""
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="a YAML file; without one every key has its default"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="server.listen: where to serve")
    parser.add_argument("--imds", metavar="URL", help="imds.endpoint: another IMDS, such as the address of a simulator")
    parser.add_argument(
        "--state-dir", metavar="DIR", help=f"state.dir: where the state is kept (default {default_state_dir()})"
    )


def add_json(parser: argparse.ArgumentParser, what: str = "JSON, one object a line") -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=what)


def load_configuration(options: argparse.Namespace) -> Config:
    """Return the configuration that the options name; raises ``ConfigError``."""
    return load(options.config, os.environ, overrides(options))


def overrides(options: argparse.Namespace) -> dict[str, str | None]:
    """Return what the command line says instead of the configuration, by the paths of the keys."""
    return {"server.listen": options.listen, "imds.endpoint": options.imds, "state.dir": options.state_dir}


def add_state(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--state-dir``, for commands that work on the state directory of an agent."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the agent's configuration: it names the state directory"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the state directory of the agent, whatever the configuration says"
    )


def load_state_configuration(options: argparse.Namespace) -> Config:
    """Return the configuration for its ``state.dir``; the sinks need no secrets. Raises ``ConfigError``."""
    return load(options.config, os.environ, {"state.dir": options.state_dir}, sending=False)


def seconds(option: str, text: str) -> float:
    """Return a duration that an option was given; raises ``ConfigError``."""
    try:
        return Duration(text).seconds
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
