"""Ended events of a fleet, for its history."""

from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Any

from notbefore.core.change import Outcome
from notbefore.fleet.history import PastEvent
from notbefore.fleet.story import Measures

THEN = datetime(2026, 3, 10, 12, tzinfo=UTC)


def past_event(
    event_id: str = "EVENT-1",
    event_type: str = "Reboot",
    *,
    closed: datetime = THEN,
    outcome: Outcome = "finished",
    notice: tuple[float, ...] = (900.0,),
    interruption: tuple[float, ...] = (),
    **fields: Any,
) -> PastEvent:
    """Return an ended event; it has as many VMs as there are notices or interruptions."""
    pairs = list(zip_longest(notice, interruption)) or [(None, None)]
    measured = {f"web_{number}": Measures(*pair) for number, pair in enumerate(pairs)}
    values: dict[str, Any] = {
        "event_id": event_id,
        "nth": 0,
        "event_type": event_type,
        "event_source": "Platform",
        "region": "westeurope",
        "zone": "1",
        "scale_set": "web",
        "resource_group": "rg",
        "subscription": "sub",
        "tags": {},
        "description": None,
        "expected_seconds": 9,
        "vms": tuple(measured),
        "reported_by": 3,
        "first_seen": closed - timedelta(minutes=20),
        "not_before": closed - timedelta(minutes=5),
        "started": closed - timedelta(minutes=5),
        "over": closed,
        "closed": closed,
        "outcome": outcome,
        "as_far_as_known": False,
        "exercise": False,
        "measured": measured,
    }
    return PastEvent(**(values | fields))
