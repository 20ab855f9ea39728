"""``notbefore fleet approve EVENT_ID``: let Azure start an event now, from outside its VMs.

The command shows the event with all affected VMs, and asks whether to approve it. A running
instance sends the request.
"""

import argparse

from notbefore.commands import approve
from notbefore.commands.fleet import require_instance
from notbefore.commands.options import load_configuration, state_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``notbefore approve``."""
    approve.add_arguments(parser, "an instance of `notbefore fleet`", "notbefore events --fleet")


def run(options: argparse.Namespace) -> int:
    """Show the event, ask, and approve it; return the exit code. Raises ``NotBeforeError``."""
    directory = state_directory(options, load_configuration(options, sending=False))
    require_instance(directory)
    return approve.approve(options, directory)
