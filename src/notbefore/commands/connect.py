"""``notbefore check-config --connect``: would the sinks and the section ``otlp`` take a message? Nothing is sent."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, Final, TextIO

from notbefore.commands.tables import table
from notbefore.config.model import Config
from notbefore.config.sinks import Connection, Links, Otlp, SinkConfig
from notbefore.delivery.courier import known_secrets
from notbefore.delivery.message import ConnectableSink, Sink
from notbefore.delivery.redact import Redactor
from notbefore.delivery.sinks import check_templates, make
from notbefore.errors import ConfigError, SendError
from notbefore.logs import set_up
from notbefore.otlp.exporter import learn

CANNOT_BE_ASKED: Final = "it tells only when it is sent something: try `notbefore drill`"


def connect(config: Config, out: TextIO) -> int:
    """Ask them; returns 0 if none of those that can be asked says no."""
    redact = Redactor(known_secrets(config.sinks))
    set_up("text", "critical", redact)  # what goes wrong stands in the table
    if not config.sinks:
        out.write("There is no sink in this configuration.\n")
    asked = [
        (name, settings.kind, _ask(partial(_sink, name, settings, config.links)))
        for name, settings in config.sinks.items()
    ]
    if config.otlp is not None:
        asked += _exports(config.otlp, redact)
    rows = [(name, kind, answer, redact(why)) for name, kind, (answer, why) in asked]
    table(("SINK", "KIND", "WOULD TAKE IT", "WHY"), rows, out)
    return 1 if any(answer == "no" for _, _, answer, _ in rows) else 0


def _sink(name: str, settings: SinkConfig, links: Links) -> Sink:
    check_templates(settings)
    return make(name, settings, links)


def _exports(otlp: Otlp, redact: Redactor) -> list[tuple[str, str, tuple[str, str]]]:
    from notbefore.otlp.transport import Sender  # noqa: PLC0415 - needs a library that few have

    metrics, logs = Connection.of(otlp), otlp.logs or Connection.of(otlp)
    for connection in (metrics, logs):
        learn(connection.headers, redact)
    asked = [("otlp", "metrics", _ask(partial(Sender, metrics, "metrics")))] if otlp.metrics else []
    if otlp.agent_log != "none":
        asked.append(("otlp", "agent_log", _ask(partial(Sender, logs, "logs"))))
    return asked


def _ask(made: Callable[[], Any]) -> tuple[str, str]:
    try:
        with closing(made()) as far:
            if not isinstance(far, ConnectableSink):
                return "-", CANNOT_BE_ASKED
            far.connect()
    except (ConfigError, SendError) as error:
        return "no", str(error)
    return "yes", ""
