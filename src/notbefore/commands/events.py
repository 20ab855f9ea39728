"""``notbefore events``: show the listed events of a running agent, or the events of a fleet."""

import argparse
import sys

from notbefore.commands.client import add_agent, agent_client
from notbefore.commands.listing import UNKNOWN, ask
from notbefore.commands.options import add_json, print_json
from notbefore.commands.watch import watch
from notbefore.errors import NotBeforeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the agent's address, ``--fleet``, ``--watch`` and ``--json``."""
    add_agent(parser)
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="ask an instance of `notbefore fleet` for the events of the fleet",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help=(
            "keep the list up to date until Ctrl-C; if the output is no terminal, print a line for"
            " each change"
        ),
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Show the listed events; return the exit code.

    Raises ``NotBeforeError`` if the agent or IMDS does not answer.
    """
    client = agent_client(options)
    if options.watch:
        return watch(client, fleet=options.fleet, as_json=options.json)
    listing = ask(client, fleet=options.fleet)
    if options.json:
        print_json(listing.items)
    else:
        sys.stdout.writelines(f"{line}\n" for line in listing.lines)
    if listing.problem:  # an error must not look like an empty list
        raise NotBeforeError(f"{UNKNOWN}: {listing.problem}")
    return 0
