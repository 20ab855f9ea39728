"""``notbefore fleet mute``: for a time, send no notifications of matching events. All instances share the mutes."""

import argparse
import getpass
import os
import sys
import time
from pathlib import Path
from typing import Final
from uuid import uuid4

from notbefore.commands.options import load_configuration, seconds
from notbefore.config.model import Config
from notbefore.config.sinks import check_extra
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.fleet.mutes import MATCHERS, NOTE, Mute, read_mutes, write_mutes

LONGEST: Final = 366 * 86_400.0  # seconds of a mute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration of an instance, which names the store of the mutes, and the mute."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the configuration of an instance")
    parser.add_argument("--state-dir", metavar="DIR", help="state.dir of an instance without `checkpoints`")
    parser.add_argument(
        "--match", action="append", default=[], metavar="NAME=VALUE", help=f"what to mute: {', '.join(MATCHERS)}"
    )
    parser.add_argument("--for", dest="seconds", default="4h", metavar="TIME", help="for how long, such as 4h")
    parser.add_argument("--comment", default="", metavar="TEXT", help="why: shown on the page")
    parser.add_argument("--end", metavar="ID", help="end a mute now")


def run(options: argparse.Namespace) -> int:
    """Mute, end a mute, or list them; returns the exit code. Raises ``NotBeforeError``."""
    check_extra("fleet")
    import asyncio  # only for this command

    from notbefore.fleet.checkpoints import FAILURES  # only for this command, with Azure's SDK

    begun = _begun(options) if options.match and not options.end else None
    try:
        left = asyncio.run(_changed(load_configuration(options), begun, options.end))
    except FAILURES as error:
        raise NotBeforeError(f"the mutes cannot be written or read: {error}") from None
    for one in left:
        sys.stdout.write(f"{one.id}  {one.words}\n")
    return 0


def _begun(options: argparse.Namespace) -> Mute:
    match = {}
    for text in options.match:
        name, sign, value = text.partition("=")
        if name not in MATCHERS or not sign or not value:
            raise ConfigError(f"--match: expected NAME=VALUE, got {text!r}; NAME{one_of(name, MATCHERS)}")
        match[name] = value
    if not options.comment:
        raise ConfigError("--comment: say why, for people who see the mute")
    lasts = seconds("--for", options.seconds)
    if lasts > LONGEST:
        raise ConfigError(f"--for: expected {LONGEST / 86_400:.0f}d at most, got {options.seconds}")
    who = os.environ.get("SUDO_USER") or getpass.getuser()
    return Mute(uuid4().hex[:8], match, who, options.comment, time.time() + lasts)


async def _changed(config: Config, begun: Mute | None, ended: str | None) -> list[Mute]:
    """Begin or end a mute, if asked; return the present mutes."""
    from notbefore.fleet.instance import make_snapshots  # 30 MB, only for this command
    from notbefore.fleet.sdk import make_consumer  # as above

    def changed(body: bytes) -> bytes:
        mutes = {one.id: one for one in read_mutes(body)}
        if begun is not None:
            mutes[begun.id] = begun
        elif mutes.pop(str(ended), None) is None:
            raise NotBeforeError(f"there is no mute {ended}: `notbefore fleet mute CONFIG` lists them")
        return write_mutes(list(mutes.values()), time.time())

    if config.fleet is None:
        raise ConfigError("the configuration has no section `fleet`")
    snapshots, credential = make_snapshots(config.fleet, Path(config.state.dir))
    client = make_consumer(config.fleet, credential, snapshots)  # it connects to nothing
    try:
        if begun is not None or ended:
            await snapshots.change(NOTE, changed)
        return [one for one in read_mutes(await snapshots.read(NOTE)) if one.until > time.time()]
    finally:
        for one in (client, snapshots, credential):
            if one is not None:
                await one.close()
