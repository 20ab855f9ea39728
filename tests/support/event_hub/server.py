"""``HubServer``: a simulated hub, whose partitions are logs on disk, its keys and faults, and who
reads what.
"""

import argparse
import base64
import hashlib
import hmac
import itertools
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from proton import Condition, symbol, timestamp

from support.event_hub import amqp

NAME = "changes"  # of the hub
BUSY = (
    "com.microsoft:server-busy",
    "The request was terminated because the entity is being throttled. Wait 4 seconds.",
)


def condition(name: str, text: str) -> Condition:
    """An error; with an info map, which the SDK reads without asking whether it is there."""
    return Condition(name, text, {symbol("com.microsoft:tracking-id"): "simulated"})


class Entry(NamedTuple):
    """One event in a partition."""

    offset: int
    enqueued: int  # Unix milliseconds
    key: str
    message: bytes


class Hub:
    """Partitions, each an append-only log."""

    def __init__(self, partitions: int, store: Path) -> None:
        self.created = int(time.time() * 1000)
        self.logs: list[list[Entry]] = [[] for _ in range(partitions)]
        if store.exists():
            whole = store.read_bytes().rpartition(b"\n")
            os.truncate(store, len(whole[0] + whole[1]))  # a torn last line was never acknowledged
            for line in whole[0].splitlines():
                row = json.loads(line)
                self._put(row["p"], row["t"], row["k"], base64.b64decode(row["m"]))
        self.created = min([self.created, *(log[0].enqueued for log in self.logs if log)])
        self._file = store.open("ab")

    def resize(self, partitions: int) -> None:
        """To so many partitions; Azure takes none away either."""
        self.logs += [[] for _ in range(partitions - len(self.logs))]

    def refusal(self, partition: int, selector: str) -> str | None:
        """Why a receiver is refused: its offset is beyond the last one.

        The words are Event Hubs'.
        """
        log = self.logs[partition]
        (kind, bound) = _bound(selector)
        last = log[-1].offset if log else -1
        if kind != "offset" or bound <= last:
            return None
        return (
            f"The supplied offset '{bound}' is invalid. The last offset in the system is '{last}'"
        )

    def _put(self, partition: int, enqueued: int, key: str, message: bytes) -> None:
        log = self.logs[partition]
        offset = log[-1].offset + len(log[-1].message) + 40 if log else 0
        log.append(Entry(offset, enqueued, key, message))

    def append(self, key: str, messages: list[bytes]) -> int:
        """Write down events, and return their partition; Azure's hash is another, and as stable."""
        now = int(time.time() * 1000)
        partition = zlib.crc32(key.encode()) % len(self.logs)
        for message in messages:
            row = {"p": partition, "t": now, "k": key, "m": base64.b64encode(message).decode()}
            self._file.write(json.dumps(row).encode() + b"\n")
            self._put(partition, now, key, message)
        self._file.flush()
        return partition

    def first(self, partition: int, selector: str) -> int:
        """The index of the first event that a receiver's selector lets through."""
        log = self.logs[partition]
        (kind, bound) = _bound(selector)
        values = (entry.offset if kind == "offset" else entry.enqueued for entry in log)
        return next((index for index, value in enumerate(values) if value > bound), len(log))


def _bound(selector: str) -> tuple[str, int]:
    """What a selector asks for, ``offset`` or ``enqueued-time``, and beyond which value."""
    kind, _, bound = selector.removeprefix("amqp.annotation.x-opt-").split(" ")
    return kind, int(bound.strip("'"))


class Reader:
    """A receiver of one partition, in a consumer group."""

    def __init__(self, link: Any, client: Any, group: str, partition: int, start: int) -> None:
        self.link = link
        self.client = client
        self.next = start
        self.group = group
        self.partition = partition


class HubServer:
    """The server: hub, keys, faults, and who is connected."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.hub = Hub(options.partitions, options.store)
        self.keys = dict(text.split("=", 1) for text in options.key)
        self.clients: set[Any] = set()
        self.readers: list[Reader] = []
        self.fault = ""
        self.cuts = 0  # transfers that are to be cut off yet
        self._tags = itertools.count()

    @staticmethod
    def path(address: str) -> list[str]:
        """The parts of an address such as ``amqps://host/hub/ConsumerGroups/g/Partitions/0``,
        without the host.
        """
        return [
            part
            for part in (urlsplit(address).path if "://" in address else address).split("/")
            if part
        ]

    def check_token(self, token: str, audience: str) -> tuple[int, str]:
        """Status and text: of a SAS the signature is checked; the token of an identity is taken."""
        if self.path(audience)[:1] != [NAME]:
            return 404, f"The messaging entity '{audience}' could not be found."
        if not token.startswith("SharedAccessSignature "):
            return 202, "Accepted"
        fields = dict(
            part.split("=", 1) for part in token.partition(" ")[2].split("&") if "=" in part
        )
        key = self.keys.get(unquote(fields.get("skn", "")))
        if key is None:
            return 401, "InvalidSignature: the name of the key is not known"
        digest = hmac.new(
            key.encode(), f"{fields['sr']}\n{fields['se']}".encode(), hashlib.sha256
        ).digest()
        if not hmac.compare_digest(base64.b64encode(digest).decode(), unquote(fields["sig"])):
            return 401, "InvalidSignature: The token has an invalid signature."
        return 202, "Accepted"

    def send(self, link: Any, message: bytes) -> None:
        delivery = link.delivery(f"{next(self._tags):x}")
        link.send(message)
        link.advance()
        delivery.settle()

    def pump(self, reader: Reader) -> None:
        """Send a receiver what it has credit for."""
        log = self.hub.logs[reader.partition]
        while reader.link.credit > 0 and reader.next < len(log):
            entry = log[reader.next]
            values: dict[str, str | int | timestamp] = {
                "x-opt-sequence-number": reader.next,
                "x-opt-offset": str(entry.offset),
                "x-opt-enqueued-time": timestamp(entry.enqueued),
                "x-opt-partition-key": entry.key,
            }
            self.send(reader.link, amqp.annotations(values) + entry.message)
            reader.next += 1

    def pump_all(self, partition: int) -> None:
        for reader in self.readers:
            if reader.partition == partition:
                self.pump(reader)
                reader.client.flush()

    def end(self, readers: list[Reader], name: str, text: str) -> None:
        for reader in readers:
            reader.link.condition = condition(name, text)
            reader.link.close()
            reader.client.flush()
        self.readers = [reader for reader in self.readers if reader not in readers]

    def order(self, word: str) -> None:
        """A fault from now on, or one at once."""
        name, _, number = word.partition(":")
        if word in ("drop", "close"):
            for client in list(self.clients):
                client.end(abruptly=word == "drop")
        elif name == "cut":
            self.cuts = int(number)
        elif name == "resize":
            self.hub.resize(int(number))
        else:
            self.fault = "" if word == "calm" else word
            if word == "busy":
                self.end(self.readers, *BUSY)
