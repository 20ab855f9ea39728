"""The kinds of sinks, a module each, named as the kind is in the configuration. Imported on first use.

CONTRIBUTING.md says how to add one.
"""

from importlib import import_module
from typing import Any

from notbefore.config.sinks import Messages, SinkConfig, check_installed
from notbefore.courier.message import Sink
from notbefore.courier.redact import Redactor, known_secrets
from notbefore.errors import ConfigError


def try_out(name: str, config: SinkConfig) -> None:
    """Make the sink as the courier would, and send nothing; raises ``ConfigError``. It imports what the sink needs."""
    try:
        make(name, config, Messages()).close()
    except (ConfigError, OSError, ValueError) as error:  # a file that holds no certificate, say
        raise ConfigError(Redactor(known_secrets(config))(str(error))) from None


def make(name: str, config: SinkConfig, messages: Messages) -> Sink:
    """The sink of that name; raises ``ConfigError`` when it cannot be made, a secret that cannot be read included."""
    try:
        module: Any = import_module(f"{__name__}.{config.kind}")
        sink: Sink = module.Sink(name, config.settings, messages)
    except ImportError:
        check_installed(config.settings)
        raise
    return sink
