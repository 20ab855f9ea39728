"""A small Event Hub on loopback, for the tests and `notbefore demo --fleet`; the extra `demo` has what it needs.

``python -m notbefore.simulator.event_hub --hub changes:4 --key root=SECRET`` starts it.

AMQP 1.0 by the Qpid Proton engine; asyncio moves the octets. It speaks what the unmodified Azure SDK asks for with
``UseDevelopmentEmulator=true``: SASL, ``$cbs`` with a real check of the SAS signature, ``$management`` READ, senders
with partition keys, batches taken apart, receivers from an offset, epochs. Each partition is an append-only log, on
disk with ``--store``, so that it survives a kill. It is not Azure: what it says when it refuses is modelled.

Faults are ordered on standard input, a word a line: ``reject:CONDITION``, ``noack``, ``freeze``, ``refuse:STATUS``
(what ``$cbs`` says to a token) until ``calm``; ``cut:N`` ends the connection in the middle of each of the next N
transfers; ``drop`` and ``close`` end the connections of the moment. ``busy``: receivers are throttled, until ``calm``.
``forget:N`` deletes all but the last N events of each partition, as retention does; ``anew`` all, with their numbers,
as where a hub is made anew; ``resize:N`` gives it N partitions.
"""

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import os
import ssl
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

from proton import (
    UNDESCRIBED,
    Array,
    Collector,
    Condition,
    Connection,
    Data,
    Delivery,
    Event,
    Message,
    Transport,
    TransportException,
    int32,
    symbol,
    timestamp,
)

from notbefore.simulator import amqp

CREDIT = 300
BUSY = (
    "com.microsoft:server-busy",
    "The request was terminated because the entity is being throttled. Wait 4 seconds.",
)
SELECTORS = {"offset", "sequence-number", "enqueued-time"}


def condition(name: str, text: str) -> Condition:
    """An error; with an info map, which the SDK reads without asking whether it is there."""
    return Condition(name, text, {symbol("com.microsoft:tracking-id"): "simulated"})


def text_of(value: Any) -> str:
    """A text, whether Proton gives it as text, octets or a view of them."""
    value = value.tobytes() if isinstance(value, memoryview) else value
    return value.decode() if isinstance(value, bytes) else str(value)


class Entry(NamedTuple):
    """One event in a partition."""

    offset: int
    enqueued: int  # Unix milliseconds
    key: str | None
    message: bytes


