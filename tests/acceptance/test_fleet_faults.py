"""``notbefore fleet`` loses nothing under faults; ``benchmarks/fleet.py faults`` runs longer."""

from pathlib import Path

import pytest

from support import fleet_faults
from support.fleet_faults import Account

# This process sends with the SDK's producer. It leaves its socket to a killed hub to the garbage
# collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
    pytest.mark.timeout(900),  # PATIENCE of fleet_faults may pass more than once
    pytest.mark.long,
]


def assert_nothing_lost(account: Account) -> None:
    assert account.lost == 0, account.line
    assert account.out_of_order == 0, account.line
    assert account.twice == 0, account.line
    assert account.wanted > 0


def test_two_instances_lose_nothing_when_one_is_killed_repeatedly(tmp_path: Path) -> None:
    account, _ = fleet_faults.kills(tmp_path, 4)

    assert_nothing_lost(account)
    # each kill repeats what was accepted after the last snapshot: 30 steps are notified in 5 s
    assert account.repeated <= 4 * 30


def test_instances_lose_nothing_when_the_hub_is_away_or_throttles(tmp_path: Path) -> None:
    account, _ = fleet_faults.hub_away(tmp_path, 3)

    assert_nothing_lost(account)
