"""``ControlSocket``: the Unix socket at which the owner of a state directory answers commands.

A request is one line of JSON, and so is the reply. Only root and the process's user can open the
socket (0600). The kernel says which user a client is.
"""

import logging
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from notbefore.core.tracked import PendingEvent
from notbefore.errors import NotBeforeError
from notbefore.process.operations import Reply, Request
from notbefore.store.lock import PRIVATE

if sys.platform != "win32":
    import pwd

NAME: Final = "control.sock"
MAX_LINE: Final = 1024 * 1024  # bytes: an event may name many VMs
MAX_READ: Final = 64 * 1024  # bytes at once
MAX_REPLY: Final = 64 * 1024 * 1024  # bytes: a whole outbox, with room
LOOK_INTERVAL: Final = 10.0  # seconds between two checks that the socket still exists
BACKLOG: Final = 4  # clients that wait to be accepted
MAX_REASON: Final = 500  # characters
MAX_USER: Final = 64  # characters
# seconds for a whole request to arrive, and for its reply to be taken: the next client waits
CLIENT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
# seconds that the end of the process waits for the thread: it may be using a disk that hangs
THREAD_PATIENCE: Final = 0.5

_CREDENTIALS: Final = struct.Struct("3i")  # the kernel's ``ucred``: pid, uid and gid

T = TypeVar("T")

log = logging.getLogger("notbefore.process.control_socket")


class ControlRequest(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,  # an older agent, before its restart, does not know new fields
    tag="approve",
    tag_field="ask",
):
    """Show an event, or approve it.

    Without ``content``, the owner shows the event. With the ``content`` of the event that was
    shown, it approves the event.
    """

    event_id: str
    content: str = ""
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""  # why, for the record
    # who became root by sudo; used only if root asks
    sudo_user: Annotated[str, Meta(max_length=MAX_USER)] = ""
    without_resources: bool = False  # approve the event even if it names no VM


class ControlReply(Struct, frozen=True):
    """The reply to a ``ControlRequest``; ``words`` are for people."""

    done: bool
    words: str = ""
    event: PendingEvent | None = None
    content: str = ""  # identifies the event and its content, as shown


class Refusal(Struct, frozen=True):
    """The reply to a request that is refused; no other reply has this field."""

    error: str = ""


class Desk(Protocol):
    """The part that answers the requests (``AgentDesk``, ``FleetDesk``)."""

    def answer(self, request: ControlRequest | Request, user: str) -> ControlReply | Reply:
        """Answer a request of ``user``; may wait.

        Raises ``NotBeforeError`` to refuse it.
        """


