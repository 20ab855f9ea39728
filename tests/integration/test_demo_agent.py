"""The port of a demo's agent: others may want the same one, at the same time."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from notbefore.commands.demo_agent import ATTEMPTS, start_agent
from notbefore.errors import NotBeforeError
from notbefore.simulator.server import Simulator
from support.agent import PATIENCE


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _agent(stack: ExitStack, state: Path, listen: str, *more: str) -> "subprocess.Popen[bytes]":
    imds = stack.enter_context(Simulator(("vm_0",))).endpoint
    command = [sys.executable, "-m", "notbefore", "run", "--imds", imds, "--state-dir", str(state), *more]
    process = subprocess.Popen([*command, "--listen", listen], env=dict(os.environ), stderr=subprocess.DEVNULL)
    stack.callback(process.wait, PATIENCE)
    stack.callback(process.terminate)
    return process


def test_a_demo_that_begins_meanwhile_takes_another_port(stack: ExitStack, tmp_path: Path) -> None:
    others = []

    def start(listen: str) -> "subprocess.Popen[bytes]":
        # this one's port is chosen and not in use yet
        others.append(start_agent(stack, lambda other: _agent(stack, tmp_path / "other", other), PATIENCE))
        return _agent(stack, tmp_path / "own", listen)

    process, client = start_agent(stack, start, PATIENCE)
    ((other, other_client),) = others
    assert client.url != other_client.url
    assert (process.poll(), other.poll()) == (None, None)


def test_where_the_chosen_port_is_taken_meanwhile_another_is_tried(stack: ExitStack, tmp_path: Path) -> None:
    tried = []

    def start(listen: str) -> "subprocess.Popen[bytes]":
        tried.append(listen)
        if len(tried) == 1:
            thief = stack.enter_context(socket.create_server(("127.0.0.1", int(listen.rpartition(":")[2]))))
            thief.setblocking(False)
        return _agent(stack, tmp_path, listen)

    process, client = start_agent(stack, start, PATIENCE)
    assert client.url == f"http://{tried[1]}"
    assert len(tried) == 2
    assert process.poll() is None


def test_an_agent_that_ends_for_another_reason_is_not_tried_again(stack: ExitStack, tmp_path: Path) -> None:
    tried = []

    def start(listen: str) -> "subprocess.Popen[bytes]":
        tried.append(listen)
        return _agent(stack, tmp_path, listen, "--no-such-option")

    with pytest.raises(NotBeforeError, match="did not start"):
        start_agent(stack, start, PATIENCE)
    assert len(tried) == 1 < ATTEMPTS
