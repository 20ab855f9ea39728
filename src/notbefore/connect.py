"""``notbefore check-config --connect``: would the sinks take a message? Nothing is sent."""

from typing import Final, TextIO

from notbefore.config import Config
from notbefore.delivery.courier import known_secrets
from notbefore.delivery.message import ConnectableSink
from notbefore.delivery.redact import Redactor
from notbefore.delivery.settings import Links, SinkConfig
from notbefore.delivery.sinks import check_templates, make
from notbefore.errors import ConfigError, SendError
from notbefore.logs import set_up
from notbefore.show import table

CANNOT_BE_ASKED: Final = "it tells only when it is sent something: try `notbefore drill`"


def connect(config: Config, out: TextIO) -> int:
    """Ask them; returns 0 if none of those that can be asked says no."""
    redact = Redactor(known_secrets(config.sinks))
    set_up("text", "critical", redact)  # what goes wrong stands in the table
    if not config.sinks:
        out.write("There is no sink in this configuration.\n")
    rows: list[tuple[str, ...]] = []
    for name, settings in config.sinks.items():
        answer, why = _ask(name, settings, config.links)
        rows.append((name, settings.kind, answer, redact(why)))
    table(("SINK", "KIND", "WOULD TAKE IT", "WHY"), rows, out)
    return 1 if any(answer == "no" for _, _, answer, _ in rows) else 0


def _ask(name: str, settings: SinkConfig, links: Links) -> tuple[str, str]:
    try:
        check_templates(settings)
        sink = make(name, settings, links)
    except ConfigError as error:
        return "no", str(error)
    try:
        if not isinstance(sink, ConnectableSink):
            return "-", CANNOT_BE_ASKED
        sink.connect()
    except SendError as error:
        return "no", str(error)
    finally:
        sink.close()
    return "yes", ""
