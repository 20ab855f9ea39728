"""The courier's memory while a receiver fails: ``python benchmarks/failing.py [KIND...]``.

150 events wait for one sink, whose receiver answers 500: with a body of 1 MiB, with 101 headers of
60 KB, or with headers that do not end. Each event is attempted four times, without a pause.
"""

import itertools
import os
import socket
import sys
import time
from pathlib import Path

from _machine import describe, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.config.secret import Secret
from notbefore.config.sinks import Apprise, OtlpConnection, SinkConfig, Slack, Webhook
from notbefore.courier.orders import Orders
from notbefore.courier.supervisor import Supervisor
from support.owner import Owner, serve
from support.raw_server import answer, serving

EVENTS = 150
ATTEMPTS = 4  # for each event
LIMIT = 384  # MiB: ``MemoryMax`` of the systemd unit, for the agent and its courier
PATIENCE = 600.0  # seconds
HEADER = b"x" * 60_000


def main() -> None:
    print(describe())
    kinds = sys.argv[1:] or list(SINKS)
    for kind in kinds:
        for name, talk in TALKS.items():
            with serving(talk) as (url, _):
                measure(kind, name, SINKS[kind](url))


def measure(kind: str, name: str, sink: SinkConfig) -> None:
    owner = Owner()
    couriers = Supervisor(Orders({kind: sink}), owner)
    owner.add(*(f"{number:032x}" for number in range(EVENTS)), sink=kind)
    attempts = EVENTS * ATTEMPTS
    started = time.monotonic()

    serve([couriers], lambda: len(owner.results) >= attempts, PATIENCE)

    seconds = time.monotonic() - started
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    peak = resident(children.split()[0], "VmHWM")
    couriers.stop(lambda _seconds: False)
    print(
        f"{kind}, {name}: courier's peak {peak:.0f} MiB (bar: less than {LIMIT}) in {attempts}"
        f" attempts, {seconds:.0f} s"
    )


# ---- receivers


def many_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\n")
    for number in range(101):
        connection.sendall(b"X-%d: %b\r\n" % (number, HEADER))


def endless_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\n")
    for number in itertools.count():
        connection.sendall(b"X-%d: %b\r\n" % (number, HEADER))


TALKS = {
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


SINKS = {"webhook": webhook, "slack": slack, "apprise": apprise, "otlp_logs": otlp_logs}


if __name__ == "__main__":
    main()
