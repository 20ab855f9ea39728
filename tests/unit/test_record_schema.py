"""The JSON Schema that the package ships describes every record."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.core.cloud_event import DATA_SCHEMA, cloud_event
from notbefore.core.record import Vm
from notbefore.wording.records import heartbeat_of, record_of
from support.azure import ME, PEER, T0, Story, item
from support.fleet_log import A, Log
from support.messages import VM

SCHEMA = json.loads(files("notbefore.core").joinpath("record.v1.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())

RANDOM_ITEMS = st.fixed_dictionaries(
    {
        "EventId": st.sampled_from(["a", "b"]),
        "EventStatus": st.sampled_from(["Scheduled", "Started", "Pondered"]),
        "EventType": st.text(min_size=1, max_size=9),
        "Resources": st.lists(st.sampled_from([ME, PEER, "\u202e"]), max_size=3, unique=True),
        "NotBefore": st.sampled_from(
            ["Sun, 01 Mar 2026 12:00:30 GMT", "Sun, 01 Mar 2026 13:00:30 GMT", "", None]
        ),
        "Description": st.one_of(st.none(), st.text(max_size=20)),
        "DurationInSeconds": st.sampled_from([-1, 0, 9]),
        "EventSource": st.sampled_from([None, "User"]),
    }
)
TAGGED = replace(
    VM,
    tags={"Team": "payments", "odd \u202e": "x" * 600},
    record_tags=("team", "odd \u202e"),
)


@given(
    st.lists(st.lists(RANDOM_ITEMS, max_size=3), max_size=6),
    st.sampled_from([None, VM, TAGGED, Vm(name=ME)]),
)
def test_record_of_random_documents_is_valid(
    documents: list[list[dict[str, Any]]], vm: Vm | None
) -> None:
    story = Story()

    for second, items in enumerate(documents):
        story.sees(second, *[item(**fields) for fields in items])

    for change in story.changes:
        VALIDATOR.validate(json.loads(record_of(change, vm).line()))


def test_record_of_a_fleet_is_valid() -> None:
    log = Log()
    for status in ("Scheduled", "Started", "Completed"):
        log.azure(status)
    log.add(A, "announced", "EVENT-2")

    records = [
        record_of(notification.change, notification.vm, fleet=notification.facts).flat()
        for notification in log.notifications
    ]

    name = "azure.scheduled_event.fleet.azure_status"
    assert [record.get(name) for record in records] == ["Scheduled", "Started", "Completed", None]
    for record in records:
        VALIDATOR.validate(json.loads(json.dumps(record)))


@pytest.mark.parametrize(
    "field",
    [
        {"azure.scheduled_event.change": "exploded"},
        {"azure.scheduled_event.notice_seconds": "900"},
        {"colour": "red"},
        {"azure.tag.": "no name"},
    ],
)
def test_schema_refuses_an_invalid_field(field: dict[str, Any]) -> None:
    record = record_of(Story().sees(0, item()).last, VM)

    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(record.flat() | field)


def test_envelope_names_the_schema() -> None:
    record = record_of(Story().sees(0, item()).last, VM)

    assert SCHEMA["$id"] == DATA_SCHEMA
    assert cloud_event(record, "d", {})["dataschema"] == DATA_SCHEMA


def test_heartbeat_has_the_vm_and_the_number_of_pending_events() -> None:
    heartbeat = heartbeat_of(VM, ("a", "b", "c"), "1.2.3", T0, 300.0)

    values = heartbeat.flat()

    assert values["host.name"] == ME
    assert values["azure.scheduled_events.pending"] == 3


def test_heartbeat_has_no_vm_when_it_is_unknown() -> None:
    assert "host.name" not in heartbeat_of(None, (), "1", T0).flat()


def test_envelope_of_a_heartbeat_has_a_type_and_no_schema() -> None:
    heartbeat = heartbeat_of(VM, ("a", "b", "c"), "1.2.3", T0, 300.0)

    envelope = cloud_event(heartbeat, "d", heartbeat.flat())

    assert envelope["type"] == "notbefore.heartbeat.v1"
    assert envelope["id"] == "d"
    assert envelope["source"] == VM.resource_id
    assert "dataschema" not in envelope


def test_queries_for_azure_monitor_use_fields_of_the_schema() -> None:
    document = Path(__file__).parents[2] / "docs" / "azure-monitor.md"
    text = document.read_text(encoding="utf-8")

    fields = set(re.findall(r'(?:r|Properties)\["([^"]+)"\]', text))

    assert len(fields) > 12
    assert fields - SCHEMA["properties"].keys() == set()
