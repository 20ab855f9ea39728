"""Azure's own messages: both schemas, both types, in the forms of Microsoft's documents."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.fleet.azure_messages import AzureMessages, AzureReport, read_messages, read_record
from notbefore.fleet.hub_records import Place, PoisonError, read
from support.azure import at
from support.event_grid import (
    EMITTED,
    SUBSCRIPTION,
    WRITTEN,
    as_cloud_event,
    encoded,
    message,
    resource_id,
)
from support.fleet_log import A
from support.fleet_records import body, report

# the sample of "Scheduled Events in Event Grid Concepts": its `id` is the EventId
SAMPLE = {
    "id": "3da1b9aa-5204-4335-8c33-c54e315dcffe",
    "topic": f"/subscriptions/{SUBSCRIPTION}",
    "subject": resource_id(subscription=SUBSCRIPTION, resource_group="Prod", name="myvmss"),
    "data": {
        "resourceInfo": {
            "id": resource_id(subscription=SUBSCRIPTION, resource_group="Prod", name="myvmss"),
            "name": "3da1b9aa-5204-4335-8c33-c54e315dcffe",
            "type": "microsoft.maintenance/scheduledEvents",
            "location": "eastus",
            "properties": {
                "DurationInSeconds": 5,
                "Description": "Virtual machine is being paused because of a memory-preserving"
                " Live Migration operation.",
                "EventId": "3da1b9aa-5204-4335-8c33-c54e315dcffe",
                "EventSource": "Platform",
                "EventStatus": "Started",
                "EventType": "Freeze",
                "NotBefore": "Mon, 19 Sep 2025 18:29:47 GMT",
                "Resources": ["myvmss_1", "myvmss_2"],
                "ResourceType": "VirtualMachine",
            },
        },
        "apiVersion": "2024-07-01",
    },
    "eventType": EMITTED,
    "dataVersion": "3.0",
    "metadataVersion": "1",
    "eventTime": "2017-06-26T18:41:00.9584103Z",
}
# captured: ids in lower case, a subject that ends before the event, times of .NET
CAPTURED = {
    "data": {
        "apiVersion": "2020-03-01",
        "operationalInfo": {"resourceEventTime": "2024-12-04T18:01:13.2675752Z"},
        "resourceInfo": {
            "id": f"/subscriptions/{SUBSCRIPTION}/resourcegroups/my-resource-group-001/providers"
            "/microsoft.compute/virtualmachines/my_vm_001/providers/microsoft.maintenance"
            "/scheduledevents/743c15d8-a994-46fc-93af-b84ee33f9a14",
            "location": "westus2",
            "name": "743c15d8-a994-46fc-93af-b84ee33f9a14",
            "properties": {
                "Description": "Virtual machine is undergoing maintenance",
                "DurationInSeconds": -1,
                "EventId": "743c15d8-a994-46fc-93af-b84ee33f9a14",
                "EventSource": "Platform",
                "EventStatus": "Completed",
                "EventType": "Freeze",
                "NotBefore": "",
                "ResourceType": "VirtualMachine",
                "Resources": ["my_vm_001"],
            },
            "tags": {},
            "type": "microsoft.maintenance/scheduledevents",
        },
    },
    "dataVersion": "1",
    "eventTime": "2024-12-04T18:01:13.2675752Z",
    "eventType": EMITTED,
    "id": "6e9f8439-8bf5-48f1-805d-ad8ab7cd1951",
    "metadataVersion": "1",
    "subject": f"/subscriptions/{SUBSCRIPTION}/resourcegroups/my-resource-group-001/providers"
    "/microsoft.compute/virtualmachines/my_vm_001",
    "topic": f"/subscriptions/{SUBSCRIPTION}",
}
# an upgrade of a cluster: it shares the topic and the type
CLUSTER = {
    "id": "bbe82027-0444-4f73-897a-0bbfe3af66f1",
    "topic": f"/subscriptions/{SUBSCRIPTION}",
    "subject": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/rg/providers"
    "/Microsoft.ContainerService/managedClusters/a/scheduledEvents/b",
    "data": {
        "resourceInfo": {
            "id": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/rg/providers"
            "/Microsoft.ContainerService/managedClusters/a/scheduledEvents/b",
            "type": "Microsoft.ContainerService/managedClusters/scheduledEvents",
            "location": "westus2",
            "properties": {
                "eventId": "b",
                "eventStatus": "Started",
                "resources": ["/subscriptions/s/resourcegroups/comms"],
                "resourceType": "ManagedCluster",
            },
        },
        "operationalInfo": {"resourceEventTime": "2024-04-16T22:17:12.1032748"},
        "apiVersion": "2023-11-02-preview",
    },
    "eventType": EMITTED,
    "eventTime": "2024-04-16T22:17:12.1032748Z",
}


def only_report(*messages: dict[str, Any]) -> AzureReport:
    decoded = read_messages(encoded(*messages))
    assert decoded is not None
    (azure_report,) = decoded.reports
    return azure_report


def properties_of(event: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = event["data"]["resourceInfo"]["properties"]
    return properties


def test_documented_sample_is_read() -> None:
    azure_report = only_report(SAMPLE)

    assert azure_report.status == "Started"
    assert azure_report.event.event_type == "Freeze"
    assert azure_report.event.resources == ("myvmss_1", "myvmss_2")
    assert azure_report.event.not_before is None
    assert azure_report.event.duration == 5
    assert azure_report.place == Place(SUBSCRIPTION, "Prod", "eastus", "myvmss")
    assert azure_report.time == datetime(2017, 6, 26, 18, 41, 0, 958410, UTC)
    assert azure_report.resource_id.endswith(
        "/Prod/providers/Microsoft.Compute/virtualMachineScaleSets/myvmss"
    )


def test_captured_message_is_read() -> None:
    azure_report = only_report(CAPTURED)

    assert azure_report.status == "Completed"
    assert azure_report.event.event_status == "Started"
    assert azure_report.event.duration is None
    assert azure_report.place == Place(SUBSCRIPTION, "my-resource-group-001", "westus2")


@pytest.mark.parametrize("kind", [EMITTED, WRITTEN, EMITTED.upper()])
def test_documented_types_are_read_in_both_schemas(kind: str) -> None:
    event = {**message("Scheduled", at=at(0), not_before=at(900)), "eventType": kind}

    of_grid = only_report(event)
    of_cloud_events = only_report(as_cloud_event(event))

    assert of_grid == of_cloud_events
    assert of_grid.event.not_before == at(900)
    assert of_grid.time == at(0)


def test_array_is_read_message_by_message() -> None:
    decoded = read_messages(
        encoded(
            message("Scheduled", "E0", at=at(0)),
            CLUSTER,
            as_cloud_event(message("Canceled", "E1", at=at(1))),
            {"eventType": "Microsoft.EventGrid.SubscriptionValidationEvent", "data": {}},
        )
    )

    assert decoded is not None
    first, second = decoded.reports
    assert first.event.event_id == "E0"
    assert first.status == "Scheduled"
    assert second.event.event_id == "E1"
    assert second.status == "Canceled"
    assert decoded.skipped == 2
    assert decoded.unreadable == ()


@pytest.mark.parametrize(
    "changed",
    [{"ResourceType": "ManagedCluster"}, {"EventStatus": "Postponed"}, {"EventStatus": None}],
)
def test_message_about_something_else_is_skipped(changed: dict[str, Any]) -> None:
    decoded = read_messages(encoded(message("Started", at=at(0), **changed)))

    assert decoded == AzureMessages(skipped=1)


@pytest.mark.parametrize("changed", [{"EventId": ""}, {"EventType": None}, {"EventId": 3}])
def test_unreadable_event_leaves_the_others(changed: dict[str, Any]) -> None:
    decoded = read_messages(
        encoded(message("Started", at=at(0), **changed), message("Started", "E1", at=at(0)))
    )

    assert decoded is not None
    assert [azure_report.event.event_id for azure_report in decoded.reports] == ["E1"]
    assert len(decoded.unreadable) == 1


@pytest.mark.parametrize("other", ["text", None, 5, [], {"eventType": 5}])
def test_array_element_that_is_no_message_leaves_the_others(other: object) -> None:
    good = message("Started", at=at(1))

    result = read_record(json.dumps([good, other, good]).encode())

    assert isinstance(result, AzureMessages)
    assert [azure_report.status for azure_report in result.reports] == ["Started", "Started"]
    assert len(result.unreadable) == 1


def test_data_that_is_no_object_is_unreadable() -> None:
    event = {**message("Started", at=at(0)), "data": [1]}

    decoded = read_messages(encoded(event))

    assert decoded is not None
    assert len(decoded.unreadable) == 1


@pytest.mark.parametrize(
    ("kind", "scale_set"),
    [
        ("virtualMachines", ""),
        ("virtualMachineScaleSets", "web"),
        ("VIRTUALMACHINESCALESETS", "web"),
        ("availabilitySets", ""),
    ],
)
def test_azure_and_agents_identify_an_event_in_the_same_way(kind: str, scale_set: str) -> None:
    resource = resource_id(kind, resource_group="RG", subscription="SUB")
    azure_report = only_report(message("Started", "event-1", at=at(0), resource=resource))
    vm_report = read(body(report(A, "started", "EVENT-1")))
    assert vm_report is not None

    assert azure_report.place.group == vm_report.place.group
    assert azure_report.event.key == "event-1"
    assert azure_report.event.vms == ("web_0",)
    assert azure_report.place.scale_set == scale_set


def test_subject_identifies_an_event_without_an_id() -> None:
    event = message("Started", at=at(0))
    event["data"]["resourceInfo"]["id"] = None

    assert only_report(event).place.group == "sub/rg/"


def test_vm_in_the_resource_id_is_affected_without_resources() -> None:
    resource = resource_id("virtualMachines", "web_7")

    azure_report = only_report(message("Started", at=at(0), resource=resource, Resources=[]))

    assert azure_report.event.resources == ("web_7",)


def test_scale_set_in_the_resource_id_is_no_affected_vm() -> None:
    azure_report = only_report(message("Started", at=at(0), Resources=[]))

    assert azure_report.event.resources == ()


def test_time_of_the_resource_replaces_a_missing_event_time() -> None:
    event = message("Started", at=at(0))
    del event["eventTime"]
    event["data"]["operationalInfo"] = {"resourceEventTime": "2026-03-01T12:00:05.1234567"}

    assert only_report(event).time == datetime(2026, 3, 1, 12, 0, 5, 123456, UTC)


def test_message_without_time_is_read() -> None:
    event = message("Started", at=at(0))
    event["eventTime"] = "soon"

    assert only_report(event).time is None


def test_message_that_mentions_notbefore_is_read() -> None:
    resource = resource_id(resource_group="notbefore.test")

    decoded = read_record(encoded(message("Started", at=at(0), resource=resource)))

    assert isinstance(decoded, AzureMessages)
    assert len(decoded.reports) == 1


@pytest.mark.parametrize(
    "record",
    [b"[]", b"[1]", b"null", b'{"type": "com.example.order"}', b'[{"eventType": "Contoso.Sold"}]'],
)
def test_record_of_another_product_is_foreign(record: bytes) -> None:
    with pytest.raises(PoisonError) as raised:
        read_record(record)

    assert raised.value.reason == "foreign"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_a_poison_error(data: bytes) -> None:
    for record in (data, b'{"eventType":"Microsoft.' + data, b"[" + data + b"]"):
        with suppress(PoisonError):
            read_record(record)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=9), children, max_size=3)
    ),
    max_leaves=8,
)


def assert_counted_once(event: dict[str, Any]) -> None:
    """Assert that a message is read, skipped or unreadable, if it is one of Azure at all."""
    decoded = read_messages(json.dumps(event).encode())
    if decoded is not None:
        total = len(decoded.reports) + decoded.skipped + len(decoded.unreadable)
        assert total == 1


@given(st.sampled_from(sorted(properties_of(message("Scheduled", at=at(0))))), JSON)
def test_message_is_counted_once_for_any_value_of_a_property(name: str, value: Any) -> None:
    event = message("Scheduled", at=at(0), **{name: value})

    assert_counted_once(event)
    assert_counted_once(as_cloud_event(event))


@given(
    st.sampled_from(["data", "subject", "eventTime", "resourceInfo", "properties", "location"]),
    JSON,
)
def test_message_is_counted_once_for_any_value_around_properties(name: str, value: Any) -> None:
    event = message("Scheduled", at=at(0))
    for holder in (event, event["data"], event["data"]["resourceInfo"]):
        if name in holder:
            holder[name] = value
            break

    assert_counted_once(event)


def test_record_nested_too_deeply_is_not_used() -> None:
    nested = b"[" * 100_000 + b"]" * 100_000
    record = encoded(message("Started", "E0", at=at(0)))
    deep_record = record.replace(b'"As Azure words it."', nested)
    assert len(deep_record) > len(nested)

    with pytest.raises(PoisonError):
        read_record(deep_record)
