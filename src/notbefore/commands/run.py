"""``notbefore run``: the agent."""

import argparse
import logging

from notbefore.agent.agent import Agent
from notbefore.commands.options import add_configuration, load_configuration
from notbefore.config.warnings import warnings
from notbefore.logs import set_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and the second key to approvals."""
    add_configuration(parser)
    parser.add_argument(
        "--allow-approval", action="store_true", help="events may be approved; approval.enabled must be true as well"
    )


def run(options: argparse.Namespace) -> int:
    """Watch until SIGTERM or SIGINT; returns the exit code. Raises ``NotBeforeError`` where it cannot start."""
    config = load_configuration(options)
    set_up(config.log.format, config.log.level)
    for text in warnings(config, options.config):
        logging.getLogger("notbefore.config").warning(text)
    return Agent(config, lambda: load_configuration(options), allow_approval=options.allow_approval).run()
