"""``notbefore fleet``: one instance that reads the changes of all VMs."""

import argparse
import logging
from pathlib import Path

from notbefore.commands.options import load_configuration
from notbefore.config.sinks import check_extra
from notbefore.config.warnings import warnings
from notbefore.logs import set_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and what differs between instances on one machine."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file with a section `fleet`")
    parser.add_argument("--listen", metavar="HOST:PORT", help="server.listen: where to serve")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="state.dir: where the outbox is kept; each instance has its own"
    )
    parser.set_defaults(imds=None)


def run(options: argparse.Namespace) -> int:
    """Read until SIGTERM or SIGINT; returns the exit code. Raises ``NotBeforeError`` where it cannot start."""
    config = load_configuration(options)
    check_extra("fleet")
    set_up(config.log.format, config.log.level)
    for text in warnings(config, options.config):
        logging.getLogger("notbefore.config").warning(text)
    from notbefore.fleet.instance import FleetInstance  # after the check above

    return FleetInstance(config).run()
