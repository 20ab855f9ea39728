"""``notbefore health``: is a running agent healthy?"""

import argparse
import sys

from notbefore.commands.client import add_agent, agent_client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the agent is."""
    add_agent(parser)
    parser.add_argument("--ready", action="store_true", help="also fail while it does not see what IMDS says")


def run(options: argparse.Namespace) -> int:
    """Print ``ok`` and return 0; raises ``NotBeforeError``, with the agent's reasons, if it is not healthy."""
    agent_client(options).ask("/readyz" if options.ready else "/healthz")
    sys.stdout.write("ok\n")
    return 0
