"""``notbefore version``."""

import argparse
import sys

import notbefore
from notbefore.commands.options import add_json
from notbefore.commands.tables import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The form of the answer."""
    add_json(parser, "JSON")


def run(options: argparse.Namespace) -> int:
    """Print the version; returns the exit code."""
    if getattr(options, "json", False):  # `notbefore --version` has no such option
        print_json([{"version": notbefore.__version__}], sys.stdout)
    else:
        sys.stdout.write(f"notbefore {notbefore.__version__}\n")
    return 0
