"""Sinks of other packages: entry points of the group ``notbefore.sinks``.

Only the courier and ``check-config`` import them. Whatever they do, the agent goes on.
"""

import os
import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from msgspec import Struct

from notbefore.config.extras import SINKS, check_plugin
from notbefore.config.reading import Reader
from notbefore.config.sinks import Messages, Plugin
from notbefore.config.yaml_file import Places
from notbefore.courier.sink import Sink
from notbefore.errors import ConfigError


def make(name: str, plugin: Plugin, messages: Messages) -> Sink:
    """Make a sink; raises ``ConfigError`` if its package is at fault, or its settings are wrong."""
    sink_class = _imported(plugin)
    settings = _converted(plugin, sink_class)
    try:
        sink = sink_class(name, settings, messages)
    except (ConfigError, OSError, ValueError):
        raise
    except Exception as error:
        raise _fault(plugin, "cannot be made", error) from error
    if not isinstance(sink, Sink):
        raise ConfigError(f"the sink {plugin.name} is no notbefore.courier.sink.Sink")
    return sink


def settings_of(plugin: Plugin) -> Struct:
    """Return the settings, converted to the struct of the sink; raises ``ConfigError``."""
    return _converted(plugin, _imported(plugin))


def _imported(plugin: Plugin) -> Any:
    check_plugin(plugin.name)
    entry_point, *_ = entry_points(group=SINKS, name=plugin.name)
    try:
        with redirect_stdout(sys.stderr):  # what is printed there belongs to the commands
            return entry_point.load()
    except (Exception, SystemExit) as error:
        raise _fault(plugin, "cannot be imported", error) from error


def _converted(plugin: Plugin, sink_class: Any) -> Struct:
    struct = getattr(sink_class, "Settings", None)
    if not (isinstance(struct, type) and issubclass(struct, Struct)):
        raise ConfigError(f"the sink {plugin.name} has no class Settings of type msgspec.Struct")

    reader = Reader(Places(), Path(), dict(os.environ))
    settings = reader.read(plugin.settings, struct, "settings")
    if reader.mistakes:
        texts = (f"{mistake.key}: {mistake.text}" for mistake in reader.mistakes)
        raise ConfigError("; ".join(texts))
    converted: Struct = settings
    return converted


def _fault(plugin: Plugin, failure: str, error: BaseException) -> ConfigError:
    return ConfigError(f"the sink {plugin.name} {failure}: {type(error).__name__}: {error}")
