"""A sink of another package: the class behind an entry point of the group ``notbefore.sinks`` (docs/python-api.md)."""

from importlib.metadata import entry_points
from typing import Any, Final

from notbefore.config.messages import Messages
from notbefore.config.sinks import Plugin
from notbefore.courier.message import Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.errors import ConfigError

GROUP: Final = "notbefore.sinks"


class Sink(BaseSink):
    """Hands everything to the sink of the package; raises ``ConfigError`` where that cannot be made."""

    def __init__(self, name: str, settings: Plugin, _messages: Messages) -> None:
        known = {point.name: point for point in entry_points(group=GROUP)}
        if settings.use not in known:
            raise ConfigError(
                f"use: no installed package has a sink {settings.use!r} (known: {', '.join(sorted(known)) or 'none'})"
            )
        values = settings.settings | {key: secret.reveal() for key, secret in settings.secrets.items()}
        try:
            self._sink: Any = known[settings.use].load()(name, values)
        except Exception as error:  # whatever its package raises, it cannot be made
            raise ConfigError(f"{settings.use}: it cannot be made: {type(error).__name__}: {error}") from error
        for method in ("send", "close"):
            if not callable(getattr(self._sink, method, None)):
                raise ConfigError(f"{settings.use}: it has no method `{method}`")

    def send(self, message: Message) -> Receipt:
        """Send it; what is returned is a receipt."""
        receipt = self._sink.send(message)
        if not isinstance(receipt, Receipt):
            raise TypeError(f"send returned {type(receipt).__name__}, expected a Receipt")
        return receipt

    def close(self) -> None:
        """Close its connections."""
        self._sink.close()
