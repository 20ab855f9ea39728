"""Records: their attributes with OpenTelemetry's names, their line, and their sentence."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.change import SILENT, Change
from notbefore.core.cloud_event import cloud_event, partition_key
from notbefore.core.delivery import heartbeat_delivery
from notbefore.core.message import Message
from notbefore.core.record import (
    MAX_TAG,
    MAX_TAGS,
    TAG,
    BaseRecord,
    FleetFacts,
    Record,
    Vm,
    is_of_resource,
    resource_attributes,
    tags_in,
)
from notbefore.errors import SendError
from notbefore.wording.phrases import MISSING
from notbefore.wording.records import heartbeat_of, record_of
from notbefore.wording.sentences import progress, sentence, several_vms
from support.azure import ID, ME, PEER, STARTED, Story, at, item
from support.box import change
from support.messages import message

VM = Vm(
    name=ME,
    vm_id="0f1e",
    location="westeurope",
    subscription_id="8d10",
    resource_id="/subscriptions/8d10/x",
    zone="1",
)


HOSTILE = "\u202e\x00\n" + "x" * 10_000


def announced(**fields: Any) -> Change:
    """Return the announcement of an event with these fields."""
    return Story().sees(0, item(**fields)).last


def tag_attributes(record: BaseRecord) -> dict[str, Any]:
    """Return the attributes of a record that hold tags."""
    return {name: value for name, value in record.flat().items() if name.startswith(TAG)}


# ---- attributes


def test_record_of_finished_event_has_its_measurements() -> None:
    story = Story()
    story.sees(0)
    story.sees(1, item())
    story.sees(900, item(**STARTED), gap=2.5)
    story.sees(1500, gap=0.0)

    flat = record_of(story.last, VM).flat()

    assert flat["azure.scheduled_event.outcome"] == "finished"
    assert flat["azure.scheduled_event.notice_seconds"] == 899
    assert flat["azure.scheduled_event.started_seconds"] == 600
    assert flat["azure.scheduled_event.interruption_seconds"] == 2.5
    assert flat["azure.scheduled_event.not_before"] == "2026-03-01T12:15:00.000Z"


def test_record_identifies_event_and_vm() -> None:
    story = Story()
    story.sees(0, item(**STARTED))
    story.sees(1500)

    flat = record_of(story.last, VM).flat()

    assert flat["event.name"] == "azure.scheduled_event.finished"
    assert flat["cloud.provider"] == "azure"
    assert flat["cloud.region"] == "westeurope"
    assert flat["host.id"] == "0f1e"
    assert flat["azure.scheduled_event.id"] == ID


def test_resource_has_the_attributes_of_every_record() -> None:
    of_every_record = set(BaseRecord.__struct_encode_fields__)

    assert set(resource_attributes(VM)) == of_every_record - {"time", "event.name", "body", TAG}


# ---- tags

TAGGED = replace(VM, tags={"Team": "Payments", "env": "prod", "cost": "7"})
RECORDING_TAGS = replace(TAGGED, record_tags=("team", "ENV", "owner"))


def test_record_has_no_tags_by_default() -> None:
    assert tag_attributes(record_of(announced(), TAGGED)) == {}


def records_with_tags() -> list[BaseRecord]:
    """Return a record of an event, and a heartbeat."""
    event = announced()
    return [
        record_of(event, RECORDING_TAGS),
        heartbeat_of(RECORDING_TAGS, (), "1", event.time),
    ]


@pytest.mark.parametrize("record", records_with_tags(), ids=["event", "heartbeat"])
def test_record_has_the_configured_tags(record: BaseRecord) -> None:
    assert tag_attributes(record) == {"azure.tag.team": "Payments", "azure.tag.env": "prod"}


@pytest.mark.parametrize("record", records_with_tags(), ids=["event", "heartbeat"])
def test_record_with_tags_is_read_from_its_line(record: BaseRecord) -> None:
    assert type(record).read(record.line()) == record


def test_tags_are_attributes_of_the_resource() -> None:
    assert is_of_resource("azure.tag.team")
    assert not is_of_resource("body")
    assert resource_attributes(RECORDING_TAGS)["azure.tag.env"] == "prod"
    assert TAG not in resource_attributes(VM)


def test_shared_record_has_no_tags_when_it_is_of_several_vms() -> None:
    record = record_of(announced(Resources=[ME, PEER]), RECORDING_TAGS)

    assert record.tags == {"team": "Payments", "env": "prod"}
    assert record.shared.tags == {}  # the VMs may differ in them


def test_record_is_one_bounded_line_when_tags_are_hostile() -> None:
    tags = {f"tag {number}": HOSTILE for number in range(50)}
    vm = replace(VM, tags=tags, record_tags=tuple(tags))

    line = record_of(announced(), vm).line()

    assert not set(line.decode()) & set(HOSTILE[:3])
    assert len(line) < MAX_TAGS * 2 * MAX_TAG + 2000
    assert Record.read(line).tags == {
        f"tag {number}": HOSTILE[:MAX_TAG] for number in range(MAX_TAGS)
    }


def test_tags_of_a_hostile_record_are_bounded() -> None:
    attributes: dict[str, Any] = {TAG + "Number": 5}
    for number in range(50):
        attributes[f"{TAG}tag {number}"] = HOSTILE
    attributes["azure.tag.none"] = None
    attributes[TAG] = "no name"

    tags = tags_in(json.dumps(attributes).encode())

    assert tags == {f"tag {number}": HOSTILE[:MAX_TAG] for number in range(MAX_TAGS)}


# ---- the sentence


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        (
            [[], [item()]],
            "Freeze of this VM announced: not before 2026-03-01T12:15:00.000Z",
        ),
        ([[], [item(NotBefore=None)]], "Freeze of this VM announced: at a time not given"),
        ([[item()], [item(Description="x")]], "Freeze of this VM changed"),
        (
            [[], [item(EventType="Reboot", Resources=[PEER], **STARTED)]],
            "Reboot of another VM started without notice",
        ),
        ([[item()], [item(Resources=[PEER])]], "Freeze no longer affects this VM"),
        ([[item()], []], "Freeze of this VM canceled"),
    ],
)
def test_sentence_names_type_vm_and_change(looks: list[list[Any]], expected: str) -> None:
    story = Story()
    for second, items in enumerate(looks):
        story.sees(second, *items)

    assert sentence(story.last) == expected


def test_sentence_says_that_an_end_was_not_seen() -> None:
    story = Story()
    story.sees(0, item(Resources=[]))
    story.sees(1, silence=None)

    expected = "Freeze of a VM of this group gone, and how it ended was not seen"
    assert sentence(story.last) == expected


@pytest.mark.parametrize(
    ("previous_scope", "expected"),
    [
        ("self", "Freeze no longer affects this VM"),
        ("unknown", "Freeze does not affect this VM"),
    ],
)
def test_sentence_says_whether_event_affected_vm_before(
    previous_scope: str,
    expected: str,
) -> None:
    moved = change("updated", scope="peer", previous_scope=previous_scope)

    assert sentence(moved) == expected


@pytest.mark.parametrize(
    ("vm", "count", "expected"),
    [
        (Vm(location="westeurope"), 1, "1 VM in westeurope"),
        (Vm(resource_group="prod"), 2, "2 VMs of the resource group prod"),
        (Vm(scale_set="web"), 3, "3 VMs of the scale set web"),
    ],
)
def test_sentence_names_the_place_of_the_vms(vm: Vm, count: int, expected: str) -> None:
    facts = FleetFacts(fleet_events=1, fleet_vms=count, fleet_reported_by=1)

    text = sentence(change("announced"), vm, facts)

    assert text.startswith(f"Freeze of {expected} ")


@pytest.mark.parametrize(
    ("vms", "vm", "affected"),
    [
        (48, Vm(scale_set="web"), "48 VMs of the scale set web"),
        (0, None, "VMs that Azure does not name"),
        (0, Vm(location="westeurope"), "VMs that Azure does not name in westeurope"),
    ],
)
def test_record_of_many_vms_names_them(vms: int, vm: Vm | None, affected: str) -> None:
    record = record_of(announced(), vm, fleet=FleetFacts(1, vms, 1))

    assert several_vms(record) == affected
    assert affected in record.body


def test_record_of_a_fleet_names_a_single_vm() -> None:
    record = record_of(announced(), VM, fleet=FleetFacts(1, 1, 1))

    assert several_vms(record) == ""
    assert ME in record.body


@pytest.mark.parametrize(
    ("events", "under_way", "over", "expected"),
    [
        (1, 1, 0, ""),
        (5, 0, 0, "none of 5 events has started"),
        (5, 1, 0, "1 of 5 events is under way, 4 are to come"),
        (5, 2, 3, "3 of 5 events are over, 2 are under way"),
        (2, 0, 1, "1 of 2 events is over, 1 is to come"),
    ],
)
def test_progress_of_a_wave_counts_its_events(
    events: int,
    under_way: int,
    over: int,
    expected: str,
) -> None:
    updated = Story().sees(0).sees(1, item()).sees(2, item(DurationInSeconds=7)).last
    facts = FleetFacts(events, 40, 40, under_way, over)

    record = record_of(updated, Vm(scale_set="web"), fleet=facts)

    body = "Freeze of 40 VMs of the scale set web changed"
    if expected:
        body += f": {expected}"
    assert progress(record) == expected
    assert record.body == body


@pytest.mark.parametrize(
    ("description", "kind", "body"),
    [
        (MISSING, "started", "missing"),
        (MISSING, "finished", "no longer missing"),
        ("", "started", "silent"),
        ("", "finished", "heard from again, or no longer expected"),
    ],
)
def test_sentence_of_a_fleet_names_silent_or_missing_vms(
    description: str,
    kind: Any,
    body: str,
) -> None:
    silence = replace(announced(EventType=SILENT, Description=description), kind=kind)

    record = record_of(silence, Vm(scale_set="web"), fleet=FleetFacts(1, 2, 1))

    assert record.body == f"2 VMs of the scale set web are {body}"


@pytest.mark.parametrize(
    ("facts", "vms"),
    [
        (FleetFacts(40, 2_000, 40, fleet_scale_sets=40), "40 scale sets (2,000 VMs)"),
        (FleetFacts(2, 2, 2, fleet_resource_groups=2), "2 resource groups (2 VMs)"),
        (
            FleetFacts(3, 9, 3, fleet_scale_sets=1, fleet_resource_groups=2),
            "1 scale set and 2 resource groups (9 VMs)",
        ),
    ],
)
def test_sentence_of_a_fleet_counts_silent_groups(facts: FleetFacts, vms: str) -> None:
    silence = replace(announced(EventType=SILENT), kind="started")

    record = record_of(silence, Vm(location="westeurope"), fleet=facts)

    assert record.body == f"{vms} in westeurope are silent"


def test_sentence_of_a_fleet_names_a_single_silent_vm() -> None:
    silence = replace(announced(EventType=SILENT), kind="started")

    record = record_of(silence, Vm(name="web_0"), fleet=FleetFacts(1, 1, 1))

    assert record.body == "web_0 is silent"


# ---- CloudEvents and partition keys


def test_partition_key_is_the_event_when_group_is_unknown() -> None:
    assert partition_key(record_of(announced(), None), "e-1") == "e-1"


def test_partition_key_is_the_scale_set_when_group_is_known() -> None:
    place = replace(VM, resource_group="RG", scale_set="Web")

    assert partition_key(record_of(announced(), place), "e-1") == "8d10/rg/web"


def test_partition_key_is_the_resource_group_without_a_scale_set() -> None:
    place = replace(VM, resource_group="RG")

    assert partition_key(record_of(announced(), place), "e-1") == "8d10/rg"


def test_alert_key_has_the_event_id() -> None:
    assert message().alert_key == f"notbefore/{ID.casefold()}"


def test_alert_key_has_a_digest_when_event_id_is_too_long() -> None:
    long = replace(message(), event_key="e" * 300)

    assert len(long.alert_key) == len("notbefore/") + 64


@pytest.mark.parametrize(
    ("vm", "source"),
    [
        (Vm(name="a b\u202e"), "/a-b-"),
        (None, "/unknown"),
    ],
)
def test_source_of_a_cloud_event_is_a_uri_reference(vm: Vm | None, source: str) -> None:
    assert cloud_event(record_of(announced(), vm), "d", {})["source"] == source


def test_cloud_event_carries_the_data() -> None:
    assert cloud_event(record_of(announced(), VM), "d", {"x": 1})["data"] == {"x": 1}


def test_cloud_event_has_no_subject_without_an_event_id() -> None:
    record = replace(record_of(announced(), VM), event_id="")

    assert "subject" not in cloud_event(record, "d", {})


# ---- heartbeats

HEARTBEAT = heartbeat_of(VM, ("e-1",), "1.0", at(0), 60.0)


def heartbeat_message() -> Message:
    """Return the message that a courier makes from the delivery of ``HEARTBEAT``."""
    delivery = heartbeat_delivery("hub", ME, HEARTBEAT.line(), 0.0, 60.0)
    return Message.of(delivery, at(1))


def test_message_has_the_heartbeat_of_its_delivery() -> None:
    assert heartbeat_message().content == HEARTBEAT


def test_sink_that_needs_a_record_cannot_send_a_heartbeat() -> None:
    decoded = heartbeat_message()

    with pytest.raises(SendError, match="cannot send a heartbeat"):
        _ = decoded.record
