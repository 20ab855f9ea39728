"""The kinds of sinks, a module each, named as the kind is in the configuration. Imported on first use.

To add one: a module here with a class ``Sink``, its settings in ``config.sinks``, a test file, and a receiver in the
contract tests. CONTRIBUTING.md has the whole list.
"""

from typing import Any

from notbefore.config.messages import Messages
from notbefore.config.sinks import SinkConfig
from notbefore.courier.message import Sink
from notbefore.errors import ConfigError


def try_out(name: str, config: SinkConfig) -> None:
    """Make the sink as the courier would, and send nothing; raises ``ConfigError``. It imports what the sink needs."""
    from notbefore.courier.redact import Redactor, known_secrets  # noqa: PLC0415 - only who tries a sink out needs it

    try:
        make(name, config, Messages()).close()
    except (ConfigError, OSError, ValueError) as error:  # a file that holds no certificate, say
        redact = Redactor(known_secrets(config))
        raise ConfigError(redact(str(error))) from None


def make(name: str, config: SinkConfig, messages: Messages) -> Sink:
    """The sink of that name; raises ``ConfigError`` when it cannot be made, a secret that cannot be read included."""
    from importlib import import_module  # noqa: PLC0415 - only a courier makes sinks

    try:
        module: Any = import_module(f"{__name__}.{config.kind}")
        sink: Sink = module.Sink(name, config.settings, messages)
    except ImportError:
        from notbefore.config.libraries import check_installed  # noqa: PLC0415 - says which package is missing

        check_installed(config.settings)
        raise
    return sink
