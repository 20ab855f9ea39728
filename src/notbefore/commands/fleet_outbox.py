"""``notbefore fleet outbox``: list, send again and delete the deliveries of a running instance.

An instance has the deliveries of the partitions that it reads: ask each one, on its machine.
"""

import argparse

from notbefore.commands import outbox
from notbefore.commands.fleet import require_instance
from notbefore.commands.options import load_configuration, state_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions, and the options that choose the instance and the deliveries."""
    outbox.add_actions(parser, owner="an instance of `notbefore fleet`", over_http=False)


def run(options: argparse.Namespace) -> int:
    """Carry out the action; return the exit code. Raises ``NotBeforeError``."""
    outbox.check(options)
    config = load_configuration(options, sending=False)
    directory = state_directory(options, config)
    require_instance(directory)
    return outbox.carry_out(options, config, directory)
