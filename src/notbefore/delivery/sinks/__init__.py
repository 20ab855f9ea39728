"""The kinds of sinks: where each is implemented, and what must be installed for it. Imported on first use.

To add one: a module here with a class ``Sink``, a line in ``REGISTRY``, its settings in ``delivery.settings``, and a
test file; the contract tests pick it up.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from notbefore.config.sinks import Links, SinkConfig
from notbefore.delivery.message import Sink
from notbefore.errors import ConfigError


class Kind(Struct, frozen=True):
    """Where a kind of sink lives."""

    module: str
    needs: str | None = None  # a distribution's module beyond the base
    extra: str = ""  # the extra that installs it


REGISTRY: Final = {
    "slack": Kind("notbefore.delivery.sinks.slack"),
    "email": Kind("notbefore.delivery.sinks.email", "apprise", "apprise"),
    "apprise": Kind("notbefore.delivery.sinks.apprise", "apprise", "apprise"),
    "webhook": Kind("notbefore.delivery.sinks.webhook"),
    "alertmanager": Kind("notbefore.delivery.sinks.alertmanager"),
    "command": Kind("notbefore.delivery.sinks.command"),
    "event_hub": Kind("notbefore.delivery.sinks.event_hub", "azure.eventhub", "eventhub"),
    "windows_event_log": Kind("notbefore.delivery.sinks.windows_event_log", "win32evtlogutil", "windows"),
    "otlp_logs": Kind("notbefore.delivery.sinks.otlp_logs", "opentelemetry.proto", "otlp"),
}


def check_installed(config: SinkConfig) -> None:
    """Raise ``ConfigError`` where a library that the sink needs is not there; nothing is imported."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where there are sinks

    kind = REGISTRY[config.kind]
    if config.kind == "windows_event_log" and sys.platform != "win32":
        raise ConfigError("windows_event_log: there is such a log on Windows alone")
    if kind.needs is not None and not _found(kind.needs, find_spec):
        raise ConfigError(f"{config.kind} needs {kind.needs}: pip install 'azure-notbefore[{kind.extra}]'")
    settings = config.settings
    check_otlp_installed(getattr(settings, "protocol", ""))
    if (settings.title is not None or settings.body is not None) and find_spec("jinja2") is None:
        raise ConfigError("title and body need jinja2: pip install 'azure-notbefore[templates]'")


def check_otlp_installed(protocol: str) -> None:
    """Raise ``ConfigError`` where a library that the protocol of OTLP needs is not there."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where it is configured

    if protocol and not _found("opentelemetry.proto", find_spec):
        raise ConfigError("otlp needs opentelemetry-proto: pip install 'azure-notbefore[otlp]'")
    if protocol == "grpc" and not _found("grpc", find_spec):
        raise ConfigError("protocol grpc needs grpcio: pip install 'azure-notbefore[otlp-grpc]'")


def _found(name: str, find_spec: Callable[[str], object]) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def check_templates(config: SinkConfig) -> None:
    """Raise ``ConfigError`` where a template is none. What a template names is known only when it is filled in."""
    for key in ("title", "body"):
        source = getattr(config.settings, key)
        if source is None:
            continue
        from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - only who writes templates needs it

        from notbefore.delivery.render import compile_template  # noqa: PLC0415 - as above

        try:
            compile_template(source, str)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{key}: this is no template: {error.message} (its line {error.lineno})") from None


def try_out(name: str, config: SinkConfig, links: Links) -> None:
    """Make the sink as the courier would, and send nothing; raises ``ConfigError``. It imports what the sink needs."""
    from notbefore.delivery.redact import Redactor  # noqa: PLC0415 - as above

    check_templates(config)
    try:
        make(name, config, links).close()
    except (ConfigError, OSError, ValueError) as error:  # a file that holds no certificate, say
        redact = Redactor(secret.reveal() for secret in config.secrets.values())
        raise ConfigError(redact(str(error))) from None


def make(name: str, config: SinkConfig, links: Links) -> Sink:
    """The sink of that name; raises ``ConfigError`` when it cannot be made, a secret that cannot be read included."""
    check_installed(config)
    from importlib import import_module  # noqa: PLC0415 - as above

    module: Any = import_module(REGISTRY[config.kind].module)
    sink: Sink = module.Sink(name, config.settings, links)
    return sink
