"""A small Event Hub on loopback, for the tests and `make demo-fleet`.

The extra `proton` has its engine.

``python -m support.event_hub --port 5672 --partitions 4 --key root=SECRET --store FILE`` starts it.

AMQP 1.0 by the Qpid Proton engine; asyncio moves the octets. It speaks what the unmodified Azure
SDK asks for with ``UseDevelopmentEmulator=true``: SASL, ``$cbs`` with a real check of the SAS
signature, ``$management`` READ, senders with partition keys, batches taken apart, receivers from an
offset; the newest receiver takes its partition. Each partition is an append-only log on disk, so
that it survives a kill. It is not Azure: what it says when it refuses is modelled.

Faults are ordered on standard input, a word a line: ``reject:CONDITION``, ``noack``, ``freeze``,
``refuse:STATUS`` (what ``$cbs`` says to a token) until ``calm``; ``cut:N`` ends the connection in
the middle of each of the next N transfers; ``drop`` and ``close`` end the connections of the
moment. ``busy``: receivers are throttled, until ``calm``. ``resize:N`` gives it N partitions.
"""

import argparse
import asyncio
import ssl
import sys
from pathlib import Path

from support.event_hub.connection import ClientConnection
from support.event_hub.server import HubServer


async def serve(server: HubServer) -> None:
    """Until standard input ends."""
    context = None
    if server.options.cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.options.cert)
    loop = asyncio.get_running_loop()
    await loop.create_server(
        lambda: ClientConnection(server), "127.0.0.1", server.options.port, ssl=context
    )
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    over = asyncio.Event()
    loop.add_reader(sys.stdin, _read_order, server, over)
    while not over.is_set():
        await asyncio.sleep(0.25)
        for client in list(server.clients):
            client.tick()


def _read_order(server: HubServer, over: asyncio.Event) -> None:
    line = sys.stdin.readline()
    if not line:  # whoever started it is gone
        over.set()
        return
    server.order(line.strip())
    sys.stdout.write(f"{line.strip()}: done\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument(
        "--key", action="append", metavar="NAME=SECRET", help="of shared access signatures"
    )
    parser.add_argument("--group", help="the only consumer group; by default it has any")
    parser.add_argument("--store", type=Path, required=True, help="the file with what was sent")
    parser.add_argument("--cert", help="a PEM file with key and certificate: TLS")
    parser.add_argument("--max-message", type=int, default=1024 * 1024, help="bytes")
    asyncio.run(serve(HubServer(parser.parse_args())))


if __name__ == "__main__":
    main()
