"""``HubServer``: the hubs, the keys and the faults of a simulated namespace, and who reads which partition."""

import argparse
import base64
import hashlib
import hmac
import itertools
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from proton import Condition, symbol, timestamp

from support.event_hub import amqp
from support.event_hub.log import Hub

BUSY = (
    "com.microsoft:server-busy",
    "The request was terminated because the entity is being throttled. Wait 4 seconds.",
)


def condition(name: str, text: str) -> Condition:
    """An error; with an info map, which the SDK reads without asking whether it is there."""
    return Condition(name, text, {symbol("com.microsoft:tracking-id"): "simulated"})


class Reader:
    """A receiver of one partition; ``place``: hub, consumer group and partition."""

    def __init__(self, link: Any, client: Any, place: tuple[str, str, int], start: int) -> None:
        self.link, self.client, self.place, self.next = link, client, place, start


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
        self.clients: set[Any] = set()
        self.readers: list[Reader] = []
        self.fault = ""
        self.cuts = 0  # transfers that are to be cut off yet
        self._tags = itertools.count()

    @staticmethod
    def path(address: str) -> tuple[str, list[str]]:
        """The hub and the rest of an address such as ``amqps://host/hub/ConsumerGroups/g/Partitions/0``."""
        parts = [part for part in (urlsplit(address).path if "://" in address else address).split("/") if part]
        return (parts[0].casefold() if parts else ""), parts[1:]

    def check_token(self, token: str, audience: str, hub: str) -> tuple[int, str, float]:
        """Status, text and end of a token: of a SAS the signature is checked; that of an identity is taken."""
        if hub not in self.hubs:
            return 404, f"The messaging entity '{audience}' could not be found.", 0.0
        if not token.startswith("SharedAccessSignature "):
            return 202, "Accepted", time.time() + 3600
        fields = dict(part.split("=", 1) for part in token.partition(" ")[2].split("&") if "=" in part)
        key = self.keys.get(unquote(fields.get("skn", "")))
        if key is None:
            return 401, "InvalidSignature: the name of the key is not known", 0.0
        digest = hmac.new(key.encode(), f"{fields['sr']}\n{fields['se']}".encode(), hashlib.sha256).digest()
        if not hmac.compare_digest(base64.b64encode(digest).decode(), unquote(fields["sig"])):
            return 401, "InvalidSignature: The token has an invalid signature.", 0.0
        return 202, "Accepted", float(fields["se"])

    def send(self, link: Any, message: bytes) -> None:
        delivery = link.delivery(f"{next(self._tags):x}")
        link.send(message)
        link.advance()
        delivery.settle()

    def pump(self, reader: Reader) -> None:
        """Send a receiver what it has credit for."""
        hub, _, partition = reader.place
        log = self.hubs[hub].logs[partition]
        while reader.link.credit > 0 and reader.next < len(log):
            entry = log[reader.next]
            values: dict[str, str | int | timestamp] = {
                "x-opt-sequence-number": reader.next,
                "x-opt-offset": str(entry.offset),
                "x-opt-enqueued-time": timestamp(entry.enqueued),
                **({"x-opt-partition-key": entry.key} if entry.key is not None else {}),
            }
            self.send(reader.link, amqp.annotations(values) + entry.message)
            reader.next += 1

    def pump_all(self, hub: str, partition: int) -> None:
        for reader in self.readers:
            if (reader.place[0], reader.place[2]) == (hub, partition):
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
            for hub in self.hubs.values():
                hub.resize(int(number))
        else:
            self.fault = "" if word == "calm" else word
            if word == "busy":
                self.end(self.readers, *BUSY)