class ControlSocket:
    """Serves one connection after the other; ``desk`` answers the requests.

    If a request raises ``NotBeforeError``, the reply is a ``Refusal``.
    """

    def __init__(self, directory: Path, desk: Desk) -> None:
        self.path = directory / NAME
        self._desk = desk
        self._socket: socket.socket | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        """Listen in a separate thread, because the disk of the directory may hang.

        Without Unix sockets: do nothing.
        """
        if hasattr(socket, "AF_UNIX"):
            self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        self._stopped.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._thread.join(THREAD_PATIENCE)

    def _listen(self) -> socket.socket:
        # an existing file was left by a killed process: the directory's lock allows only one
        new_path = self.path.with_suffix(".new")
        new_path.unlink(missing_ok=True)
        listener = _unix_socket()
        try:
            listener.bind(str(new_path))
            new_path.chmod(PRIVATE)
            listener.listen(BACKLOG)
            new_path.replace(self.path)  # last: a client that finds the socket can connect
        except OSError:
            listener.close()
            raise
        return listener

    def _serve(self) -> None:
        has_warned = False
        while not self._stopped.is_set():
            try:
                with self._listen() as self._socket:
                    has_warned = False
                    self._answer_all(self._socket)
            except OSError as error:
                if not has_warned and not self._stopped.is_set():
                    text = "%s cannot be used (%s): commands cannot ask this process"
                    log.error(text, self.path, error)  # noqa: TRY400 - its text says all
                has_warned = True
                # the directory may have been deleted: the store creates it again
                self._stopped.wait(LOOK_INTERVAL)
        with suppress(OSError):
            self.path.unlink()

    def _answer_all(self, listener: socket.socket) -> None:
        """Answer clients until it is stopped, or until the socket is found to be deleted.

        This is checked every ``LOOK_INTERVAL`` seconds.
        """
        listener.settimeout(LOOK_INTERVAL)
        while not self._stopped.is_set() and self.path.exists():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection, suppress(OSError):
                reply = self._reply(connection)
                connection.settimeout(CLIENT_SECONDS)
                connection.sendall(reply + b"\n")

    def _reply(self, connection: socket.socket) -> bytes:
        line = _line(connection, CLIENT_SECONDS)
        uid = _peer_uid(connection)
        try:
            return msgspec.json.encode(self._answered(connection, line, uid))
        except NotBeforeError as error:
            return msgspec.json.encode(Refusal(str(error)))
        except Exception as error:
            log.exception("a command's request failed")
            kind = type(error).__name__
            return msgspec.json.encode(Refusal(f"this failed ({kind}): the log says why"))

    def _answered(
        self, connection: socket.socket, line: bytes, uid: int | None
    ) -> ControlReply | Reply:
        if uid is not None and uid not in (0, os.geteuid()):
            raise NotBeforeError("only root and the agent's own user may ask this")
        try:
            request = msgspec.json.decode(line, type=ControlRequest | Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NotBeforeError(f"this request is not understood: {error}") from None
        if _has_closed(connection):
            raise NotBeforeError("the client has closed the connection: nothing is done")
        sudo_user = ""
        if isinstance(request, ControlRequest):
            sudo_user = request.sudo_user
        return self._desk.answer(request, user_name(uid, sudo_user))


def listens(directory: Path) -> bool:
    """Whether an agent listens in a state directory; also true if this user cannot find out."""
    try:
        with _unix_socket() as connection:
            # an agent that hangs does not accept a connection once its backlog is full
            connection.settimeout(CLIENT_SECONDS)
            connection.connect(str(directory / NAME))
    except (FileNotFoundError, ConnectionRefusedError, NotBeforeError):
        return False
    except OSError:
        return True
    return True


def ask_agent(directory: Path, request: ControlRequest | Request, reply: type[T]) -> T:
    """Send a request to the agent of a state directory.

    Raises ``NotBeforeError`` if it refuses or none answers.
    """
    path = directory / NAME
    try:
        with _unix_socket() as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = _line(connection, ANSWER_SECONDS, MAX_REPLY)
            refusal = msgspec.json.decode(line, type=Refusal)
            if refusal.error:
                raise NotBeforeError(refusal.error)
            return msgspec.json.decode(line, type=reply)
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotBeforeError(
            f"no agent listens at {path}: start it (`notbefore run CONFIG`), or name its state"
            " directory (--state-dir)"
        ) from None
    except TimeoutError:
        words = f"{path}: no answer after {ANSWER_SECONDS:g} s: see the agent's log"
        raise NotBeforeError(words) from None
    except PermissionError:
        raise NotBeforeError(f"{path}: only root and the agent's own user may ask this") from None
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NotBeforeError(f"the agent at {path} gives no answer ({reason})") from None


def _unix_socket() -> socket.socket:
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise NotBeforeError("commands cannot ask an agent here: this system has no Unix sockets")
    return socket.socket(family, socket.SOCK_STREAM)


def _has_closed(connection: socket.socket) -> bool:
    """Whether the client has closed the connection."""
    connection.settimeout(0)  # do not wait
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _peer_uid(connection: socket.socket) -> int | None:
    """Return the client's user id; ``None`` on systems without ``SO_PEERCRED``."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return int(uid)


def user_name(uid: int | None, sudo_user: str = "") -> str:
    """Return the user's name for the record; for root, the name of the user who ran sudo.

    ``uid``: ``None`` if unknown.
    """
    if uid is None:
        return "an operator"
    if uid == 0 and sudo_user:
        return f"{sudo_user} (sudo)"
    if sys.platform != "win32":
        with suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
    return f"uid {uid}"


def _line(connection: socket.socket, seconds: float, most: int = MAX_LINE) -> bytes:
    """Return the first line, without its end; or the bytes before the connection was closed.

    ``seconds`` are for the whole line: a socket's own timeout would begin again with each byte of a
    client that drips. Raises ``TimeoutError``.
    """
    deadline = time.monotonic() + seconds
    received = bytearray()
    while len(received) < most:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        data = connection.recv(min(MAX_READ, most - len(received)))
        line, end, _ = data.partition(b"\n")
        received += line
        if end or not data:
            break
    return bytes(received)
