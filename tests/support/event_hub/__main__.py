"""A small Event Hub on loopback, for the tests and `make demo-fleet`.

Start it with ``python -m support.event_hub --port 5672 --partitions 4 --key root=SECRET --store
FILE``. It needs the extra `proton`.

The Qpid Proton engine implements AMQP 1.0; asyncio moves the octets. The server supports what the
unmodified Azure SDK uses with ``UseDevelopmentEmulator=true``:

- SASL, and ``$cbs`` with a real check of the SAS signature;
- ``$management`` READ;
- senders with partition keys and batches;
- receivers that start at an offset; a new receiver takes its partition from the previous one.

Each partition is an append-only log on disk, so that it survives a kill. The texts of refusals
imitate Azure's.

A test orders faults on standard input, one a line:

- ``reject:CONDITION``: reject each message, until ``calm``;
- ``noack``: store messages and acknowledge none, until ``calm``;
- ``freeze``: read nothing from any connection, until ``calm``;
- ``refuse:STATUS``: ``$cbs`` refuses each token with this status, until ``calm``;
- ``busy``: throttle receivers, until ``calm``;
- ``cut:N``: end the connection in the middle of each of the next N transfers;
- ``drop``: reset the current connections;
- ``close``: close the current connections in order;
- ``resize:N``: grow to N partitions.
"""

import argparse
import asyncio
import ssl
import sys
from functools import partial
from pathlib import Path

from support.event_hub.connection import ClientConnection
from support.event_hub.server import HubServer


async def serve(server: HubServer) -> None:
    """Serve until standard input ends."""
    context = None
    if server.options.cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.options.cert)
    loop = asyncio.get_running_loop()
    connect = partial(ClientConnection, server)
    await loop.create_server(connect, "127.0.0.1", server.options.port, ssl=context)
    sys.stdout.write("listening\n")
    sys.stdout.flush()

    ended = asyncio.Event()
    loop.add_reader(sys.stdin, _read_order, server, ended)
    while not ended.is_set():
        await asyncio.sleep(0.25)
        for client in list(server.clients):
            client.tick()


def _read_order(server: HubServer, ended: asyncio.Event) -> None:
    line = sys.stdin.readline()
    if not line:  # the process that started this one has ended
        ended.set()
        return
    order = line.strip()
    server.order(order)
    sys.stdout.write(f"{order}: done\n")
    sys.stdout.flush()


def main() -> None:
    """Serve with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument(
        "--key", action="append", metavar="NAME=SECRET", help="of shared access signatures"
    )
    parser.add_argument("--group", help="the only consumer group; any exists by default")
    parser.add_argument("--store", type=Path, required=True, help="the file of the logs")
    parser.add_argument("--cert", help="a PEM file with key and certificate: TLS")
    parser.add_argument("--max-message", type=int, default=1024 * 1024, help="bytes")
    asyncio.run(serve(HubServer(parser.parse_args())))


if __name__ == "__main__":
    main()
