"""``MainThread`` waits for signals, other threads and descriptors."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from notbefore.courier.frames import FrameSocket, wait_for_frame
from notbefore.process.main_thread import MainThread

LONG = 60.0  # seconds that a wait takes if nothing ends it
ON_POSIX = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has neither SIGHUP nor many descriptors"
)


def wait(main: MainThread, *descriptors: socket.socket) -> bool:
    """Wait until something ends the wait, and fail when nothing does."""
    started = time.monotonic()
    is_to_stop = main.wait(LONG, descriptors)
    assert time.monotonic() - started < LONG
    return is_to_stop


def test_wait_ends_when_another_thread_wakes_it() -> None:
    with MainThread() as main:
        threading.Timer(0.05, main.wake).start()

        is_to_stop = wait(main)

    assert not is_to_stop


def test_wait_ends_at_once_when_woken_before_it() -> None:
    with MainThread() as main:
        main.wake()

        is_to_stop = wait(main)

    assert not is_to_stop


def test_wake_ends_a_single_wait() -> None:
    with MainThread() as main:
        main.wake()
        wait(main)
        started = time.monotonic()

        main.wait(0.2)

        assert time.monotonic() - started > 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_asks_the_process_to_stop(number: signal.Signals) -> None:
    with MainThread() as main:
        signal.raise_signal(number)

        is_to_stop = wait(main)

    assert is_to_stop


def raise_three_hangups() -> None:
    for _ in range(3):
        signal.raise_signal(signal.SIGHUP)


@ON_POSIX
def test_sighup_ends_the_wait_and_stops_nothing() -> None:
    with MainThread() as main:
        raise_three_hangups()

        is_to_stop = wait(main)

    assert not is_to_stop


@ON_POSIX
def test_several_sighups_are_handled_once_in_the_main_thread() -> None:
    threads: list[threading.Thread] = []

    def note_thread() -> None:
        threads.append(threading.current_thread())

    with MainThread(note_thread) as main:
        raise_three_hangups()

        is_to_stop = wait(main)

    assert not is_to_stop
    assert threads == [threading.main_thread()]


@pytest.fixture
def high_descriptor() -> Iterator[socket.socket]:
    """A readable socket with a descriptor above 1,500, which ``select`` could not wait for."""
    import fcntl  # noqa: PLC0415 - Windows has none
    import resource  # noqa: PLC0415 - as above

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2_048, limits[1]))
    reader, writer = socket.socketpair()
    with reader, writer:
        descriptor = fcntl.fcntl(reader, fcntl.F_DUPFD, 1_500)
        with socket.socket(fileno=descriptor) as high:
            writer.send(b".")
            yield high
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@ON_POSIX
def test_wait_ends_when_a_high_descriptor_is_readable(high_descriptor: socket.socket) -> None:
    with MainThread() as main:
        is_to_stop = wait(main, high_descriptor)

    assert not is_to_stop


@ON_POSIX
def test_frame_socket_waits_for_a_high_descriptor(high_descriptor: socket.socket) -> None:
    started = time.monotonic()

    wait_for_frame(LONG, FrameSocket(high_descriptor))

    assert time.monotonic() - started < LONG
