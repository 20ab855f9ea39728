"""``notbefore fleet``: run one instance, which reads the changes of all VMs."""

import argparse
from pathlib import Path

from notbefore.commands.options import add_log_level, begin, check_arguments
from notbefore.config.extras import check_extra
from notbefore.config.model import Config, FleetConfig
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.process.control_socket import NAME as SOCKET_NAME
from notbefore.process.control_socket import listens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, and the settings that differ between instances on one machine."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="a YAML file with a section `fleet`"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="server.listen: where to serve")
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="state.dir: the directory of the outbox; each instance has its own",
    )
    parser.add_argument(
        "--allow-approval",
        action="store_true",
        help="permit `notbefore fleet approve`; fleet.approval.enabled must also be true",
    )
    add_log_level(parser)


def run(options: argparse.Namespace) -> int:
    """Read until SIGTERM or SIGINT; return the exit code.

    Raises ``NotBeforeError`` if it cannot start.
    """
    config = begin(options)
    check_extra("fleet")
    from notbefore.fleet.instance import FleetInstance  # the extra `fleet` may not be installed

    instance = FleetInstance(
        config,
        check_arguments(options, "fleet"),
        allow_approval=options.allow_approval,
    )
    return instance.run()


# ---- for the commands that ask an instance


def require_fleet(config: Config) -> FleetConfig:
    """Return the section `fleet`. Raises ``ConfigError`` without it."""
    if config.fleet is None:
        raise ConfigError(
            "the configuration has no section `fleet`: name the configuration of an instance"
        )
    return config.fleet


def require_instance(directory: Path) -> None:
    """Raise ``NotBeforeError`` unless an instance listens in this state directory."""
    if not listens(directory):
        raise NotBeforeError(
            f"no instance of `notbefore fleet` listens at {directory / SOCKET_NAME}: run this on"
            " the machine of an instance, with its configuration or --state-dir"
        )