class Hub:
    """Partitions, each an append-only log."""

    def __init__(self, name: str, partitions: int, store: Path | None) -> None:
        self.name = name
        self.created = int(time.time() * 1000)
        self.logs: list[list[Entry]] = [[] for _ in range(partitions)]
        self.begins = [0] * partitions  # index of the first event that retention has left
        self._file: BinaryIO | None = None
        self._next = 0  # partition for events without a key
        if store is not None and store.exists():
            whole = store.read_bytes().rpartition(b"\n")
            os.truncate(store, len(whole[0] + whole[1]))  # a torn last line was never acknowledged
            for line in whole[0].splitlines():
                row = json.loads(line)
                self._put(row["p"], row["t"], row["k"], base64.b64decode(row["m"]))
        self._file = store.open("ab") if store is not None else None

    def change(self, how: str, number: int) -> None:
        """``forget``: leave so many events in each partition. ``resize``: to so many. ``anew``: count from 0 again."""
        if how == "resize":
            self._resize(number)
        elif how == "forget":
            self.begins = [max(0, len(log) - number) for log in self.logs]
        else:
            self.logs, self.begins = [[] for _ in self.logs], [0] * len(self.logs)
            if self._file is not None:
                self._file.truncate(0)

    def _resize(self, partitions: int) -> None:
        more = max(0, partitions - len(self.logs))  # Azure takes none away either
        self.logs += [[] for _ in range(more)]
        self.begins += [0] * more

    def refusal(self, partition: int, selector: str | None) -> str | None:
        """Why a receiver is refused: its offset is beyond the last one; the words are Event Hubs'."""
        log, (kind, bound) = self.logs[partition], _bound(selector)
        last = log[-1].offset if log else -1
        return (
            f"The supplied offset '{bound}' is invalid. The last offset in the system is '{last}'"
            if kind == "offset" and bound > last
            else None
        )

    def _put(self, partition: int, enqueued: int, key: str | None, message: bytes) -> None:
        if partition >= len(self.logs):  # it was resized, and read again
            self._resize(partition + 1)
        log = self.logs[partition]
        offset = log[-1].offset + len(log[-1].message) + 40 if log else 0
        log.append(Entry(offset, enqueued, key, message))

    def partition_of(self, key: str | None) -> int:
        """Azure's hash is another, and as stable."""
        if key is None:
            self._next = (self._next + 1) % len(self.logs)
            return self._next
        return zlib.crc32(key.encode()) % len(self.logs)

    def append(self, partition: int, key: str | None, messages: list[bytes]) -> None:
        now = int(time.time() * 1000)
        for message in messages:
            if self._file is not None:
                row = {"p": partition, "t": now, "k": key, "m": base64.b64encode(message).decode()}
                self._file.write(json.dumps(row).encode() + b"\n")
            self._put(partition, now, key, message)
        if self._file is not None:
            self._file.flush()

    def first(self, partition: int, selector: str | None) -> int:
        """The index of the first event that a receiver's selector lets through."""
        log = self.logs[partition]
        kind, bound = _bound(selector)
        if kind is None:
            return len(log)
        inclusive = ">=" in (selector or "")
        values: dict[str, Callable[[int], int]] = {
            "offset": lambda index: log[index].offset,
            "sequence-number": lambda index: index,
            "enqueued-time": lambda index: log[index].enqueued,
        }
        value = values[kind]
        return next(
            (
                index
                for index in range(self.begins[partition], len(log))
                if value(index) > bound or (inclusive and value(index) == bound)
            ),
            len(log),
        )


def _bound(selector: str | None) -> tuple[str | None, int]:
    """What a selector asks for, and from which value on; ``None``: only what comes."""
    words = (selector or "").replace("amqp.annotation.x-opt-", "").split(" ")
    if len(words) != 3 or words[0] not in SELECTORS or words[2] == "'@latest'":
        return None, 0
    return words[0], int(words[2].strip("'"))


class Reader:
    """A receiver of one partition."""

    def __init__(
        self, link: Any, place: tuple[Hub, int], start: int, epoch: int | None, client: "ClientConnection"
    ) -> None:
        self.link, self.next, self.epoch, self.client = link, start, epoch, client
        self.hub, self.partition = place


