"""What several integration tests need."""

import pytest
import trustme

from support.agent import PATIENCE


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(autouse=True)
def patient_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker waits until its step is written, however busy this machine is: what a test sees next is that step."""
    monkeypatch.setattr("notbefore.agent.tracker.COMMIT_PATIENCE", PATIENCE)
