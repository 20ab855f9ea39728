"""The JSON Schema that the package ships holds for every record, and says what is in it."""

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
from support.messages import VM

SCHEMA = json.loads(files("notbefore.core").joinpath("record.v1.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())

listed = st.fixed_dictionaries(
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
    VM, tags={"Team": "payments", "odd \u202e": "x" * 600}, record_tags=("team", "odd \u202e")
)


@given(
    st.lists(st.lists(listed, max_size=3), max_size=6),
    st.sampled_from([None, VM, TAGGED, Vm(name=ME)]),
)
def test_every_record_is_as_the_schema_says(
    documents: list[list[dict[str, Any]]], vm: Vm | None
) -> None:
    story = Story()
    for second, items in enumerate(documents):
        story.sees(second, *(item(**fields) for fields in items))
    for change in story.changes:
        VALIDATOR.validate(json.loads(record_of(change, vm).line()))


@pytest.mark.parametrize(
    "damage",
    [
        {"azure.scheduled_event.change": "exploded"},
        {"azure.scheduled_event.notice_seconds": "900"},
        {"colour": "red"},
        {"azure.tag.": "no name"},
    ],
)
def test_the_schema_refuses_what_is_no_record(damage: dict[str, Any]) -> None:
    change = Story().sees(0, item()).last
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(record_of(change, VM).flat() | damage)


def test_the_schema_is_named_in_the_envelope() -> None:
    assert SCHEMA["$id"] == DATA_SCHEMA
    record = record_of(Story().sees(0, item()).last, VM)
    assert cloud_event(record, "d", {})["dataschema"] == DATA_SCHEMA


def test_a_heartbeat_says_who_is_watched_and_how_much_is_pending() -> None:
    heartbeat = heartbeat_of(VM, ("a", "b", "c"), "1.2.3", T0, 300.0)
    values = heartbeat.flat()
    envelope = cloud_event(heartbeat, "d", values)
    assert (envelope["type"], envelope["id"], envelope["source"]) == (
        "notbefore.heartbeat.v1",
        "d",
        VM.resource_id,
    )
    assert (values["host.name"], values["azure.scheduled_events.pending"]) == (ME, 3)
    assert "dataschema" not in envelope
    assert "host.name" not in heartbeat_of(None, (), "1", T0).flat()


def test_the_queries_for_azure_monitor_ask_for_what_is_there() -> None:
    document = Path(__file__).parents[2] / "docs" / "azure-monitor.md"
    asked = set(re.findall(r'(?:r|Properties)\["([^"]+)"\]', document.read_text(encoding="utf-8")))
    assert len(asked) > 12
    assert asked - SCHEMA["properties"].keys() == set()
