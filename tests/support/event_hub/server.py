"""``HubServer``: a simulated hub with its keys, its faults and its readers.

``Hub`` has the partitions, which are logs on disk.
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
    """Return an error; it has an info map because the SDK always reads one."""
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
            self._read(store)
        self._file = store.open("ab")

    def _read(self, store: Path) -> None:
        lines, newline, _ = store.read_bytes().rpartition(b"\n")
        os.truncate(store, len(lines + newline))  # a torn last line was never acknowledged
        for line in lines.splitlines():
            row = json.loads(line)
            self._put(row["p"], row["t"], row["k"], base64.b64decode(row["m"]))
        first_entries = [log[0] for log in self.logs if log]
        self.created = min([self.created, *(entry.enqueued for entry in first_entries)])

    def resize(self, partitions: int) -> None:
        """Grow to so many partitions; like Azure, never shrink."""
        self.logs += [[] for _ in range(partitions - len(self.logs))]

    def refusal(self, partition: int, selector: str) -> str | None:
        """Return the text of Event Hubs if a receiver's offset is beyond the last one."""
        log = self.logs[partition]
        kind, bound = _bound(selector)
        last = log[-1].offset if log else -1
        if kind != "offset" or bound <= last:
            return None
        return (
            f"The supplied offset '{bound}' is invalid. The last offset in the system is '{last}'"
        )

    def _put(self, partition: int, enqueued: int, key: str, message: bytes) -> None:
        log = self.logs[partition]
        offset = 0
        if log:
            offset = log[-1].offset + len(log[-1].message) + 40
        log.append(Entry(offset, enqueued, key, message))

    def append(self, key: str, messages: list[bytes]) -> int:
        """Write events to the partition of their key, and return it.

        Azure uses another hash, which is as stable.
        """
        now = int(time.time() * 1000)
        partition = zlib.crc32(key.encode()) % len(self.logs)
        for message in messages:
            row = {"p": partition, "t": now, "k": key, "m": base64.b64encode(message).decode()}
            self._file.write(json.dumps(row).encode() + b"\n")
            self._put(partition, now, key, message)
        self._file.flush()
        return partition

    def first(self, partition: int, selector: str) -> int:
        """Return the index of the first event that a receiver's selector lets through."""
        log = self.logs[partition]
        kind, bound = _bound(selector)
        for index, entry in enumerate(log):
            value = entry.offset if kind == "offset" else entry.enqueued
            if value > bound:
                return index
        return len(log)


def _bound(selector: str) -> tuple[str, int]:
    """Return what a selector compares, ``offset`` or ``enqueued-time``, and its lower bound."""
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
    """The hub, its keys, the current fault, and the connected clients."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.hub = Hub(options.partitions, options.store)
        self.keys = dict(text.split("=", 1) for text in options.key)
        self.clients: set[Any] = set()
        self.readers: list[Reader] = []
        self.fault = ""
        self.cuts = 0  # how many transfers are still to be cut off
        self._tags = itertools.count()

    @staticmethod
    def path(address: str) -> list[str]:
        """Return the parts of an address without its host.

        An address looks like ``amqps://host/hub/ConsumerGroups/g/Partitions/0``.
        """
        path = address
        if "://" in address:
            path = urlsplit(address).path
        return [part for part in path.split("/") if part]

    def check_token(self, token: str, audience: str) -> tuple[int, str]:
        """Return status and text for a token.

        The signature of a SAS is checked; the token of an identity is always accepted.
        """
        if self.path(audience)[:1] != [NAME]:
            return 404, f"The messaging entity '{audience}' could not be found."
        if not token.startswith("SharedAccessSignature "):
            return 202, "Accepted"
        parts = token.partition(" ")[2].split("&")
        fields = dict(part.split("=", 1) for part in parts if "=" in part)
        key = self.keys.get(unquote(fields.get("skn", "")))
        if key is None:
            return 401, "InvalidSignature: the name of the key is not known"
        signed = f"{fields['sr']}\n{fields['se']}"
        digest = hmac.new(key.encode(), signed.encode(), hashlib.sha256).digest()
        if not hmac.compare_digest(base64.b64encode(digest).decode(), unquote(fields["sig"])):
            return 401, "InvalidSignature: The token has an invalid signature."
        return 202, "Accepted"

    def send(self, link: Any, message: bytes) -> None:
        """Send an encoded message on a link."""
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
        """Send the readers of a partition what they have credit for."""
        for reader in self.readers:
            if reader.partition == partition:
                self.pump(reader)
                reader.client.flush()

    def end(self, readers: list[Reader], name: str, text: str) -> None:
        """Close the links of these readers with an error."""
        for reader in readers:
            reader.link.condition = condition(name, text)
            reader.link.close()
            reader.client.flush()
        self.readers = [reader for reader in self.readers if reader not in readers]

    def order(self, word: str) -> None:
        """Carry out an order; see ``__main__`` for the orders."""
        name, _, number = word.partition(":")
        if word in ("drop", "close"):
            for client in list(self.clients):
                client.end(abruptly=word == "drop")
        elif name == "cut":
            self.cuts = int(number)
        elif name == "resize":
            self.hub.resize(int(number))
        elif word == "calm":
            self.fault = ""
        else:
            self.fault = word
            if word == "busy":
                self.end(self.readers, *BUSY)
