"""A simulated Event Grid: its messages, and when it delivers them."""

import time
from typing import Any

import msgspec
import pytest

from notbefore.fleet.azure_messages import AzureReport, read_messages
from notbefore.simulator.event_grid import SCHEMAS, DeliveryFaults, EventGrid, Schema
from notbefore.simulator.state import SimulatorState, instance

NO_FAULTS = DeliveryFaults()


def simulated(**start: Any) -> SimulatorState:
    """Return a simulator with a user's reboot: 15 minutes of notice."""
    state = SimulatorState(["web_0", "web_1"], 1.0)
    state.start("user-reboot", **start)
    return state


def reports(bodies: list[bytes]) -> list[AzureReport]:
    azure_reports: list[AzureReport] = []
    for body in bodies:
        messages = read_messages(body)
        assert messages is not None
        azure_reports += messages.reports
    return azure_reports


def statuses(bodies: list[bytes]) -> list[str]:
    return [report.status for report in reports(bodies)]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_message_has_the_identity_of_the_simulated_vm(schema: Schema) -> None:
    now = time.time()
    compute = instance("web_0")["compute"]
    event_grid = EventGrid(simulated(), schema, NO_FAULTS)

    (report,) = reports(event_grid.due(now))

    assert report.place.subscription == compute["subscriptionId"]
    assert report.place.resource_group == compute["resourceGroupName"]
    assert report.place.scale_set == "web"
    assert report.event.resources == ("web_0",)
    assert report.event.not_before is not None
    assert report.time is not None
    assert report.time.timestamp() == pytest.approx(now, abs=0.01)


def test_schema_is_the_chosen_one() -> None:
    now = time.time()

    (grid_event,) = EventGrid(simulated(), "event-grid", NO_FAULTS).due(now)
    (cloud_event,) = EventGrid(simulated(), "cloud-events", NO_FAULTS).due(now)

    assert "eventType" in msgspec.json.decode(grid_event)
    assert msgspec.json.decode(cloud_event)["specversion"] == "1.0"


def test_each_status_is_published_once() -> None:
    now = time.time()
    event_grid = EventGrid(simulated(), "event-grid", NO_FAULTS)

    published: list[str] = []
    for seconds in (0, 1, 901, 902, 10_000, 10_001):
        published += statuses(event_grid.due(now + seconds))

    assert published == ["Scheduled", "Started", "Completed"]


def test_statuses_that_passed_between_two_looks_are_published() -> None:
    now = time.time()
    event_grid = EventGrid(simulated(), "event-grid", NO_FAULTS)
    event_grid.due(now)

    assert statuses(event_grid.due(now + 10_000)) == ["Started", "Completed"]


def test_statuses_that_passed_before_the_first_look_are_published() -> None:
    event_grid = EventGrid(simulated(), "event-grid", NO_FAULTS)

    messages = event_grid.due(time.time() + 10_000)

    assert statuses(messages) == ["Scheduled", "Started", "Completed"]


def test_cancellation_before_the_first_look_publishes_scheduled_too() -> None:
    event_grid = EventGrid(simulated(cancel=True), "event-grid", NO_FAULTS)

    messages = event_grid.due(time.time() + 600)

    assert statuses(messages) == ["Scheduled", "Canceled"]


def test_canceled_event_is_published_as_canceled() -> None:
    now = time.time()
    event_grid = EventGrid(simulated(cancel=True), "event-grid", NO_FAULTS)
    event_grid.due(now)

    assert statuses(event_grid.due(now + 600)) == ["Canceled"]


def test_late_message_waits() -> None:
    now = time.time()
    faults = NO_FAULTS.with_fault("late", 120)
    event_grid = EventGrid(simulated(), "event-grid", faults)

    early = event_grid.due(now) + event_grid.due(now + 119)
    (report,) = reports(event_grid.due(now + 120))

    assert early == []
    assert report.time is not None
    assert report.time.timestamp() == pytest.approx(now, abs=0.01)


def test_repeated_message_has_the_same_bytes() -> None:
    now = time.time()
    event_grid = EventGrid(simulated(), "event-grid", NO_FAULTS.with_fault("repeat", 2))

    bodies = event_grid.due(now) + event_grid.due(now + 6)

    assert len(bodies) == 3
    assert len(set(bodies)) == 1


def test_reordered_messages_come_in_another_order() -> None:
    now = time.time()
    orders: set[tuple[str, ...]] = set()
    for seed in range(20):
        event_grid = EventGrid(
            simulated(), "event-grid", NO_FAULTS.with_fault("reorder", 3600), seed
        )
        published: list[str] = []
        for seconds in range(0, 20_000, 100):
            published += statuses(event_grid.due(now + seconds))
        orders.add(tuple(published))

    assert len(orders) > 1
    assert {len(order) for order in orders} == {3}


@pytest.mark.parametrize(
    ("kind", "value"),
    [("lost", None), ("late", -1.0), ("late", 1e9), ("repeat", 11.0), ("late", float("nan"))],
)
def test_wrong_fault_is_refused(kind: str, value: float | None) -> None:
    with pytest.raises(ValueError, match=r"KIND is|VALUE is"):
        NO_FAULTS.with_fault(kind, value)


def test_partition_key_equals_that_of_the_agents() -> None:
    event_grid = EventGrid(simulated(), "event-grid", NO_FAULTS)

    assert event_grid.partition_key == "8d10da13-8125-4ba9-a717-bf7490507b3d/fleet/web"
