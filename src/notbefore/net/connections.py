"""The connections of ``Http``: urllib3's, with a deadline for an exchange and a guard of addresses.

``Adapter`` lets ``requests`` use them.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from notbefore.net.addresses import check_address, check_host


class Deadline:
    """Limits each exchange to ``seconds``: then a thread shuts the connection down.

    The timeout of a socket is only for the next bytes. With that alone, an answer that drips would
    never end.

    One thread serves many exchanges. It waits until the time of the exchange that started it is
    up. If a later exchange is in progress by then, it waits for that one. Otherwise the thread
    ends, and the next exchange starts another.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.passed = False  # in the last exchange
        self._closed = threading.Condition()  # its lock is that of all values here
        self._has_thread = False
        # the deadline of the exchange in progress, in monotonic seconds
        self._end: float | None = None
        self._connection: GuardedConnection | None = None  # of the exchange in progress

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Limit the exchange inside the ``with``."""
        with self._closed:
            self.passed = False
            self._end = time.monotonic() + self.seconds
            if not self._has_thread:
                threading.Thread(target=self._run, name="deadline", daemon=True).start()
                self._has_thread = True
        try:
            yield
        finally:
            with self._closed:  # the thread must not shut down the connection of the next exchange
                if self._end is not None and time.monotonic() >= self._end:
                    self.passed = True  # the thread may be late
                self._end = None
                self._connection = None

    def watch(self, connection: "GuardedConnection") -> None:
        """Shut this connection down at the deadline: it is that of the exchange in progress."""
        self._connection = connection

    def check(self) -> None:
        """Raise ``TimeoutError`` if it has passed."""
        if self.passed:
            raise TimeoutError("timed out")

    def close(self) -> None:
        """End the thread now. Another exchange may follow."""
        with self._closed:
            self._closed.notify()

    def _run(self) -> None:
        with self._closed:
            while self._end is not None and not self.passed:
                remaining = self._end - time.monotonic()
                if remaining > 0:
                    self._closed.wait(remaining)
                else:
                    self._shut_down()
            self._has_thread = False

    def _shut_down(self) -> None:
        self.passed = True
        if self._connection is not None:
            self._connection.shut_down()


class GuardedConnection(HTTPConnection):
    """A connection that ends at the deadline.

    ``guarded``: it connects only to public addresses.
    """

    def __init__(self, *args: Any, deadline: Deadline, guarded: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = deadline
        self._guarded = guarded
        # http.client forgets the socket while it still reads the last answer from it
        self._connected: socket.socket | None = None

    def connect(self) -> None:
        """Connect, and send nothing to an address that is not public."""
        self._deadline.watch(self)
        if self._guarded:
            with suppress(OSError, ValueError):  # connecting fails with the better error
                check_host(self.host)

        super().connect()

        self._connected = self.sock
        if self._guarded:  # check the real address: the name may have another one by now
            check_address(self.sock.getpeername()[0])
        self._deadline.check()

    def request(self, *args: Any, **options: Any) -> None:
        """Send a request."""
        self._deadline.watch(self)
        super().request(*args, **options)
        self._deadline.check()

    def shut_down(self) -> None:
        """Let reads and writes in another thread fail at once."""
        sock = self.sock or self._connected
        if sock is not None:
            with suppress(OSError):  # it is closed, or in a TLS handshake with its own timeout
                sock.shutdown(socket.SHUT_RDWR)


class GuardedTlsConnection(GuardedConnection, HTTPSConnection):
    """A ``GuardedConnection`` over TLS."""


class _Pool(HTTPConnectionPool):
    ConnectionCls = GuardedConnection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = GuardedTlsConnection


class Adapter(HTTPAdapter):
    """An adapter of ``requests`` with these connections.

    Those to a proxy are not guarded: its address may be private.
    """

    def __init__(self, deadline: Deadline, *, guarded: bool) -> None:
        super().__init__()
        self._deadline = deadline
        self.poolmanager.pool_classes_by_scheme = _pools(deadline, guarded=guarded)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        """Return urllib3's manager of the connections to a proxy."""
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = _pools(self._deadline, guarded=False)
        return manager


def _pools(deadline: Deadline, *, guarded: bool) -> dict[str, Any]:
    """Return the makers of connection pools, by scheme. Pools pass the options to connections."""
    return {
        "http": partial(_Pool, deadline=deadline, guarded=guarded),
        "https": partial(_TlsPool, deadline=deadline, guarded=guarded),
    }
