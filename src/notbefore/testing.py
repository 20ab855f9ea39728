"""Tests that every sink passes, for the sinks of other packages too. They need pytest.

Inherit from ``SinkContract``, and return a ``Receiver`` from ``make_receiver``. For a sink that
sends by HTTP, that is an ``HttpReceiver``.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import pytest
from msgspec.structs import replace

from notbefore.commands.samples import EVENT_ID, SAMPLE_VM, TIME, changes_of
from notbefore.core.delivery import deliveries
from notbefore.core.document import PLATFORM, SCHEDULED, STARTED, Event
from notbefore.core.message import Message
from notbefore.core.routing import Route, Routing, Terms
from notbefore.courier.sink import Sink
from notbefore.errors import SendError
from notbefore.net.redact import Redactor
from notbefore.wording.records import record_of

SECRET: Final = "canary-7f3a9b2c"  # noqa: S105 - give the sink under test this one
EVIL: Final = "<!channel> @here\r\nBcc: eve@example.org\r\n\r\n<script>"
UNREACHABLE: Final = "http://127.0.0.1:9"  # nothing listens there


class Receiver:
    """A receiver that a test runs, and the sink that sends to it."""

    refuses_for_good = True  # the sink does not try again what the receiver refuses

    @property
    def secrets(self) -> Sequence[str]:
        """The secrets of the sink."""
        return (SECRET,)

    def sink(self) -> Sink:
        """Return a new sink that sends to the receiver."""
        raise NotImplementedError

    def unreachable_sink(self) -> Sink:
        """Return a new sink that sends to an address at which nothing listens."""
        raise NotImplementedError

    def received(self) -> list[bytes]:
        """Return what the receiver has accepted so far: one item for each message."""
        raise NotImplementedError

    def fail(self) -> None:
        """Let the receiver fail from now on, as if it were overloaded."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Let the receiver refuse every message from now on."""
        raise NotImplementedError

    def close(self) -> None:
        """End the receiver."""


class HttpReceiver(Receiver):
    """An HTTP server on loopback. ``make_sink`` returns a sink that sends to an address."""

    def __init__(self, make_sink: Callable[[str], Sink]) -> None:
        self.status = 200  # of every answer
        self._bodies: list[bytes] = []
        self._make_sink = make_sink
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                receiver.answer(self, self.rfile.read(length))

            do_PUT = do_POST  # noqa: N815 - the name that http.server calls

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        return Handler

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer a request. Override it for a receiver whose answers have a body."""
        self._bodies.append(body)
        handler.send_response(self.status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def sink(self) -> Sink:
        """Return a new sink that sends to the server."""
        port = self._server.server_address[1]
        return self._make_sink(f"http://127.0.0.1:{port}")

    def unreachable_sink(self) -> Sink:
        """Return a new sink that sends to a closed port."""
        return self._make_sink(UNREACHABLE)

    def received(self) -> list[bytes]:
        """Return the bodies of the requests."""
        return list(self._bodies)

    def fail(self) -> None:
        """Answer 503."""
        self.status = 503

    def refuse(self) -> None:
        """Answer 400."""
        self.status = 400

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def sample_message(
    *, description: str = "", started: bool = False, exercise: bool = False
) -> Message:
    """Return the message about a Reboot that was announced, or has started."""
    scheduled = Event(
        event_id=EVENT_ID,
        event_type="Reboot",
        event_status=SCHEDULED,
        resources=(SAMPLE_VM.name,),
        resource_type="VirtualMachine",
        not_before=TIME,
        description=description,
        event_source=PLATFORM,
    )
    listings = [(scheduled,)]
    if started:
        listings.append((replace(scheduled, event_status=STARTED, not_before=None),))
    change = changes_of(listings, TIME, SAMPLE_VM.name)[-1]

    line = record_of(change, SAMPLE_VM, exercise=exercise).line()
    routing = Routing((Route(sinks=("it",), announce_by="all"),), {"it": Terms()})
    delivery, *_ = deliveries(change, line, routing, SAMPLE_VM)
    return Message.of(delivery, change.time)


def failure(sink: Sink) -> SendError:
    """Return the error of a sink that cannot send."""
    with closing(sink), pytest.raises(SendError) as raised:
        sink.send(sample_message())
    return raised.value


class SinkContract:
    """The tests. One receiver serves one test."""

    def make_receiver(self) -> Receiver:
        """Return a receiver with its sink."""
        raise NotImplementedError

    @pytest.fixture
    def receiver(self) -> Iterator[Receiver]:
        """The receiver of a test, which is closed after it."""
        with closing(self.make_receiver()) as receiver:
            yield receiver

    def test_message_names_its_event_and_marks_exercises(self, receiver: Receiver) -> None:
        """One call is one message. A text from Azure adds no line to a header."""
        messages = (
            sample_message(description=EVIL),
            sample_message(started=True),
            sample_message(exercise=True),
        )

        with closing(receiver.sink()) as sink:
            for message in messages:
                sink.send(message)

        received = [body.replace(b"=\r\n", b"") for body in receiver.received()]
        assert len(received) == len(messages)
        for body in received:
            assert EVENT_ID.encode() in body or SAMPLE_VM.name.encode() in body
        assert b"\nBcc:" not in received[0]
        assert [b"[EXERCISE]" in body for body in received] == [False, False, True]

    def test_failure_is_temporary_or_permanent(self, receiver: Receiver) -> None:
        """Only a refusal may be permanent: then the message is not sent again."""
        unreachable = failure(receiver.unreachable_sink())
        receiver.fail()
        failed = failure(receiver.sink())
        receiver.refuse()
        refused = failure(receiver.sink())

        assert not unreachable.permanent
        assert not failed.permanent
        assert refused.permanent == receiver.refuses_for_good

    def test_error_has_a_text_without_secrets(self, receiver: Receiver) -> None:
        """The courier removes the secrets that it knows; the sink must not disguise them."""
        redact = Redactor(receiver.secrets)
        errors = [failure(receiver.unreachable_sink())]
        receiver.fail()
        errors.append(failure(receiver.sink()))
        receiver.refuse()
        errors.append(failure(receiver.sink()))

        for error in errors:
            assert str(error)
            assert SECRET not in redact(str(error))
