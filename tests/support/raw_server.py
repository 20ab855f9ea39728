"""A server that does to a connection what a test's function says: for answers that no proper server
would give.
"""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Talk = Callable[[socket.socket, bytes], None]  # gets the connection and the request's head


@contextmanager
def serving(*talks: Talk) -> Iterator[tuple[str, list[bytes]]]:
    """Serve each request with the next of ``talks``, the last one again and again.

    Gives endpoint and requests seen.
    """
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def converse(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while head := read_head(connection):
                seen.append(head)
                talks[min(len(seen), len(talks)) - 1](connection, head)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=converse, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def read_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        head += byte
    return head


def answer(status: str = "200 OK", body: bytes = b"{}", *headers: str) -> Talk:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    whole = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return lambda connection, _: connection.sendall(whole)


def raw(octets: bytes, *, close: bool = True) -> Talk:
    def talk(connection: socket.socket, _: bytes) -> None:
        connection.sendall(octets)
        if close:
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError  # what has arrived meanwhile is not read

    return talk


def tunnel(port: int) -> Talk:
    """A proxy: it leads every ``CONNECT`` to one port here."""

    def talk(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with socket.create_connection(("127.0.0.1", port)) as server:
            other = {connection: server, server: connection}
            while True:
                for end in select.select(list(other), [], [])[0]:
                    if not (data := end.recv(65536)):
                        raise ConnectionAbortedError
                    other[end].sendall(data)

    return talk