class HubServer:
    """The server: hubs, keys, faults, and who is connected."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.hubs: dict[str, Hub] = {}
        for text in options.hub:
            name, _, partitions = text.partition(":")
            store = Path(f"{options.store}.{name}") if options.store else None
            self.hubs[name.casefold()] = Hub(name, int(partitions or 2), store)
        self.keys = dict(text.split("=", 1) for text in options.key)
        self.clients: set[ClientConnection] = set()
        self.readers: dict[tuple[str, str, int], list[Reader]] = {}
        self.fault = ""
        self.cuts = 0  # transfers that are to be cut off yet
        self._tags = 0

    def tag(self) -> str:
        self._tags += 1
        return f"{self._tags:x}"

    @staticmethod
    def path(address: str) -> tuple[str, list[str]]:
        """The hub and the rest of an address such as ``amqps://host/hub/ConsumerGroups/g/Partitions/0``."""
        parts = [part for part in (urlsplit(address).path if "://" in address else address).split("/") if part]
        return (parts[0].casefold() if parts else ""), parts[1:]

    def check_token(  # noqa: PLR0911 - each refusal has its own words
        self, kind: str, token: str, audience: str, hub: str
    ) -> tuple[int, str, float]:
        """Status, text and end of a token: of a SAS the signature, the time and the audience are checked."""
        if hub not in self.hubs:
            return 404, f"The messaging entity '{audience}' could not be found.", 0.0
        if kind == "jwt":
            known = self.options.any_jwt and bool(token)
            return (202, "Accepted", time.time() + 3600) if known else (401, "InvalidToken: it is not known here", 0.0)
        fields = dict(part.split("=", 1) for part in token.partition(" ")[2].split("&") if "=" in part)
        key = self.keys.get(unquote(fields.get("skn", "")))
        if key is None:
            return 401, "InvalidSignature: the name of the key is not known", 0.0
        digest = hmac.new(key.encode(), f"{fields['sr']}\n{fields['se']}".encode(), hashlib.sha256).digest()
        if not hmac.compare_digest(base64.b64encode(digest).decode(), unquote(fields["sig"])):
            return 401, "InvalidSignature: The token has an invalid signature.", 0.0
        end = float(fields["se"])
        if end < time.time() + self.options.clock_ahead:
            return 401, "ExpiredToken: The token is expired.", 0.0
        if self.path(unquote(fields["sr"]))[0] not in ("", hub):
            return 401, "InvalidAudience", 0.0
        return 202, "Accepted", end

    def pump(self, reader: Reader) -> None:
        """Send a receiver what it has credit for."""
        log = reader.hub.logs[reader.partition]
        reader.next = max(reader.next, reader.hub.begins[reader.partition])
        while reader.link.credit > 0 and reader.next < len(log):
            entry = log[reader.next]
            values: dict[str, str | int] = {
                "x-opt-sequence-number": reader.next,
                "x-opt-offset": str(entry.offset),
                **({"x-opt-partition-key": entry.key} if entry.key is not None else {}),
            }
            delivery = reader.link.delivery(self.tag())
            reader.link.send(amqp.annotations(values, {"x-opt-enqueued-time": entry.enqueued}) + entry.message)
            reader.link.advance()
            delivery.settle()
            reader.next += 1

    def pump_all(self, hub: str, partition: int) -> None:
        for (name, _, number), readers in self.readers.items():
            if (name, number) == (hub, partition):
                for reader in readers:
                    self.pump(reader)
                    reader.client.flush()

    def order(self, word: str) -> None:
        """A fault from now on, or one at once."""
        name, _, number = word.partition(":")
        if word in ("drop", "close"):
            self._end_all(abruptly=word == "drop")
        elif name == "cut":
            self.cuts = int(number)
        elif name in ("forget", "resize", "anew"):
            for hub in self.hubs.values():
                hub.change(name, int(number or 0))
            if name == "anew":
                self._end_all(abruptly=True)
        else:
            self.fault = "" if word == "calm" else word
            if word == "busy":
                self._throttle()

    def _end_all(self, *, abruptly: bool) -> None:
        for client in list(self.clients):
            client.end(abruptly=abruptly)

    def _throttle(self) -> None:
        for readers in self.readers.values():
            for reader in readers:
                reader.link.condition = condition(*BUSY)
                reader.link.close()
                reader.client.flush()
            readers.clear()

    async def serve(self) -> None:
        context = None
        if self.options.cert:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.options.cert)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: ClientConnection(self), "127.0.0.1", self.options.port, ssl=context)
        sys.stdout.write(f"listening on 127.0.0.1:{listener.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        over = asyncio.Event()
        loop.add_reader(sys.stdin, self._read_fault, over)
        while not over.is_set():
            await asyncio.sleep(0.25)
            for client in list(self.clients):
                client.tick()

    def _read_fault(self, over: asyncio.Event) -> None:
        line = sys.stdin.readline()
        if not line:  # whoever started it is gone
            over.set()
            return
        self.order(line.strip())
        sys.stdout.write(f"{line.strip()}: done\n")
        sys.stdout.flush()


class ClientConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: HubServer) -> None:
        self.server = server
        self.until: dict[str, float] = {}  # hub -> end of the token that was put for it
        self.replies: dict[str, Any] = {}  # $cbs, $management -> the link on which answers go
        self.formats: dict[tuple[int, int], int] = {}
        self.message_format = 0
        self.received, self.to_send = bytearray(), bytearray()
        self.lost = False
        self.engine, self.connection, self.events = Transport(Transport.SERVER), Connection(), Collector()
        self.engine.idle_timeout = 240
        self.engine.max_frame_size = 65_536
        self.engine.sasl().allowed_mechs("ANONYMOUS")
        self.connection.collect(self.events)
        self.engine.bind(self.connection)

    # ---- octets

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a server's is
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
        transfer = amqp.transfer_of(frame)
        if transfer is not None:
            if transfer.first:
                self.formats[transfer.link] = transfer.message_format
            self.message_format = self.formats.get(transfer.link, 0)

    def _feed(self, frame: bytes) -> None:
        at = 0
        while at < len(frame) and self.engine.capacity() > 0:
            count = min(self.engine.capacity(), len(frame) - at)
            self.engine.push(frame[at : at + count])
            self._dispatch()
            at += count

    def flush(self) -> None:
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
        self.engine.tick(time.time())
        self._dispatch()
        self.flush()

    def end(self, *, abruptly: bool) -> None:
        if abruptly:
            self.transport.abort()
            return
        self.connection.condition = condition("amqp:connection:forced", "The connection was closed by the service.")
        self.connection.close()
        self.flush()

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        self.server.clients.discard(self)
        for readers in self.server.readers.values():
            readers[:] = [reader for reader in readers if reader.client is not self]

    # ---- what the engine makes of them

    def _dispatch(self) -> None:
        while (event := self.events.peek()) is not None:
            handler = self.HANDLERS.get(event.type)
            if handler is not None:
                handler(self, event)
            self.events.pop()

    def _connection_opened(self, event: Any) -> None:
        event.connection.container = "simulated"
        event.connection.properties = {symbol("product"): "simulated"}
        event.connection.open()

    def _session_opened(self, event: Any) -> None:
        event.session.incoming_capacity = 1 << 22
        event.session.open()

    def _link_opened(self, event: Any) -> None:
        link = event.link
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        link.max_message_size = self.server.options.max_message
        link.properties = {symbol("com.microsoft:tracking-id"): "simulated"}
        if link.is_receiver:  # the client sends
            address = link.remote_target.address
            why = None if address.startswith("$") else self._denied(*self.server.path(address))
            if why is not None:
                self._refuse(link, *why)
                return
            link.open()
            link.flow(CREDIT)
            return
        address = link.remote_source.address
        if address.startswith("$"):
            self.replies[address] = link
            link.open()
            return
        self._read_from(link, address)

    def _read_from(self, link: Any, address: str) -> None:
        hub, rest = self.server.path(address)
        why = self._denied(hub, rest)
        if why is None and self.server.fault == "busy":
            why = BUSY
        if why is None and (len(rest) != 4 or rest[0].casefold() != "consumergroups"):
            why = ("amqp:not-found", f"{address} is no receiver's address")
        if why is not None:
            self._refuse(link, *why)
            return
        partition, selector = int(rest[3]), _selector(link.remote_source)
        invalid = self.server.hubs[hub].refusal(partition, selector)
        if invalid is not None:
            self._refuse(link, "com.microsoft:argument-error", invalid)
            return
        properties = {str(name): value for name, value in (link.remote_properties or {}).items()}
        epoch = properties.get("com.microsoft:epoch")
        readers = self.server.readers.setdefault((hub, rest[1].casefold(), partition), [])
        highest = max((reader.epoch for reader in readers if reader.epoch is not None), default=None)
        if highest is not None and (epoch is None or epoch < highest):
            self._refuse(link, "amqp:link:stolen", f"Receiver with a higher epoch '{highest}' exists")
            return
        if epoch is not None:
            for reader in readers:
                reader.link.condition = condition("amqp:link:stolen", f"New receiver with epoch '{epoch}' is created")
                reader.link.close()
                reader.client.flush()
            readers.clear()
        link.open()
        start = self.server.hubs[hub].first(partition, selector)
        readers.append(Reader(link, (self.server.hubs[hub], partition), start, epoch, self))

    def _denied(self, hub: str, rest: list[str]) -> tuple[str, str] | None:
        if hub not in self.server.hubs:
            return "amqp:not-found", f"The messaging entity '{hub}' could not be found."
        if self.until.get(hub, 0.0) < time.time():
            return "amqp:unauthorized-access", f"Unauthorized access. There is no valid token for {hub}."
        named = rest[-1] if len(rest) > 1 and rest[-2].casefold() == "partitions" else "0"
        if not named.isdigit() or int(named) >= len(self.server.hubs[hub].logs):
            return "com.microsoft:argument-out-of-range", f"The specified partition is invalid: {named}"
        return None

    def _refuse(self, link: Any, name: str, text: str) -> None:
        link.open()
        link.condition = condition(name, text)
        link.close()

    def _link_closed(self, event: Any) -> None:
        for readers in self.server.readers.values():
            readers[:] = [reader for reader in readers if reader.link != event.link]
        event.link.close()

    def _credit_given(self, event: Any) -> None:
        for readers in self.server.readers.values() if event.link.is_sender else ():
            for reader in readers:
                if reader.link == event.link:
                    self.server.pump(reader)

    def _transfer_arrived(self, event: Any) -> None:
        delivery, link = event.delivery, event.link
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
            self._store_events(delivery, address, payload)

    def _store_events(self, delivery: Any, address: str, payload: bytes) -> None:
        """Events from a sender."""
        server = self.server
        hub, rest = server.path(address)
        if server.fault.startswith("reject:"):
            _reject(delivery, server.fault.removeprefix("reject:"), "a fault was ordered")
            return
        if len(payload) > server.options.max_message:
            _reject(delivery, "amqp:link:message-size-exceeded", f"The message of {len(payload)} bytes is too large.")
            return
        if self.until.get(hub, 0.0) < time.time():
            _reject(delivery, "amqp:unauthorized-access", "ExpiredToken: The token is expired.")
            return
        try:
            key, messages = events_of(payload, self.message_format)
        except (ValueError, IndexError, struct.error) as error:
            _reject(delivery, "amqp:decode-error", str(error))
            return
        partition = int(rest[-1]) if rest else server.hubs[hub].partition_of(key)
        server.hubs[hub].append(partition, key, messages)
        if server.fault != "noack":
            _accept(delivery)
        server.pump_all(hub, partition)

    # ---- $cbs and $management

    def _reply(self, node: str, request: Message, status: int, text: str, body: Any = None) -> None:
        link = self.replies.get(node)
        if link is None:
            return
        answer: Any = Message(body=body)
        answer.correlation_id = request.id
        answer.properties = {"status-code": int32(status), "status-description": text}
        delivery = link.delivery(self.server.tag())
        link.send(answer.encode())
        link.advance()
        delivery.settle()

    def _put_token(self, payload: bytes) -> None:
        request, properties = _decoded(payload)
        name = properties["name"]
        hub, _ = self.server.path(name)
        kind = "jwt" if properties["type"] == "jwt" else "sas"
        status, text, end = self.server.check_token(kind, text_of(request.body), name, hub)
        if self.server.fault.startswith("refuse:"):
            status, text = int(self.server.fault.removeprefix("refuse:")), "a fault was ordered"
        if status == 202:
            self.until[hub] = end
        self._reply("$cbs", request, status, text)

    def _manage(self, payload: bytes) -> None:
        request, properties = _decoded(payload)
        name, token = properties.get("name", "").casefold(), properties.get("security_token", "")
        kind = "sas" if token.startswith("SharedAccessSignature") else "jwt"
        status, text, _ = self.server.check_token(kind, token, name, name)
        if properties.get("operation") != "READ":
            status, text = 400, "only READ is known here"
        if status != 202:
            self._reply("$management", request, status, text)
            return
        found = _described(self.server.hubs[name], properties)
        if found is None:
            self._reply("$management", request, 404, "there is nothing of that name")
        else:
            self._reply("$management", request, 200, "OK", found)

    HANDLERS: ClassVar[dict[Any, Callable[..., None]]] = {
        Event.CONNECTION_REMOTE_OPEN: _connection_opened,
        Event.CONNECTION_REMOTE_CLOSE: lambda _self, event: event.connection.close(),
        Event.SESSION_REMOTE_OPEN: _session_opened,
        Event.SESSION_REMOTE_CLOSE: lambda _self, event: event.session.close(),
        Event.LINK_REMOTE_OPEN: _link_opened,
        Event.LINK_REMOTE_CLOSE: _link_closed,
        Event.LINK_REMOTE_DETACH: _link_closed,
        Event.LINK_FLOW: _credit_given,
        Event.DELIVERY: _transfer_arrived,
    }


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


