"""Fixtures that several integration tests share."""

from collections.abc import Iterator

import pytest
import trustme

from notbefore.agent import state
from notbefore.store import disk, store
from support.agent import PATIENCE
from support.peers import HttpPeer


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def peer() -> Iterator[HttpPeer]:
    with HttpPeer() as running:
        yield running


@pytest.fixture(autouse=True)
def _a_slow_disk_is_not_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of a busy machine may take seconds, and a sick disk would fail these tests."""
    monkeypatch.setattr(disk, "START_PATIENCE", PATIENCE)
    monkeypatch.setattr(disk, "SLOW", PATIENCE)
    monkeypatch.setattr(store, "READ_PATIENCE", PATIENCE)
    monkeypatch.setattr(state, "WRITE_PATIENCE", PATIENCE)
