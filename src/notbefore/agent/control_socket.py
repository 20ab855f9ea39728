"""``ControlSocket``: the agent's own Unix socket, on which alone an event can be approved by hand.

One JSON object on a line in, one out. It is there only where the agent was started with ``--allow-approval``, can be
opened by root and the agent's user alone (0600), and who asks is known from the kernel.
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
    """Asks for an event to be shown; with the ``content`` that was shown, to be approved."""

    event_id: str
    content: str = ""
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""  # why, for the record
    sudo_user: Annotated[str, Meta(max_length=MAX_USER)] = ""  # who became root to ask; used only if root asks


class ControlReply(Struct, frozen=True):
    """What came of it, in words."""

    done: bool
    words: str = ""
    event: PendingEvent | None = None
    content: str = ""  # what stands for it as it is shown


class ControlSocket:
    """Serves one connection after the other; ``carry_out(order, user)`` does the work."""

    def __init__(self, directory: Path, carry_out: Callable[[ControlRequest, str], ControlReply]) -> None:
        self.path = directory / NAME
        self._carry_out = carry_out
        self._socket: socket.socket | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        """Listen; where that cannot be, the log says so, and nothing can be approved by hand."""
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
        self.path.unlink(
            missing_ok=True
        )  # of an agent that was killed; the directory's lock says that there is no other
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
                connection.sendall(msgspec.json.encode(self._answer(connection)) + b"\n")

    def _answer(self, connection: socket.socket) -> ControlReply:
        line, uid = _line(connection), peer_uid(connection)
        if uid is not None and uid not in (0, os.geteuid()):
            return ControlReply(done=False, words="only root and the agent's own user may approve")
        try:
            order = msgspec.json.decode(line, type=ControlRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return ControlReply(done=False, words=f"this is no order: {error}")
        if _gone(connection):
            return ControlReply(done=False, words="nobody waits for the answer any more: nothing is done")
        try:
            return self._carry_out(order, user_name(uid, order.sudo_user))
        except Exception as error:
            log.exception("approval by hand failed")
            return ControlReply(done=False, words=f"it failed ({type(error).__name__}): the agent's log says why")


def ask(directory: Path, order: ControlRequest) -> ControlReply:
    """Give an order to the agent of a state directory; raises ``NotBeforeError`` where none listens."""
    path = directory / NAME
    try:
        connection = _unix_socket()
    except OSError as error:
        raise NotBeforeError(str(error)) from None
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(order) + b"\n")
            return msgspec.json.decode(_line(connection), type=ControlReply)
        except TimeoutError:
            raise NotBeforeError(
                f"{path}: no answer after {ANSWER_SECONDS:g} s; `notbefore history` will tell whether it was approved"
            ) from None
        except PermissionError:
            raise NotBeforeError(f"{path}: only root and the agent's own user may approve") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise NotBeforeError(
                f"no agent takes approvals at {path} ({error}): is it running, with --allow-approval, and is this its"
                " state directory (--state-dir)?"
            ) from None


def _unix_socket() -> socket.socket:
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise OSError("there are no Unix sockets on this system, and nothing else can approve by hand")
    return socket.socket(family, socket.SOCK_STREAM)


def _gone(connection: socket.socket) -> bool:
    """Whoever asked has hung up."""
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
    """Who is at the other end, as the kernel knows; ``None`` on systems that do not say so that way."""
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
