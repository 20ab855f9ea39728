"""What the main thread of an always-on process waits for."""

import signal
import socket
import sys
import threading
import time

import pytest

from notbefore.courier import orders
from notbefore.process.main_thread import MainThread

LONG = 60.0  # seconds: a wait that nothing ends takes so long
ON_POSIX = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has neither SIGHUP nor many descriptors"
)


def wait(main: MainThread, *descriptors: socket.socket) -> bool:
    """Wait for what is to end the wait; fails where nothing does."""
    begun = time.monotonic()
    stop = main.wait(LONG, descriptors)
    assert time.monotonic() - begun < LONG
    return stop


def test_another_thread_ends_the_wait_once_also_before_it_and_stops_nothing() -> None:
    with MainThread() as main:
        threading.Timer(0.05, main.wake).start()
        assert not wait(main)
        main.wake()
        assert not wait(main)
        assert not main.wait(0.0)


def test_sigterm_and_sigint_ask_the_process_to_stop() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with MainThread() as main:
            signal.raise_signal(number)
            assert wait(main)


@ON_POSIX
def test_sighup_ends_the_wait_and_is_reported_in_the_main_thread() -> None:
    threads: list[threading.Thread] = []
    for main in (MainThread(), MainThread(lambda: threads.append(threading.current_thread()))):
        with main:
            for _ in range(3):  # as one
                signal.raise_signal(signal.SIGHUP)
            assert not wait(main)
    assert threads == [threading.main_thread()]


@ON_POSIX
def test_what_can_be_read_ends_the_wait_whatever_its_descriptor() -> None:
    import fcntl  # noqa: PLC0415 - Windows has none
    import resource  # noqa: PLC0415 - as above

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2_048, limits[1]))
    reader, writer = socket.socketpair()
    with (
        reader,
        writer,
        socket.socket(fileno=fcntl.fcntl(reader, fcntl.F_DUPFD, 1_500)) as high,
        MainThread() as main,
    ):
        writer.send(b".")
        assert not wait(main, high)
        orders.wait(LONG, orders.Channel(high))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
