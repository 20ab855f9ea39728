"""Fixtures of most acceptance tests: a simulated IMDS, a receiver of webhooks, an Event Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.azure import ME, PEER
from support.hub import Hub
from support.peers import HttpPeer


@pytest.fixture
def imds() -> Iterator[Simulator]:
    """A simulated IMDS of two VMs, which lists no event yet."""
    with Simulator((ME, PEER)) as simulator:
        yield simulator


@pytest.fixture
def hook() -> Iterator[HttpPeer]:
    with HttpPeer() as running:
        yield running


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path) as running:
        yield running
