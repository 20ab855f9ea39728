"""``notbefore fleet mute``: for a time, send no notifications of matching events.

All instances share the mutes.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final
from uuid import uuid4

from notbefore.agent.control_socket import user_name
from notbefore.commands.options import load_configuration, seconds
from notbefore.config.model import FleetConfig
from notbefore.config.sinks import check_extra
from notbefore.core.change import SILENT
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.text import escaped, one_of
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.fleet.mutes import LONGEST, NOTE, SHORTEST, Mute, read_mutes, write_mutes
from notbefore.fleet.shown_waves import MATCHERS

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
        help=f"what to mute: {', '.join(MATCHERS)}",
    )
    parser.add_argument("--for", dest="seconds", metavar="TIME", help="for how long (default 4h)")
    parser.add_argument("--comment", metavar="TEXT", help="why: shown on the page")
    parser.add_argument("--end", metavar="ID", help="end a mute now")


def run(options: argparse.Namespace) -> int:
    """Mute, end a mute, or list them; returns the exit code. Raises ``NotBeforeError``."""
    begun = _begun(options) if options.match or options.seconds or options.comment else None
    config = load_configuration(options)
    if config.fleet is None:
        raise ConfigError("the configuration has no section `fleet`")
    check_extra("fleet")
    import asyncio  # only for this command

    from notbefore.fleet.keeper import in_one_line  # as above
    from notbefore.fleet.snapshot_store import FAILURES  # only for this command, with Azure's SDK

    try:
        left = asyncio.run(_changed(config.fleet, Path(config.state.dir), begun, options.end))
    except FAILURES as error:
        raise NotBeforeError(f"the mutes cannot be written or read: {in_one_line(error)}") from None
    sys.stdout.writelines(f"{one.id}  {escaped(one.words)}\n" for one in left)
    return 0


def _begun(options: argparse.Namespace) -> Mute:
    match: dict[str, str] = {}
    for text in options.match:
        name, sign, value = text.partition("=")
        if not sign or not value:
            raise ConfigError(f"--match: expected NAME=VALUE, such as vm=web_0, got {text!r}")
        if name not in MATCHERS:
            raise ConfigError(f"--match: there is no {name!r}{one_of(name, MATCHERS)}")
        if name in match:
            raise ConfigError(
                f"--match: {name} is given twice, and all must match: make a mute for each value"
            )
        match[name] = value
    if options.end or not (match and (options.comment or "").strip()):
        raise ConfigError(
            "expected --match NAME=VALUE and --comment TEXT, or --end ID alone, or none for a list"
        )
    lasts = seconds("--for", options.seconds or "4h")
    if not SHORTEST <= lasts <= LONGEST:
        raise ConfigError(f"--for: expected 1m to {LONGEST / 86_400:.0f}d, got {options.seconds}")
    word = match.get("event_type", SILENT)
    if word.casefold() not in map(str.casefold, TYPES):
        sys.stderr.write(
            f"notbefore: warning: --match: no event has the type {word!r}{one_of(word, TYPES)}\n"
        )
    who = user_name(os.getuid() if hasattr(os, "getuid") else None, os.environ.get("SUDO_USER", ""))
    return Mute(uuid4().hex[:8], match, who, options.comment, time.time() + lasts)


async def _changed(
    fleet: FleetConfig, state_dir: Path, begun: Mute | None, ended: str | None
) -> list[Mute]:
    """Begin or end a mute, if asked; return the present mutes."""
    from notbefore.fleet.instance import make_snapshots  # 30 MB, only for this command
    from notbefore.fleet.sdk import make_consumer  # as above

    def changed(body: bytes) -> bytes:
        mutes = {one.id: one for one in read_mutes(body)}
        if begun is not None:
            mutes[begun.id] = begun
        elif mutes.pop(str(ended), None) is None:
            raise NotBeforeError(
                f"there is no mute {ended}: `notbefore fleet mute CONFIG` lists them"
            )
        return write_mutes(list(mutes.values()), time.time())

    snapshots, credential = make_snapshots(fleet, state_dir)
    client = make_consumer(fleet, credential, snapshots)  # it connects to nothing
    try:
        if begun is not None or ended:
            await snapshots.change(NOTE, changed)
        return [one for one in read_mutes(await snapshots.read(NOTE)) if one.until > time.time()]
    finally:
        for one in (client, snapshots, credential):
            if one is not None:
                await one.close()
