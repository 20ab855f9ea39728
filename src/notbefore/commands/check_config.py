"""``notbefore check-config``: show the mistakes in a configuration, and warnings.

It makes no connections: ``notbefore drill`` shows whether a receiver accepts a message.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from notbefore.commands.main import OK, WRONG
from notbefore.commands.options import add_configuration, add_json, overrides, print_json
from notbefore.config.extras import check_extra
from notbefore.config.lint import nearest_existing, warnings
from notbefore.config.load import examine
from notbefore.config.model import Config
from notbefore.config.yaml_file import Places
from notbefore.core.text import escaped
from notbefore.courier.sinks import try_out
from notbefore.errors import ConfigError, Mistake, SendError
from notbefore.logs import set_up
from notbefore.net.addresses import check_address
from notbefore.web.access import Access

# command -> the module that imports all that it needs
STARTING: Final = {"run": "notbefore.agent.agent", "fleet": "notbefore.fleet.instance"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, ``--strict`` and ``--json``."""
    add_configuration(parser)
    parser.add_argument(
        "--for",
        dest="starting",
        choices=STARTING,
        default="run",
        help="the command that is to start with it (default: run)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 if there is a warning")
    add_json(parser, "one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the result; return the exit code.

    Raises ``ConfigError`` with the mistakes, unless ``--json``.
    """
    set_up("text", "critical")  # a library's log line about an address may hold a secret
    try:
        config, places = _examined(options)
    except ConfigError as error:
        if not options.json:
            raise
        keys = ("file", "line", "column", "key", "text")
        mistakes = [
            dict(zip(keys, (*one.place, one.key, one.text), strict=True)) for one in error.mistakes
        ]
        print_json([{"ok": False, "error": str(error), "mistakes": mistakes}])
        return WRONG
    found = warnings(config, places)
    code = WRONG if options.strict and found else OK
    if options.json:
        print_json([{"ok": code == OK, "error": None, "warnings": found}])
        return code
    sys.stderr.writelines(f"notbefore: warning: {escaped(text)}\n" for text in found)
    name = options.config or "The configuration (no file: defaults, environment and command line)"
    sys.stdout.write(
        f"{name} is valid{f', with {len(found)} warning(s): see above' if found else ''}.\n"
    )
    return code


def _examined(options: argparse.Namespace) -> tuple[Config, Places]:
    """Return the configuration and the place of each key.

    Raises ``ConfigError`` with all mistakes.
    """
    config, places, mistakes = examine(options.config, os.environ, overrides(options))
    if options.starting == "fleet":
        if config.fleet is None:
            text = "the section that names the hub to read is missing"
            mistakes.append(Mistake(places.nearest("fleet"), "fleet", text))
        check_extra("fleet")
    try:
        import_module(STARTING[options.starting])
    except ImportError as error:
        raise ConfigError(
            f"this installation is not complete ({error}): install it again"
        ) from None
    mistakes += _private_webhooks(config, places)
    place = nearest_existing(Path(config.state.dir))
    if not place.is_dir():
        text = f"it cannot be created: {place} is not a directory"
        mistakes.append(Mistake(places.nearest("state.dir"), "state.dir", text))
    for name, sink in config.sinks.items():
        try:
            try_out(name, sink)
        except ConfigError as error:
            key = f"sinks.{name}.{sink.kind}"
            mistakes.append(Mistake(places.nearest(key), key, str(error)))
    try:
        Access(config.server).check_listen()  # raises if everybody could read
    except ConfigError as error:
        text = str(error).removeprefix("server.listen: ")
        key = "server.web_config_file" if text == str(error) else "server.listen"
        mistakes += error.mistakes or [Mistake(places.nearest(key), key, text)]
    if mistakes:
        raise ConfigError.of(mistakes)
    return config, places


def _private_webhooks(config: Config, places: Places) -> Iterator[Mistake]:
    """Yield a mistake for each webhook whose address no message may be sent to.

    Host names are not resolved: that would need a connection.
    """
    for name, sink in config.sinks.items():
        if sink.webhook is None or sink.webhook.allow_private:
            continue
        host = urlsplit(sink.webhook.url.reveal()).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        key = f"sinks.{name}.webhook.url"
        try:
            check_address(host)
        except SendError as error:
            yield Mistake(places.nearest(key), key, str(error))
        except ValueError:  # a name
            continue