def _described(hub: Hub, properties: dict[str, str]) -> dict[str, Any] | None:
    kind = properties.get("type")
    if kind == "com.microsoft:eventhub":
        ids = [str(number) for number in range(len(hub.logs))]
        return {
            "name": hub.name,
            "type": kind,
            "created_at": timestamp(hub.created),
            "partition_count": int32(len(ids)),
            "partition_ids": Array(UNDESCRIBED, Data.STRING, *ids),  # type: ignore[arg-type] # its stubs know less
        }
    number = int(properties.get("partition", "-1"))
    if kind != "com.microsoft:partition" or not 0 <= number < len(hub.logs):
        return None
    log = hub.logs[number]
    return {
        "name": hub.name,
        "type": kind,
        "partition": str(number),
        "begin_sequence_number": hub.begins[number],
        "last_enqueued_sequence_number": len(log) - 1,
        "last_enqueued_offset": str(log[-1].offset if log else -1),
        "last_enqueued_time_utc": timestamp(log[-1].enqueued if log else 0),
        "is_partition_empty": not log,
    }


def _selector(source: Any) -> str | None:
    source.filter.rewind()
    if not source.filter.next():
        return None
    found = source.filter.get_object() or {}
    for name, value in found.items():
        if "selector-filter" in str(name):
            return text_of(getattr(value, "value", value))
    return None


