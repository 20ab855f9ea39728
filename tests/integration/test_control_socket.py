"""The agent's own socket: it passes requests on, and answers with their outcome."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from notbefore.config.lint import MAX_STATE_DIR
from notbefore.errors import NotBeforeError
from notbefore.process import control_socket
from notbefore.process.control_socket import (
    NAME,
    ControlReply,
    ControlRequest,
    ControlSocket,
    _unix_socket,
    ask_agent,
    listens,
)
from notbefore.process.operations import Request
from support.agent import eventually


class Desk:
    """Answers requests for approvals with a function."""

    def __init__(self, carry_out: Callable[[ControlRequest, str], ControlReply]) -> None:
        self._carry_out = carry_out

    def answer(self, request: ControlRequest | Request, user: str) -> ControlReply:
        assert isinstance(request, ControlRequest)
        return self._carry_out(request, user)


def approve_all(_request: ControlRequest, _user: str) -> ControlReply:
    return ControlReply(done=True)


def test_order_is_not_carried_out_when_its_client_has_gone(tmp_path: Path) -> None:
    event_ids: list[str] = []
    released = threading.Event()

    def carry_out(order: ControlRequest, _user: str) -> ControlReply:
        event_ids.append(order.event_id)
        released.wait(60)
        return ControlReply(done=True)

    control = ControlSocket(tmp_path, Desk(carry_out))
    control.start()
    eventually(lambda: listens(tmp_path))
    first = threading.Thread(
        target=ask_agent, args=(tmp_path, ControlRequest("first"), ControlReply)
    )
    first.start()
    eventually(lambda: event_ids == ["first"])

    with _unix_socket() as connection:  # the second client gives up while it waits
        connection.connect(str(tmp_path / NAME))
        connection.sendall(b'{"ask": "approve", "event_id": "second", "content": "x"}\n')
    released.set()
    third_reply = ask_agent(tmp_path, ControlRequest("third"), ControlReply)
    first.join()
    control.stop()

    assert third_reply.done
    assert event_ids == ["first", "third"]


def test_dripping_client_does_not_block_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "CLIENT_SECONDS", 0.5)
    stopped = threading.Event()
    control = ControlSocket(tmp_path, Desk(approve_all))
    control.start()
    eventually(lambda: listens(tmp_path))

    with _unix_socket() as dripping:
        dripping.connect(str(tmp_path / NAME))

        def drip() -> None:
            with suppress(OSError):
                while not stopped.wait(0.05):
                    dripping.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:  # it fails if no answer comes while the first client drips
            reply = ask_agent(tmp_path, ControlRequest("next"), ControlReply)
        finally:
            stopped.set()
            thread.join()
    control.stop()

    assert reply.done


def test_client_does_not_wait_for_an_agent_that_accepts_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "CLIENT_SECONDS", 0.1)
    with _unix_socket() as stuck:
        stuck.bind(str(tmp_path / NAME))
        stuck.listen(0)

        for _ in range(3):  # the first ones fill the queue of connections
            assert listens(tmp_path)


def test_unencodable_answer_does_not_end_the_control_socket(tmp_path: Path) -> None:
    # the names of users and files need not be UTF-8
    words = iter(["\udcff", "done"])

    def answer(_request: ControlRequest, _user: str) -> ControlReply:
        return ControlReply(done=True, words=next(words))

    control = ControlSocket(tmp_path, Desk(answer))
    control.start()
    eventually(lambda: listens(tmp_path))
    try:
        with pytest.raises(NotBeforeError, match=r"this failed \(UnicodeEncodeError\)"):
            ask_agent(tmp_path, ControlRequest("E"), ControlReply)
        reply = ask_agent(tmp_path, ControlRequest("E"), ControlReply)
    finally:
        control.stop()

    assert reply.words == "done"


def test_longest_state_directory_has_a_socket(tmp_path: Path) -> None:
    room = MAX_STATE_DIR - len(str(tmp_path)) - len("/")
    directory = tmp_path / ("x" * room)
    directory.mkdir()
    control = ControlSocket(directory, Desk(approve_all))
    control.start()
    try:
        eventually(lambda: listens(directory))
        reply = ask_agent(directory, ControlRequest("a"), ControlReply)
    finally:
        control.stop()

    assert reply.done
    longer = directory.with_name("x" * (room + 1))
    with _unix_socket() as listener, pytest.raises(OSError, match="path too long"):
        listener.bind(str(longer / NAME))


def test_socket_is_created_again_once_its_deleted_directory_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "LOOK_INTERVAL", 0.05)
    directory = tmp_path / "state"
    directory.mkdir()
    control = ControlSocket(directory, Desk(approve_all))
    control.start()
    eventually(lambda: listens(directory))

    # in one step, because the agent could create the socket again in a directory that is emptied
    directory.rename(tmp_path / "deleted")
    eventually(lambda: not listens(directory))

    directory.mkdir()
    eventually(lambda: listens(directory))

    control.stop()
    eventually(lambda: not (directory / NAME).exists())
