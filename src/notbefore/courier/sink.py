"""``Sink``: the base class of all sinks. It gets a ``Message``, and returns a ``Receipt``."""

from msgspec import Struct

from notbefore.core.message import Message


class Receipt(Struct, frozen=True):
    """The receiver has accepted the message."""

    # what the sink opened for the event: it gets this back with later messages, and gets the end
    thread: str | None = None
    repeat: float | None = None  # seconds until it is sent again, while the event lasts


class Sink:
    """One receiver of messages.

    One thread creates it, as ``Sink(name, settings, messages)``, and uses it. A sink of another
    package has an attribute ``Settings``: the type of its settings, a ``msgspec.Struct``.
    """

    def send(self, message: Message) -> Receipt:
        """Send a message; return once the receiver has accepted it.

        Raises ``errors.SendError`` if it has not.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""
