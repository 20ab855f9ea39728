"""``HubServer``: the hub, the keys and the faults of a simulated namespace, and who reads which partition."""

import argparse
import base64
import hashlib
import hmac
import itertools
from typing import Any
from urllib.parse import unquote, urlsplit

from proton import Condition, symbol, timestamp

from support.event_hub import amqp
from support.event_hub.log import Hub

NAME = "changes"  # of the hub
BUSY = (
    "com.microsoft:server-busy",
    "The request was terminated because the entity is being throttled. Wait 4 seconds.",
)


def condition(name: str, text: str) -> Condition:
    """An error; with an info map, which the SDK reads without asking whether it is there."""
    return Condition(name, text, {symbol("com.microsoft:tracking-id"): "simulated"})


class Reader:
    """A receiver of one partition, in a consumer group."""

    def __init__(self, link: Any, client: Any, group: str, partition: int, start: int) -> None:
        self.link, self.client, self.next = link, client, start
        self.group, self.partition = group, partition


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
        """The parts of an address such as ``amqps://host/hub/ConsumerGroups/g/Partitions/0``, without the host."""
        return [part for part in (urlsplit(address).path if "://" in address else address).split("/") if part]

    def check_token(self, token: str, audience: str) -> tuple[int, str]:
        """Status and text: of a SAS the signature is checked; the token of an identity is taken."""
        if self.path(audience)[:1] != [NAME]:
            return 404, f"The messaging entity '{audience}' could not be found."
        if not token.startswith("SharedAccessSignature "):
            return 202, "Accepted"
        fields = dict(part.split("=", 1) for part in token.partition(" ")[2].split("&") if "=" in part)
        key = self.keys.get(unquote(fields.get("skn", "")))
        if key is None:
            return 401, "InvalidSignature: the name of the key is not known"
        digest = hmac.new(key.encode(), f"{fields['sr']}\n{fields['se']}".encode(), hashlib.sha256).digest()
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
