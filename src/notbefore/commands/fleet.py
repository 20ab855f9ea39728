"""``notbefore fleet``: run one instance, which reads the changes of all VMs."""

import argparse
from pathlib import Path

from notbefore.commands.options import begin, check_arguments
from notbefore.config.extras import check_extra


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


def run(options: argparse.Namespace) -> int:
    """Read until SIGTERM or SIGINT; return the exit code.

    Raises ``NotBeforeError`` if it cannot start.
    """
    config = begin(options)
    check_extra("fleet")
    from notbefore.fleet.instance import FleetInstance  # the extra `fleet` may not be installed

    return FleetInstance(config, check_arguments(options, "fleet")).run()
