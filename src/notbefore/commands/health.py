"""``notbefore health``: ask a running agent whether it is healthy."""

import argparse
import sys

from notbefore.commands.client import add_agent, agent_client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the agent's address and ``--ready``."""
    add_agent(parser)
    parser.add_argument(
        "--ready",
        action="store_true",
        help="also fail while the agent gets no valid answers from IMDS",
    )


def run(options: argparse.Namespace) -> int:
    """Print ``ok`` and return 0.

    Raises ``NotBeforeError`` with the agent's reasons if the agent is not healthy.
    """
    path = "/healthz"
    if options.ready:
        path = "/readyz"
    agent_client(options).ask(path)
    sys.stdout.write("ok\n")
    return 0
