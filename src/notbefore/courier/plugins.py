"""Sinks of other packages: entry points of the group ``notbefore.sinks``.

Only the courier and ``check-config`` import them, so their failures do not stop the agent.
"""

import logging
import os
import sys
import traceback
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType
from typing import Any, Final

from msgspec import Struct

from notbefore.config.extras import SINKS, check_plugin
from notbefore.config.reading import Reader
from notbefore.config.sinks import Messages, Plugin
from notbefore.config.yaml_file import Places
from notbefore.core.message import Message
from notbefore.courier.sink import Receipt, Sink
from notbefore.errors import ConfigError, NotBeforeError, PluginError, SendError

MAX_THREAD: Final = 4_000  # characters; the outbox keeps it while the event lasts
# a field of a ``Receipt`` or of a ``SendError`` -> the types of its values
FIELD_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "thread": (str, NoneType),
    "repeat": (int, float, NoneType),
    "retry_after": (int, float, NoneType),
    "permanent": (bool,),
    "by_hand": (bool,),
}
FAULTY: Final = "is faulty, report it to the author of its package"

log = logging.getLogger("notbefore.courier")


class ForeignSink(Sink):
    """A sink of another package, whose mistakes fail its own deliveries, not the courier."""

    def __init__(self, plugin: str, sink: Sink) -> None:
        self._plugin = plugin
        self._sink = sink

    def send(self, message: Message) -> Receipt:
        """Send by the sink, and check what it returns or raises.

        After a wrong return value the receiver may have accepted the message, so it is not sent
        again.
        """
        try:
            receipt = self._sink.send(message)
        except SendError as error:
            mistake = _mistake_in(error)
            if mistake:
                raise SendError(f"the sink {self._plugin} raised {mistake}: {error}") from error
            raise
        except NotBeforeError:
            raise  # such as a secret that cannot be read
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # the advice first: the end of a long text is cut
            text = f"the sink {self._plugin} {FAULTY}: it raised {_shown(error)}"
            raise PluginError(text) from error

        mistake = _mistake_in(receipt)
        if not isinstance(receipt, Receipt):
            mistake = f"{receipt!r} instead of a Receipt"
        if mistake:
            raise SendError(f"the sink {self._plugin} returned {mistake}", permanent=True)
        return receipt

    def close(self) -> None:
        """Close the sink. An error is logged, because another sink replaces this one anyway."""
        try:
            self._sink.close()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            log.warning("the sink %s %s: it cannot be closed", self._plugin, FAULTY, exc_info=error)


def _shown(error: BaseException) -> str:
    """Return an exception as the last line of a traceback; its own ``str`` may fail."""
    return traceback.format_exception_only(error)[-1].strip()


def _mistake_in(result: Receipt | SendError) -> str:
    """Return the first field of a result that has a wrong value; empty if there is none."""
    for name, types in FIELD_TYPES.items():
        if not hasattr(result, name):
            continue
        value = getattr(result, name)
        if not isinstance(value, types):
            return f"a {type(result).__name__} with the {name} {value!r}"
    thread = getattr(result, "thread", None)
    if thread is not None and len(thread) > MAX_THREAD:
        return f"a {type(result).__name__} with a thread of more than {MAX_THREAD} characters"
    return ""


def make(name: str, plugin: Plugin, messages: Messages) -> Sink:
    """Make a sink; raises ``ConfigError`` if its package is at fault, or its settings are wrong.

    It also raises ``OSError`` and ``ValueError`` as the sink does.
    """
    sink_class = _imported(plugin)
    settings = _converted(plugin, sink_class)
    try:
        sink = sink_class(name, settings, messages)
    except (ConfigError, OSError, ValueError):
        raise
    except (Exception, SystemExit) as error:
        raise _fault(plugin, f"{FAULTY}: it cannot be made", error) from error
    if not isinstance(sink, Sink):
        raise ConfigError(f"the sink {plugin.name} is no notbefore.courier.sink.Sink")
    return ForeignSink(plugin.name, sink)


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
