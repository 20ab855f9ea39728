"""``notbefore fleet mute``: send no notifications of matching events for a time.

All instances share the mutes.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final
from uuid import uuid4

from notbefore.commands.fleet import require_fleet
from notbefore.commands.options import add_json, load_configuration, print_json, seconds
from notbefore.config.extras import check_extra
from notbefore.config.model import FleetConfig
from notbefore.core.change import SILENT
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.text import escaped, one_of
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.fleet.mutes import LONGEST_MUTE, NOTE, SHORTEST_MUTE, Mute, read_mutes, write_mutes
from notbefore.fleet.shown_waves import MATCHERS
from notbefore.process.control_socket import user_name

TYPES: Final = (*EVENT_TYPES, SILENT)  # of the fleet's events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration of an instance, which names the store of the mutes, and the mute."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="the configuration of an instance"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="state.dir of an instance without `checkpoints`"
    )
    parser.add_argument(
        "--match",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"the events to mute, by {', '.join(MATCHERS)}",
    )
    parser.add_argument(
        "--for", dest="seconds", metavar="TIME", help="how long to mute (default 4h)"
    )
    parser.add_argument("--comment", metavar="TEXT", help="the reason, which the page shows")
    parser.add_argument("--end", metavar="ID", help="end a mute now")
    add_json(parser, "print the mutes as JSON, one object per line")


def run(options: argparse.Namespace) -> int:
    """Begin a mute, end one, or list them; return the exit code. Raises ``NotBeforeError``."""
    new_mute: Mute | None = None
    if options.match or options.seconds or options.comment:
        new_mute = _new_mute(options)
    config = load_configuration(options)
    fleet = require_fleet(config)
    check_extra("fleet")
    import asyncio  # with Azure's SDK, which the extra `fleet` installs

    from notbefore.fleet.keeper import in_one_line
    from notbefore.fleet.snapshot_store import FAILURES

    state_dir = Path(config.state.dir)
    try:
        mutes = asyncio.run(_change_and_list(fleet, state_dir, new_mute, options.end))
    except FAILURES as error:
        raise NotBeforeError(f"the mutes cannot be written or read: {in_one_line(error)}") from None
    if options.json:
        print_json(mutes)
    else:
        sys.stdout.writelines(f"{mute.id}  {escaped(mute.words)}\n" for mute in mutes)
    return 0


def _new_mute(options: argparse.Namespace) -> Mute:
    """Return the mute that the options describe; raises ``ConfigError``."""
    match = matchers_of(options.match)
    comment = options.comment or ""
    if options.end or not match or not comment.strip():
        raise ConfigError(
            "expected --match NAME=VALUE and --comment TEXT, or --end ID alone, or none for a list"
        )
    duration = seconds("--for", options.seconds or "4h")
    if not SHORTEST_MUTE <= duration <= LONGEST_MUTE:
        longest = f"{LONGEST_MUTE / 86_400:.0f}d"
        raise ConfigError(f"--for: expected 1m to {longest}, got {options.seconds}")
    _warn_of_unknown_type(match.get("event_type", SILENT))

    uid = None
    if hasattr(os, "getuid"):
        uid = os.getuid()
    return Mute(
        id=uuid4().hex[:8],
        match=match,
        by=user_name(uid, os.environ.get("SUDO_USER", "")),
        comment=comment,
        until=time.time() + duration,
    )


def matchers_of(texts: list[str]) -> dict[str, str]:
    """Return the matchers of ``--match`` by name; raises ``ConfigError``."""
    match: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value:
            raise ConfigError(f"--match: expected NAME=VALUE, such as vm=web_0, got {text!r}")
        if name not in MATCHERS:
            raise ConfigError(f"--match: there is no {name!r}{one_of(name, MATCHERS)}")
        if name in match:
            raise ConfigError(
                f"--match: {name} is given twice, and all must match: create a mute for each value"
            )
        match[name] = value
    return match


def _warn_of_unknown_type(event_type: str) -> None:
    known_types = {name.casefold() for name in TYPES}
    if event_type.casefold() not in known_types:
        sys.stderr.write(
            f"notbefore: warning: --match: no event has the type {event_type!r}"
            f"{one_of(event_type, TYPES)}\n"
        )


async def _change_and_list(
    fleet: FleetConfig, state_dir: Path, new_mute: Mute | None, ended_id: str | None
) -> list[Mute]:
    """Begin or end a mute, if one is named; return the current mutes."""
    from notbefore.fleet.instance import make_snapshots  # 30 MB, only for this command
    from notbefore.fleet.sdk import make_consumer  # as above

    def change(body: bytes) -> bytes:
        mutes = {mute.id: mute for mute in read_mutes(body)}
        if new_mute is not None:
            mutes[new_mute.id] = new_mute
        elif ended_id in mutes:
            del mutes[ended_id]
        else:
            raise NotBeforeError(
                f"there is no mute {ended_id}: `notbefore fleet mute CONFIG` lists them"
            )
        return write_mutes(list(mutes.values()), time.time())

    snapshots, credential = make_snapshots(fleet, state_dir)
    client = make_consumer(fleet, credential, snapshots)  # it connects to nothing
    try:
        if new_mute is not None or ended_id:
            await snapshots.change(NOTE, change)
        mutes = read_mutes(await snapshots.read(NOTE))
        return [mute for mute in mutes if mute.until > time.time()]
    finally:
        for resource in (client, snapshots, credential):
            if resource is not None:
                await resource.close()
