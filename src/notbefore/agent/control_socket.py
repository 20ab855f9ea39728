"""``ControlSocket``: the agent's own Unix socket, the only way to approve an event by hand.

A request is one line of JSON, and so is the reply. The socket exists only if the agent was started with
``--allow-approval``. Only root and the agent's user can open it (0600), and the kernel says which user asks.
"""

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from notbefore.core.listing import PendingEvent
from notbefore.errors import NotBeforeError

NAME: Final = "control.sock"
MAX_LINE: Final = 1024 * 1024  # bytes: an event may name many VMs
MAX_REASON: Final = 500  # characters
MAX_USER: Final = 64  # characters
READ_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0

log = logging.getLogger("notbefore.agent.control_socket")


class ControlRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Without ``content``: show the event. With the ``content`` of what was shown: approve it."""

    event_id: str
    content: str = ""
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""  # why, for the record
    sudo_user: Annotated[str, Meta(max_length=MAX_USER)] = ""  # who became root to ask; used only if root asks


class ControlReply(Struct, frozen=True):
    """The answer; ``words`` are for people."""

    done: bool
    words: str = ""
    event: PendingEvent | None = None
    content: str = ""  # identifies the event as it is shown


class ControlSocket:
    """Serves one connection after the other; ``answer(request, user)`` does the work, and may wait for IMDS."""

    def __init__(self, directory: Path, answer: Callable[[ControlRequest, str], ControlReply]) -> None:
        self.path = directory / NAME
        self._answer = answer
        self._socket: socket.socket | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        """Listen. If that is impossible, the log says so, and nothing can be approved by hand."""
        try:
            self._socket = self._listen()
        except OSError as error:
            log.error("%s cannot be opened (%s): nothing can be approved by hand", self.path, error)  # noqa: TRY400 - its text says all
            return
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._stopped.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self.path.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        # left behind by an agent that was killed: the lock of the directory says that no other one runs
        self.path.unlink(missing_ok=True)
        listener = _unix_socket()
        try:
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(4)  # not before: until then nobody could connect
        except OSError:
            listener.close()
            raise
        return listener

    def _serve(self) -> None:
        assert self._socket is not None  # noqa: S101 - start() made it
        while not self._stopped.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._stopped.wait(1.0):  # out of descriptors, say
                    log.warning("%s: %s", self.path, error)
                continue
            with connection, suppress(OSError):
                connection.settimeout(READ_SECONDS)
                connection.sendall(msgspec.json.encode(self._reply(connection)) + b"\n")

    def _reply(self, connection: socket.socket) -> ControlReply:
        line, uid = _line(connection), peer_uid(connection)
        if uid is not None and uid not in (0, os.geteuid()):
            return ControlReply(done=False, words="only root and the agent's own user may approve")
        try:
            request = msgspec.json.decode(line, type=ControlRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return ControlReply(done=False, words=f"this is no request: {error}")
        if _has_closed(connection):
            return ControlReply(done=False, words="the client has closed the connection: nothing is done")
        try:
            return self._answer(request, user_name(uid, request.sudo_user))
        except Exception as error:
            log.exception("approval by hand failed")
            return ControlReply(done=False, words=f"this failed ({type(error).__name__}): the agent's log says why")


def ask(directory: Path, request: ControlRequest) -> ControlReply:
    """Send a request to the agent of a state directory; raises ``NotBeforeError`` if none answers."""
    path = directory / NAME
    try:
        connection = _unix_socket()
    except OSError as error:
        raise NotBeforeError(str(error)) from None
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            return msgspec.json.decode(_line(connection), type=ControlReply)
        except TimeoutError:
            raise NotBeforeError(
                f"{path}: no answer after {ANSWER_SECONDS:g} s; `notbefore history` shows whether it was approved"
            ) from None
        except PermissionError:
            raise NotBeforeError(f"{path}: only root and the agent's own user may approve") from None
        except (OSError, msgspec.MsgspecError) as error:
            why = getattr(error, "strerror", None) or error
            raise NotBeforeError(
                f"no agent accepts approvals at {path} ({why}): is it running with --allow-approval, and is this its"
                " state directory (--state-dir)?"
            ) from None


def _unix_socket() -> socket.socket:
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise OSError("this system has no Unix sockets: events cannot be approved by hand")
    return socket.socket(family, socket.SOCK_STREAM)


def _has_closed(connection: socket.socket) -> bool:
    """The client has closed the connection."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(READ_SECONDS)


def peer_uid(connection: socket.socket) -> int | None:
    """The user id of the client, as the kernel knows it; ``None`` on systems without ``SO_PEERCRED``."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return int(uid)


def user_name(uid: int | None, sudo_user: str = "") -> str:
    """Return the name of a user, for the record; of root, who used sudo. ``uid``: None where it is not known."""
    if uid is None:
        return "an operator"
    if uid == 0 and sudo_user:
        return f"{sudo_user} (sudo)"
    import pwd  # noqa: PLC0415 - not on Windows

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < MAX_LINE:
        more = connection.recv(65536)
        if not more:
            break
        found += more
    return found
