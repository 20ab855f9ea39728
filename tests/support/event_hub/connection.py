"""``ClientConnection``: a connection to the simulated Event Hub, by the Qpid Proton engine."""

import asyncio
import time
from typing import Any

from proton import (
    UNDESCRIBED,
    Array,
    Collector,
    Connection,
    Data,
    Delivery,
    Handler,
    Message,
    Transport,
    TransportException,
    int32,
    symbol,
    timestamp,
)

from support.event_hub import amqp
from support.event_hub.server import BUSY, NAME, Hub, HubServer, Reader, condition

CREDIT = 300
DENIED = ("amqp:unauthorized-access", "Unauthorized access. There is no valid token.")


def text_of(value: Any) -> str:
    """Return a text that Proton gives as text, as octets or as a view of octets."""
    if isinstance(value, memoryview):
        value = value.tobytes()
    if isinstance(value, bytes):
        return value.decode()
    return str(value)


class ClientConnection(asyncio.Protocol, Handler):
    """Moves octets between a client and the engine, and answers the engine's events.

    asyncio calls ``connection_made``, ``data_received`` and ``connection_lost``; Proton calls the
    methods ``on_...``.
    """

    def __init__(self, server: HubServer) -> None:
        self.server = server
        self.allowed = False  # the client has sent a valid token
        self.replies: dict[str, Any] = {}  # the link for replies of $cbs and of $management
        self.formats: dict[tuple[int, int], int] = {}  # message format by channel and handle
        self.message_format = 0  # of the current transfer
        self.received = bytearray()
        self.to_send = bytearray()
        self.lost = False
        self.engine = Transport(Transport.SERVER)
        self.connection = Connection()
        self.events = Collector()
        self.engine.idle_timeout = 240
        self.engine.max_frame_size = 65_536
        self.engine.sasl().allowed_mechs("ANONYMOUS")
        self.connection.collect(self.events)
        self.engine.bind(self.connection)

    # ---- octets

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.clients.add(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self.server.fault == "freeze":
            return
        self.received += data
        for frame in amqp.frames(self.received):
            self._note_format(frame)
            try:
                self._feed(frame)
            except TransportException:  # the SDK detaches links of a session that it has ended
                self.flush()
                self.transport.close()
                return
        self.flush()

    def _note_format(self, frame: bytes) -> None:
        if (transfer := amqp.transfer_of(frame)) is not None:
            link, message_format = transfer
            if message_format is not None:
                self.formats[link] = message_format
            self.message_format = self.formats[link]

    def _feed(self, frame: bytes) -> None:
        at = 0
        while at < len(frame) and self.engine.capacity() > 0:
            count = min(self.engine.capacity(), len(frame) - at)
            self.engine.push(frame[at : at + count])
            self._dispatch()
            at += count

    def flush(self) -> None:
        """Write to the client what the engine has to send."""
        if self.lost or self.transport.is_closing():
            return
        while (pending := self.engine.pending()) > 0:
            octets = self.engine.peek(pending) or b""
            self.engine.pop(len(octets))
            self.to_send += octets
        for frame in amqp.frames(self.to_send):
            if not self.transport.is_closing():
                self.transport.write(amqp.padded(frame))
        if pending < 0 or self.engine.closed:
            self.transport.close()

    def tick(self) -> None:
        """Let the engine send what is due, such as keep-alive frames."""
        self.engine.tick(time.time())
        self._dispatch()
        self.flush()

    def end(self, *, abruptly: bool) -> None:
        """End the connection, by a reset or in order."""
        if abruptly:
            self.transport.abort()
            return
        self.connection.condition = condition(
            "amqp:connection:forced", "The connection was closed by the service."
        )
        self.connection.close()
        self.flush()

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        self.server.clients.discard(self)
        self.server.readers = [
            reader for reader in self.server.readers if reader.client is not self
        ]

    # ---- events of the engine

    def _dispatch(self) -> None:
        while (event := self.events.peek()) is not None:
            event.dispatch(self)
            self.events.pop()

    def on_connection_remote_open(self, event: Any) -> None:
        event.connection.container = "simulated"
        event.connection.properties = {symbol("product"): "simulated"}
        event.connection.open()

    def on_connection_remote_close(self, event: Any) -> None:
        event.connection.close()

    def on_session_remote_open(self, event: Any) -> None:
        event.session.incoming_capacity = 1 << 22
        event.session.open()

    def on_session_remote_close(self, event: Any) -> None:
        event.session.close()

    def on_link_remote_open(self, event: Any) -> None:
        link = event.link
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        link.max_message_size = self.server.options.max_message
        link.properties = {symbol("com.microsoft:tracking-id"): "simulated"}
        if link.is_receiver:  # the client sends
            address = link.remote_target.address
            if self.allowed or address.startswith("$"):
                link.open()
                link.flow(CREDIT)
            else:
                self._refuse(link, *DENIED)
            return
        address = link.remote_source.address
        if address.startswith("$"):
            self.replies[address] = link
            link.open()
            return
        self._read_from(link, address)

    def _read_from(self, link: Any, address: str) -> None:
        _, _, group, _, number = self.server.path(address)
        partition = int(number)
        selector = _selector(link.remote_source)
        refusal = self._refusal(address, group, partition, selector)
        if refusal is not None:
            self._refuse(link, *refusal)
            return

        # all receivers of these tests have epoch 0
        previous = [
            reader
            for reader in self.server.readers
            if reader.group == group and reader.partition == partition
        ]
        self.server.end(previous, "amqp:link:stolen", "New receiver with epoch '0' is created")
        link.open()
        start = self.server.hub.first(partition, selector)
        self.server.readers.append(Reader(link, self, group, partition, start))

    def _refusal(
        self, address: str, group: str, partition: int, selector: str
    ) -> tuple[str, str] | None:
        """Return the condition and its text if the client cannot read the partition."""
        if not self.allowed:
            return DENIED
        if self.server.fault == "busy":
            return BUSY
        if self.server.options.group not in (None, group):
            return "amqp:not-found", f"The messaging entity '{address}' could not be found."
        invalid_offset = self.server.hub.refusal(partition, selector)
        if invalid_offset is not None:
            return "com.microsoft:argument-error", invalid_offset
        return None

    def _refuse(self, link: Any, name: str, text: str) -> None:
        link.open()
        link.condition = condition(name, text)
        link.close()

    def on_link_remote_close(self, event: Any) -> None:
        self.server.readers = [
            reader for reader in self.server.readers if reader.link != event.link
        ]
        event.link.close()

    on_link_remote_detach = on_link_remote_close

    def on_link_flow(self, event: Any) -> None:
        for reader in self.server.readers:
            if reader.link == event.link:
                self.server.pump(reader)

    def on_delivery(self, event: Any) -> None:
        delivery = event.delivery
        link = event.link
        if link.is_sender or not delivery.readable:
            return
        address = link.remote_target.address
        if self.server.cuts and not address.startswith("$"):
            self.server.cuts -= 1
            self.end(abruptly=True)
        if delivery.partial or self.transport.is_closing():
            return
        payload = link.recv(delivery.pending)
        link.advance()
        if link.credit < CREDIT // 2:
            link.flow(CREDIT - link.credit)
        if address == "$cbs":
            _accept(delivery)
            self._put_token(payload)
        elif address == "$management":
            _accept(delivery)
            self._manage(payload)
        else:
            self._store_events(delivery, payload)

    def _store_events(self, delivery: Any, payload: bytes) -> None:
        """Store the events of a transfer, or reject it."""
        server = self.server
        if server.fault.startswith("reject:"):
            _reject(delivery, server.fault.removeprefix("reject:"), "a fault was ordered")
            return
        if len(payload) > server.options.max_message:
            _reject(
                delivery,
                "amqp:link:message-size-exceeded",
                f"The message of {len(payload)} bytes is too large.",
            )
            return
        key, messages = events_of(payload, self.message_format)
        partition = server.hub.append(key, messages)
        if server.fault != "noack":
            _accept(delivery)
        server.pump_all(partition)

    # ---- $cbs and $management

    def _reply(self, node: str, request: Message, status: int, text: str, body: Any = None) -> None:
        answer: Any = Message(body=body)
        answer.correlation_id = request.id
        answer.properties = {"status-code": int32(status), "status-description": text}
        self.server.send(self.replies[node], answer.encode())

    def _put_token(self, payload: bytes) -> None:
        request, properties = _decoded(payload)
        status, text = self.server.check_token(text_of(request.body), properties["name"])
        if self.server.fault.startswith("refuse:"):
            status = int(self.server.fault.removeprefix("refuse:"))
            text = "a fault was ordered"
        if status == 202:
            self.allowed = True
        self._reply("$cbs", request, status, text)

    def _manage(self, payload: bytes) -> None:
        request, properties = _decoded(payload)
        status, text = self.server.check_token(properties["security_token"], properties["name"])
        if status != 202:
            self._reply("$management", request, status, text)
            return
        description = _described(self.server.hub, properties.get("partition"))
        self._reply("$management", request, 200, text, description)


def _accept(delivery: Any) -> None:
    delivery.update(Delivery.ACCEPTED)
    delivery.settle()


def _reject(delivery: Any, name: str, text: str) -> None:
    delivery.local.condition = condition(name, text)
    delivery.update(Delivery.REJECTED)
    delivery.settle()


def _decoded(payload: bytes) -> tuple[Message, dict[str, str]]:
    request: Any = Message()
    request.decode(payload)
    return request, {text_of(name): text_of(value) for name, value in request.properties.items()}


def _described(hub: Hub, partition: str | None) -> dict[str, Any]:
    """Return the properties of a partition; ``None``: of the hub."""
    if partition is None:
        ids = [str(number) for number in range(len(hub.logs))]
        return {
            "name": NAME,
            "created_at": timestamp(hub.created),
            "partition_ids": Array(UNDESCRIBED, Data.STRING, *ids),  # type: ignore[arg-type] # its stubs know less
        }
    log = hub.logs[int(partition)]
    return {
        "name": NAME,
        "partition": partition,
        "begin_sequence_number": 0,
        "last_enqueued_sequence_number": len(log) - 1,
        "last_enqueued_offset": str(log[-1].offset if log else -1),
        "last_enqueued_time_utc": timestamp(log[-1].enqueued if log else 0),
        "is_partition_empty": not log,
    }


def _selector(source: Any) -> str:
    source.filter.rewind()
    source.filter.next()
    (described,) = source.filter.get_object().values()
    return text_of(described.value)


def _key_of(parts: list[amqp.Section]) -> str:
    """Return the partition key of a message; empty if it has none."""
    for part in parts:
        if part.code == amqp.MESSAGE_ANNOTATIONS:
            return text_of(part.value.get("x-opt-partition-key", ""))
    return ""


def events_of(payload: bytes, message_format: int) -> tuple[str, list[bytes]]:
    """Return the partition key and the events of a transfer, which may be a batch."""
    parts = amqp.sections(payload)
    if message_format != amqp.BATCH_FORMAT:
        return _key_of(parts), [amqp.bare(parts)]
    events = [amqp.sections(part.value) for part in parts if part.code == amqp.DATA]
    return _key_of(events[0]), [amqp.bare(event) for event in events]
