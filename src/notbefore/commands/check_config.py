"""``notbefore check-config``: what is wrong with a configuration, or what it amounts to.

With ``--connect`` the sinks and the section ``otlp`` are asked whether they would accept a message. None is sent.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

from notbefore.commands.options import add_configuration, load_configuration
from notbefore.commands.tables import table
from notbefore.config.load import dump, files, plain_secrets, warnings
from notbefore.config.model import Config
from notbefore.config.sinks import Connection, Messages, Otlp, SinkConfig, Webhook
from notbefore.delivery.http import Http
from notbefore.delivery.message import ConnectableSink, Sink
from notbefore.delivery.redact import Redactor, known_secrets
from notbefore.delivery.sinks import check_templates, make, try_out
from notbefore.errors import ConfigError, SendError
from notbefore.imds.client import ImdsClient
from notbefore.logs import set_up
from notbefore.otlp.exporter import learn
from notbefore.web.access import access, load_web_config

LONGEST_WORD: Final = 16  # characters; what is longer in an address may be a key
CANNOT_CONNECT: Final = "this sink cannot be checked without sending a message: use `notbefore drill`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and what else is wanted of it."""
    add_configuration(parser)
    parser.add_argument("--connect", action="store_true", help="ask each sink whether it would accept a message")
    parser.add_argument("--files", action="store_true", help="list the other files that the configuration names")
    parser.add_argument(
        "--no-inline-secrets", action="store_true", help="fail where a secret stands in the file itself"
    )


def run(options: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit code. Raises ``ConfigError`` for what is wrong."""
    set_up("text", "critical")  # a library's log line about an address may hold a secret
    config = load_configuration(options, None if options.connect else try_out)  # `connect` makes each sink by itself
    if options.no_inline_secrets:
        _refuse_inline_secrets(config)
    if options.files:
        web = config.server.web_config_file
        named = [*files(config), *(load_web_config(Path(web)).files if web else ())]
        sys.stdout.writelines(f"{path}\n" for path in named)
        return 0
    ImdsClient(config.imds.endpoint)  # raises what is wrong with the address
    for text in [*warnings(config, options.config), *access(config.server).check_listen(config.server.listen)]:
        sys.stderr.write(f"notbefore: warning: {text}\n")
    if options.connect:
        return connect(config, sys.stdout)
    sys.stdout.write(dump(config))
    return 0


def _refuse_inline_secrets(config: Config) -> None:
    """Raise ``ConfigError`` that says where each secret is to be moved."""
    addresses = {f"sinks.{name}.webhook.url": sink.webhook for name, sink in config.sinks.items()}
    plain = [key for key in plain_secrets(config) if not _holds_no_key(addresses.get(key))]
    if plain:
        raise ConfigError(
            f"these secrets stand in the configuration, which every user of this machine can read: {', '.join(plain)}."
            " Write each into a file of root's (install -m 0600 /dev/stdin /etc/notbefore/credentials/NAME) and name it"
            " instead: KEY_credential: NAME, or for a header {credential: NAME}"
        )


def _holds_no_key(webhook: Webhook | None) -> bool:
    """Whether its address is host and path alone, without a user, a query, or a part of the path that is like a key."""
    if webhook is None:
        return False
    url = urlsplit(webhook.url.reveal())
    words = max(map(len, url.path.split("/"))) <= LONGEST_WORD
    return words and not (url.username or url.password or url.query or url.fragment)


def connect(config: Config, out: TextIO) -> int:
    """Print which sinks would accept a message; returns 1 if one of those that can be asked would not."""
    redact = Redactor(known_secrets(config.sinks))
    set_up("text", "critical", redact)  # errors are shown in the table
    if not config.sinks:
        out.write("There is no sink in this configuration.\n")
    asked = [
        (name, settings.kind, _ask(partial(_sink, name, settings, config.messages)))
        for name, settings in config.sinks.items()
    ]
    if config.otlp is not None:
        asked += _exports(config.otlp, redact)
    rows = [(name, kind, answer, redact(reason)) for name, kind, (answer, reason) in asked]
    table(("SINK", "KIND", "ACCEPTS", "REASON"), rows, out)
    return 1 if any(answer == "no" for _, _, answer, _ in rows) else 0


def _sink(name: str, settings: SinkConfig, messages: Messages) -> Sink:
    check_templates(settings)
    return make(name, settings, messages)


def _exports(otlp: Otlp, redact: Redactor) -> list[tuple[str, str, tuple[str, str]]]:
    from notbefore.otlp.sender import Sender  # noqa: PLC0415 - needs a library that few have

    metrics, logs = Connection.of(otlp), otlp.logs or Connection.of(otlp)
    for connection in (metrics, logs):
        learn(connection.headers, redact)
    asked = [("otlp", "metrics", _ask(partial(Sender, metrics, "metrics", Http, redact)))] if otlp.metrics else []
    if otlp.agent_log != "none":
        asked.append(("otlp", "agent_log", _ask(partial(Sender, logs, "logs", Http, redact))))
    return asked


def _ask(make_sink: Callable[[], Any]) -> tuple[str, str]:
    """Return ``yes``, ``no`` or ``-`` (cannot be asked), and the reason."""
    try:
        with closing(make_sink()) as sink:
            if not isinstance(sink, ConnectableSink):
                return "-", CANNOT_CONNECT
            sink.connect()
    except (ConfigError, SendError) as error:
        return "no", str(error)
    return "yes", ""