def _key_of(parts: list[amqp.Section]) -> str | None:
    for part in parts:
        if part.code == amqp.MESSAGE_ANNOTATIONS:
            message: Any = Message()
            message.decode(part.octets + b"\x00\x53\x75\xa0\x00")  # an empty body makes it a message
            key = (message.annotations or {}).get("x-opt-partition-key")
            return None if key is None else text_of(key)
    return None


def events_of(payload: bytes, message_format: int) -> tuple[str | None, list[bytes]]:
    """The partition key and the events of one transfer; a batch is taken apart."""
    parts = amqp.sections(payload)
    key = _key_of(parts)
    if message_format != amqp.BATCH_FORMAT:
        return key, [amqp.bare(parts)]
    inner = [amqp.sections(amqp.data_of(part)) for part in parts if part.code == amqp.DATA]
    return key or (_key_of(inner[0]) if inner else None), [amqp.bare(event) for event in inner]


def main(words: list[str] | None = None) -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=5672, help="0: any (it is printed)")
    parser.add_argument("--hub", action="append", default=[], metavar="NAME:PARTITIONS")
    parser.add_argument("--key", action="append", default=[], metavar="NAME=SECRET", help="of shared access signatures")
    parser.add_argument("--any-jwt", action="store_true", help="accept any token of an identity")
    parser.add_argument("--store", metavar="PATH", help="keep each hub in a file PATH.HUB")
    parser.add_argument("--cert", help="a PEM file with key and certificate: TLS")
    parser.add_argument("--max-message", type=int, default=1024 * 1024, help="bytes")
    parser.add_argument("--clock-ahead", type=float, default=0.0, help="seconds by which its clock is ahead")
    asyncio.run(HubServer(parser.parse_args(words)).serve())


if __name__ == "__main__":
    main()
