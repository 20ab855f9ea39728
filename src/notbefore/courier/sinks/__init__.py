"""The kinds of sinks: one module per kind, with its name in the configuration.

A module is imported when a sink of its kind is first used. CONTRIBUTING.md explains how to add one.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

from msgspec import Struct

from notbefore.config.extras import check_installed
from notbefore.config.sinks import Messages, SinkConfig
from notbefore.courier.sink import Sink
from notbefore.errors import ConfigError
from notbefore.net.redact import Redactor, known_secrets


def try_out(name: str, config: SinkConfig) -> None:
    """Make a sink as the courier does, with its imports, but send nothing.

    Raises ``ConfigError`` if it cannot.
    """
    try:
        make(name, config, Messages()).close()
    except ConfigError as error:
        raise ConfigError(Redactor(secrets_of(config))(str(error))) from None


def make(name: str, config: SinkConfig, messages: Messages) -> Sink:
    """Make a sink.

    Raises ``ConfigError`` if it cannot, for example if a secret cannot be read.
    """
    try:
        if config.plugin is None:
            return _built_in(name, config, messages)
        from notbefore.courier import plugins  # see ``settings_of``

        return plugins.make(name, config.plugin, messages)
    except (OSError, ValueError) as error:  # such as a file without a certificate
        raise ConfigError(str(error)) from error


def _built_in(name: str, config: SinkConfig, messages: Messages) -> Sink:
    try:
        module: Any = import_module(f"{__name__}.{config.kind}")
        sink: Sink = module.Sink(name, config.settings, messages)
    except ImportError:
        check_installed(config.settings)
        raise
    return sink


def secrets_of(config: SinkConfig) -> list[str]:
    """Return the secrets of a sink, as far as they are known, also as they are sent."""
    with suppress(ConfigError):
        return known_secrets(settings_of(config))
    return []


def settings_of(config: SinkConfig) -> Struct:
    """Return the settings of a sink; raises ``ConfigError`` if those of a plugin are wrong."""
    if config.plugin is None:
        return config.settings
    from notbefore.courier import plugins  # only for sinks of other packages

    return plugins.settings_of(config.plugin)
