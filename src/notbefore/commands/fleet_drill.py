"""``notbefore fleet drill``: send an exercise through the routes and sinks of a running instance.

It goes through the instance's outbox and courier. No partition has it, and no agent reports it.
"""

import argparse
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from notbefore.commands import drill
from notbefore.commands.fleet import require_fleet, require_instance
from notbefore.commands.fleet_mute import matchers_of
from notbefore.commands.options import load_configuration
from notbefore.core.record import FleetFacts
from notbefore.errors import ConfigError
from notbefore.fleet.hub_records import Place
from notbefore.fleet.wave import vm_of

VM_NAME: Final = "exercise"  # of the VM that the exercise affects
FACTS: Final = FleetFacts(fleet_events=1, fleet_vms=1, fleet_reported_by=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``notbefore drill``, and the place of the exercise."""
    drill.add_arguments(parser, "the instance")
    parser.add_argument(
        "--match",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="where the exercise happens, for routes that match it: subscription, resource_group,"
        " region, scale_set, vm, or tag=NAME=VALUE",
    )


def run(options: argparse.Namespace) -> int:
    """Send the exercise; return 0 if every sink was reached. Raises ``NotBeforeError``."""
    if options.config is None:
        raise ConfigError("fleet drill: expected CONFIG, the YAML file of the running instance")
    place, name = _place(options.match)
    config = load_configuration(options, sending=False)
    require_fleet(config)
    require_instance(Path(config.state.dir))
    drill.check_sink(config, options.sink)
    vm = vm_of(place, (name,))
    routed = vm  # of an unknown place, so every route by place matches
    if options.match:
        routed = replace(vm, vm_id=VM_NAME)  # its place is known: empty values do not match
    source = drill.Source(name=name, vm=vm, routed=routed, facts=FACTS)
    return drill.send_and_report(options, config, source)


def _place(texts: list[str]) -> tuple[Place, str]:
    """Return the place of ``--match``, and the name of the VM; raises ``ConfigError``."""
    matchers = matchers_of(texts)
    if "event_type" in matchers:
        raise ConfigError("--match: event_type is chosen by --scenario")
    tags: tuple[tuple[str, str], ...] = ()
    if "tag" in matchers:
        tag, _, value = matchers["tag"].partition("=")
        tags = ((tag.casefold(), value),)
    place = Place(
        subscription=matchers.get("subscription", ""),
        resource_group=matchers.get("resource_group", ""),
        region=matchers.get("region", ""),
        scale_set=matchers.get("scale_set", ""),
        tags=tags,
    )
    return place, matchers.get("vm", VM_NAME)
