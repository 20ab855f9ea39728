"""The courier's memory while a receiver fails: ``python benchmarks/failing.py [KIND ...]``.

KIND is a kind of sink: webhook, slack, apprise or otlp_logs; all of them by default. 150 events
wait for one sink. Its receiver answers 500 with a body of 1 MiB, with 101 headers of 60 KB, or with
headers that do not end. Each event is attempted four times, without a pause. Printed for each kind
and each answer: the peak of the courier's resident memory, in MiB.
"""

import argparse
import itertools
import os
import socket
import sys
import time
from pathlib import Path
from typing import Final

from _machine import add_names, describe, first_child, never_interrupted, peak

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.config.secret import Secret
from notbefore.config.sinks import Apprise, OtlpConnection, SinkConfig, Slack, Webhook
from notbefore.courier.orders import Orders
from notbefore.courier.supervisor import Supervisor
from support.owner import Owner, serve
from support.raw_server import answer, serving

EVENTS: Final = 150
ATTEMPTS: Final = 4  # for each event
LIMIT: Final = 384  # MiB: ``MemoryMax`` of the systemd unit, for the agent and its courier
PATIENCE: Final = 600.0  # seconds
HEADER: Final = b"x" * 60_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_names(parser, "kinds", "KIND", SINKS)
    parser.add_argument("--events", type=int, default=EVENTS, help=f"default: {EVENTS}")
    options = parser.parse_args()

    print(describe())
    for kind in options.kinds or SINKS:
        for name, talk in ANSWERS.items():
            with serving(talk) as (url, _):
                measure(kind, name, SINKS[kind](url), options.events)


def measure(kind: str, name: str, sink: SinkConfig, events: int) -> None:
    """Attempt all events against a failing receiver, and print the courier's peak."""
    owner = Owner()
    supervisor = Supervisor(Orders({kind: sink}), owner)
    ids = [f"{number:032x}" for number in range(events)]
    owner.add(*ids, sink=kind)
    attempts = events * ATTEMPTS
    started = time.monotonic()

    serve([supervisor], lambda: len(owner.results) >= attempts, PATIENCE)

    seconds = time.monotonic() - started
    memory = peak(first_child(os.getpid()))
    supervisor.stop(never_interrupted)
    print(
        f"{kind}, {name}: courier's peak {memory:.0f} MiB (limit: {LIMIT} MiB) in {attempts}"
        f" attempts, {seconds:.0f} s",
        flush=True,
    )


# ---- answers of the receiver


def many_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\n")
    for number in range(101):
        connection.sendall(b"X-%d: %b\r\n" % (number, HEADER))


def endless_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\n")
    for number in itertools.count():
        connection.sendall(b"X-%d: %b\r\n" % (number, HEADER))


ANSWERS: Final = {
    "500 with 1 MiB": answer("500 No", b"x" * 1024 * 1024),
    "101 headers of 60 KB": many_headers,
    "endless headers": endless_headers,
}


# ---- sinks


def webhook(url: str) -> SinkConfig:
    return SinkConfig(webhook=Webhook(url=Secret(url), allow_private=True))


def slack(url: str) -> SinkConfig:
    return SinkConfig(slack=Slack(url=Secret(url)))


def apprise(url: str) -> SinkConfig:
    return SinkConfig(apprise=Apprise(url=Secret(url.replace("http://", "json://"))))


def otlp_logs(url: str) -> SinkConfig:
    return SinkConfig(otlp_logs=OtlpConnection(endpoint=url))


SINKS: Final = {"webhook": webhook, "slack": slack, "apprise": apprise, "otlp_logs": otlp_logs}


if __name__ == "__main__":
    main()
