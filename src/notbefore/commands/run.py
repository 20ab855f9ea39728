"""``notbefore run``: run the agent."""

import argparse
from functools import partial

from notbefore.agent.agent import Agent
from notbefore.commands.options import add_configuration, begin, check_arguments, load_configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, and the second switch for approvals."""
    add_configuration(parser)
    parser.add_argument(
        "--allow-approval",
        action="store_true",
        help="permit approvals; approval.enabled must also be true",
    )


def run(options: argparse.Namespace) -> int:
    """Watch until SIGTERM or SIGINT; return the exit code.

    Raises ``NotBeforeError`` if it cannot start.
    """
    config = begin(options)
    read_config = partial(load_configuration, options)
    agent = Agent(
        config,
        read_config,
        allow_approval=options.allow_approval,
        check_arguments=check_arguments(options, "run"),
    )
    return agent.run()
