"""``notbefore version``."""

import argparse
import sys

import notbefore


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """The command has none."""


def run(_options: argparse.Namespace) -> int:
    """Print the version; returns the exit code."""
    sys.stdout.write(f"notbefore {notbefore.__version__}\n")
    return 0
