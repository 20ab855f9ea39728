"""``notbefore check-config``: what is wrong with a configuration, or what it amounts to.

With ``--connect`` the sinks and the section ``otlp`` are asked whether they would accept a message. None is sent.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from notbefore.commands.main import WRONG
from notbefore.commands.options import add_configuration, add_json, overrides
from notbefore.commands.tables import print_json, table
from notbefore.config.load import dump, examine, values
from notbefore.config.model import Config
from notbefore.config.warnings import broken, warnings
from notbefore.core.text import escaped
from notbefore.courier.http import Http
from notbefore.courier.message import Asked
from notbefore.courier.redact import Redactor, known_secrets
from notbefore.courier.sinks import make, try_out
from notbefore.errors import ConfigError, Mistake, SendError
from notbefore.logs import set_up
from notbefore.otlp.exporter import learn
from notbefore.web.access import access


class Answer(Struct, frozen=True):
    """Whether a receiver would accept a message; ``None``: it cannot be asked."""

    sink: str
    kind: str
    accepts: bool | None
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and what else is wanted of it."""
    add_configuration(parser)
    parser.add_argument(
        "--connect", action="store_true", help="ask each sink whether it would accept a message; send none"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 if there is a warning")
    add_json(parser, "one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit code. Raises ``ConfigError`` for what is wrong."""
    set_up("text", "critical")  # a library's log line about an address may hold a secret
    try:
        return _run(options)
    except ConfigError as error:
        if not options.json:
            raise
        keys = ("file", "line", "column", "key", "text")
        mistakes = [dict(zip(keys, (*one.place, one.key, one.text), strict=True)) for one in error.mistakes]
        print_json([{"ok": False, "error": str(error), "mistakes": mistakes}], sys.stdout)
        return WRONG


def _run(options: argparse.Namespace) -> int:
    config, notes = _examined(options)
    found = warnings(config, options.config)
    if not options.json:
        sys.stderr.writelines(f"notbefore: warning: {escaped(text)}\n" for text in found)
        sys.stderr.writelines(f"notbefore: note: {escaped(text)}\n" for text in notes)
    answers = connect(config, options.config) if options.connect else []
    refused = any(one.accepts is False for one in answers)
    strict = options.strict and bool(found)
    if options.json:
        shown = {"sinks": answers} if options.connect else {"config": values(config)}
        ok = not (strict or refused)
        print_json([{"ok": ok, "error": None, "warnings": found, "notes": notes, **shown}], sys.stdout)
    elif options.connect:
        _show(answers)
        sys.stdout.write(f"{_verdict(options, found)}{' A receiver would refuse a message.' if refused else ''}\n")
    else:
        sys.stdout.write(f"{dump(config)}# {_verdict(options, found)}\n")  # a comment: what is printed stays YAML
    return WRONG if strict else int(refused)


def _examined(options: argparse.Namespace) -> tuple[Config, list[str]]:
    """Return the configuration, and notes about who may read; raises ``ConfigError`` with all that is wrong."""
    trial = None if options.connect else try_out  # `connect` makes each sink by itself
    config, places, mistakes = examine(options.config, os.environ, overrides(options), trial=trial)
    mistakes += [Mistake(places.nearest(key), key, text) for key, text in broken(config)]
    notes: list[str] = []
    try:
        notes = access(config.server).check_listen(config.server.listen)  # raises where it would let everybody read
    except ConfigError as error:
        text = str(error).removeprefix("server.listen: ")
        key = "server.web_config_file" if text == str(error) else "server.listen"
        mistakes += error.mistakes or [Mistake(places.nearest(key), key, text)]
    if mistakes:
        raise ConfigError.of(mistakes)
    return config, notes


def _verdict(options: argparse.Namespace, found: list[str]) -> str:
    """The last line: whether an agent would start with it."""
    name = options.config or "The configuration (no file: defaults, environment and command line)"
    return f"{name} is valid{f', with {len(found)} warning(s): see above' if found else ''}."


def connect(config: Config, path: Path | None) -> list[Answer]:
    """Ask each sink, and the receivers of the section ``otlp``; ``path`` is the file, for what cannot be asked."""
    redact = Redactor(known_secrets(config.sinks))
    set_up("text", "critical", redact)  # errors are shown in the table
    receivers: list[tuple[str, str, Callable[[], Any]]] = [
        (name, sink.kind, partial(make, name, sink, config.messages)) for name, sink in config.sinks.items()
    ]
    if config.otlp is not None:
        from notbefore.otlp.sender import Sender  # noqa: PLC0415 - needs a library that few have

        learn(config.otlp.headers, redact)
        receivers.append(("otlp", "metrics", partial(Sender, config.otlp, "metrics", Http)))
    answers = []
    for name, kind, make_sink in receivers:
        asked = _ask(make_sink, f"`notbefore drill {path or 'CONFIG'} --sink {name}`")
        answers.append(Answer(name, kind, asked.accepts, redact(asked.remark)))
    return answers


def _show(answers: list[Answer]) -> None:
    if not any(one.sink != "otlp" for one in answers):
        sys.stdout.write("There is no sink in this configuration: nobody is notified.\n")
    words = {True: "yes", False: "no", None: "-"}
    rows = [(one.sink, one.kind, words[one.accepts], one.reason) for one in answers]
    table(("SINK", "KIND", "ACCEPTS", "REMARK"), rows, sys.stdout)


def _ask(make_sink: Callable[[], Any], drill: str) -> Asked:
    """Return whether it accepts, and a remark; ``drill``: the command that would show it."""
    try:
        with closing(make_sink()) as sink:
            asked = sink.connect() or Asked()  # an exporter of OTLP says nothing
            if asked == Asked(None):
                return Asked(None, f"it cannot be checked without sending a message: {drill} sends an exercise")
            return asked
    except (ConfigError, SendError) as error:
        return Asked(accepts=False, remark=str(error))
