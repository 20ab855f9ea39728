"""``notbefore discover``: where is IMDS?"""

import argparse
import sys

from notbefore.commands.options import add_configuration, add_json, load_configuration
from notbefore.commands.tables import print_json
from notbefore.core.text import escaped
from notbefore.imds.elsewhere import search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration: it says where to look first, and whether to look further."""
    add_configuration(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print each place that was looked at; returns 0 if IMDS answers at the last one."""
    imds = load_configuration(options).imds
    remarks = sys.stderr if options.json else sys.stdout
    for step in search(imds.endpoint, imds.api_version):
        if options.json:
            print_json([step], sys.stdout)
        else:
            sys.stdout.write(f"{escaped(str(step))}\n")
        sys.stdout.flush()  # the next one may take its time
        if step.answers:
            return 0
        if not imds.discover:
            remarks.write("imds.discover is false: no other place is looked at\n")
            break
    remarks.write("IMDS was not found. docs/discovery.md explains the places; `notbefore demo` needs no Azure VM.\n")
    return 1
