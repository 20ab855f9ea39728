"""A server whose answers are functions of a test, for answers that no proper server would send."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# answers one request; the arguments are the connection and the head of the request
Talk = Callable[[socket.socket, bytes], None]


@contextmanager
def serving(*talks: Talk) -> Iterator[tuple[str, list[bytes]]]:
    """Answer each request by the next of ``talks``, and all further ones by the last.

    Yield the endpoint, and the heads of the requests so far.
    """
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def converse(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while head := read_head(connection):
                heads.append(head)
                talk = talks[min(len(heads), len(talks)) - 1]
                talk(connection, head)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=converse, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def read_head(connection: socket.socket) -> bytes:
    """Read the head of a request; empty if the client has closed the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        head += byte
    return head


def answer(status: str = "200 OK", body: bytes = b"{}", *headers: str) -> Talk:
    """Return a talk that sends an ordinary answer, and keeps the connection."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return raw(head + body, close=False)


def raw(octets: bytes, *, close: bool = True) -> Talk:
    """Return a talk that sends these octets."""

    def talk(connection: socket.socket, _head: bytes) -> None:
        connection.sendall(octets)
        if close:
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError  # so that further requests are not read

    return talk


def tunnel(port: int) -> Talk:
    """Return a talk of a proxy that connects every ``CONNECT`` to one port of this machine."""

    def talk(connection: socket.socket, _head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with socket.create_connection(("127.0.0.1", port)) as server:
            other_end = {connection: server, server: connection}
            while True:
                readable, _, _ = select.select(list(other_end), [], [])
                for end in readable:
                    data = end.recv(65536)
                    if not data:
                        raise ConnectionAbortedError
                    other_end[end].sendall(data)

    return talk
