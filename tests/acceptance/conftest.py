"""What most acceptance tests talk to: a simulated IMDS that lists nothing yet, a webhook's
receiver, an Event Hub.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.azure import ME, PEER
from support.hub import Hub
from support.peers import HttpPeer


@pytest.fixture
def imds() -> Iterator[Simulator]:
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
