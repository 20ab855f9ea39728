"""Records: flat, named as OpenTelemetry names them, one line whatever Azure wrote."""

import json
from typing import Any

import msgspec
import pytest

from notbefore.core.change import MISSING, SILENT, Change
from notbefore.core.cloud_event import cloud_event, partition_key
from notbefore.core.lifecycle import diff
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
from notbefore.core.tracked import Tracked
from notbefore.wording.records import heartbeat_of, record_of
from notbefore.wording.sentences import many, progress, sentence
from support.azure import ID, ME, PEER, STARTED, Story, document, item, now
from support.box import change

VM = Vm(
    name=ME,
    vm_id="0f1e",
    location="westeurope",
    subscription_id="8d10",
    resource_id="/subscriptions/8d10/x",
    zone="1",
)


def changes(*looks: tuple[float, tuple[Any, ...], dict[str, Any]]) -> list[Change]:
    story = Story()
    for seconds, items, fields in looks:
        story.sees(seconds, *items, **fields)
    return story.changes


def test_a_finished_event_tells_everything_that_was_measured() -> None:
    *_, last = changes(
        (0, (), {}),
        (1, (item(),), {}),
        (900, (item(**STARTED),), {"gap": 2.5}),
        (1500, (), {"gap": 0.0}),
    )
    flat = record_of(last, VM).flat()
    assert flat["event.name"] == "azure.scheduled_event.finished"
    assert flat["cloud.provider"] == "azure"
    assert flat["cloud.region"] == "westeurope"
    assert flat["host.id"] == "0f1e"
    assert flat["azure.scheduled_event.id"] == ID
    assert flat["azure.scheduled_event.outcome"] == "finished"
    assert flat["azure.scheduled_event.notice_seconds"] == 899
    assert flat["azure.scheduled_event.started_seconds"] == 600
    assert flat["azure.scheduled_event.interruption_seconds"] == 2.5
    assert flat["azure.scheduled_event.not_before"] == "2026-03-01T12:15:00.000Z"


@pytest.mark.parametrize(
    ("vms", "vm", "affected", "in_the_sentence"),
    [
        (48, Vm(scale_set="web"), "48 VMs of the scale set web", "48 VMs of the scale set web"),
        (0, None, "VMs that Azure does not name", "VMs that Azure does not name"),
        (
            0,
            Vm(location="westeurope"),
            "VMs that Azure does not name in westeurope",
            "does not name in westeurope",
        ),
        (1, VM, "", ME),
    ],
)
def test_the_record_of_many_vms_says_which_ones(
    vms: int, vm: Vm | None, affected: str, in_the_sentence: str
) -> None:
    *_, last = changes((0, (), {}), (1, (item(),), {}))
    record = record_of(last, vm, fleet=FleetFacts(1, vms, 1))
    assert many(record) == affected
    assert in_the_sentence in record.body


HOSTILE = "\u202e\x00\n" + "x" * 10_000


def test_of_the_tags_those_are_recorded_that_were_asked_for() -> None:
    (only,) = changes((0, (item(),), {}))
    tagged = msgspec.structs.replace(VM, tags={"Team": "Payments", "env": "prod", "cost": "7"})
    assert not any(name.startswith(TAG) for name in record_of(only, tagged).flat())
    asked = msgspec.structs.replace(tagged, record_tags=("team", "ENV", "owner"))
    for record in (record_of(only, asked), heartbeat_of(asked, (), "1", only.time)):
        found = {name: value for name, value in record.flat().items() if name.startswith(TAG)}
        assert found == {"azure.tag.team": "Payments", "azure.tag.env": "prod"}
        assert type(record).read(record.line()) == record
        assert (
            record.flat().keys()
            >= {"azure.tag.team"}
            == set(filter(is_of_resource, ["azure.tag.team", "body"]))
        )
    assert resource_attributes(asked)["azure.tag.env"] == "prod"
    assert TAG not in resource_attributes(VM)
    both = record_of(changes((0, (item(Resources=[ME, PEER]),), {}))[0], asked)
    # VMs may differ in them
    assert (both.tags, both.shared.tags) == (
        {"team": "Payments", "env": "prod"},
        {},
    )


def test_records_and_resources_name_the_vm_by_the_same_attributes() -> None:
    of_every_record = set(BaseRecord.__struct_encode_fields__)

    assert set(resource_attributes(VM)) == of_every_record - {"time", "event.name", "body", TAG}


def test_whatever_a_tag_holds_the_record_is_one_safe_line_with_a_bound() -> None:
    (only,) = changes((0, (item(),), {}))
    tags = {f"tag {number}": HOSTILE for number in range(50)}
    line = record_of(only, msgspec.structs.replace(VM, tags=tags, record_tags=tuple(tags))).line()
    assert not set(line.decode()) & set(HOSTILE[:3])
    assert len(line) < MAX_TAGS * 2 * MAX_TAG + 2000
    assert Record.read(line).tags == {
        f"tag {number}": HOSTILE[:MAX_TAG] for number in range(MAX_TAGS)
    }
    values = {TAG + f"tag {number}": HOSTILE for number in range(50)} | {
        "azure.tag.none": None,
        TAG: "no name",
    }
    assert tags_in(json.dumps({TAG + "Number": 5, **values}).encode()) == Record.read(line).tags


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
def test_the_digest_of_a_wave_says_how_far_it_has_come(
    events: int, under_way: int, over: int, expected: str
) -> None:
    *_, last = changes((0, (), {}), (1, (item(),), {}), (2, (item(DurationInSeconds=7),), {}))
    facts = FleetFacts(events, 40, 40, under_way, over)
    record = record_of(last, Vm(scale_set="web"), fleet=facts)
    assert progress(record) == expected
    assert record.body == "Freeze of 40 VMs of the scale set web changed" + (
        f": {expected}" if expected else ""
    )


@pytest.mark.parametrize(
    ("description", "kind", "body"),
    [
        (MISSING, "started", "missing"),
        (MISSING, "finished", "no longer missing"),
        ("", "started", "silent"),
        ("", "finished", "heard from again, or no longer expected"),
    ],
)
def test_of_vms_that_are_silent_or_missing_that_is_said(
    description: str, kind: Any, body: str
) -> None:
    (only,) = changes((0, (item(EventType=SILENT, Description=description),), {}))
    one = msgspec.structs.replace(only, kind=kind)
    record = record_of(one, Vm(scale_set="web"), fleet=FleetFacts(1, 2, 1))
    assert record.body == f"2 VMs of the scale set web: {body}"


def test_what_a_vm_reports_that_does_not_know_its_group_is_kept_together_by_event() -> None:
    (only,) = changes((0, (item(),), {}))
    place = msgspec.structs.replace(VM, resource_group="RG", scale_set="Web")
    assert partition_key(record_of(only, None), "e-1") == "e-1"
    assert partition_key(record_of(only, place), "e-1") == "8d10/rg/web"


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        (
            [((), {}), ((item(),), {})],
            "Freeze of this VM announced: not before 2026-03-01T12:15:00.000Z",
        ),
        (
            [((), {}), ((item(NotBefore=None),), {})],
            "Freeze of this VM announced: at a time not given",
        ),
        ([((item(),), {}), ((item(Description="x"),), {})], "Freeze of this VM changed"),
        (
            [((), {}), ((item(EventType="Reboot", Resources=[PEER], **STARTED),), {})],
            "Reboot of another VM started without notice",
        ),
        ([((item(),), {}), ((item(Resources=[PEER]),), {})], "Freeze no longer affects this VM"),
        ([((item(),), {}), ((), {})], "Freeze of this VM canceled"),
        (
            [((item(Resources=[]),), {}), ((), {"silence": None})],
            "Freeze of a VM of this group gone, and how it ended was not seen",
        ),
    ],
)
def test_the_sentence_says_what_happens_to_whom(
    looks: list[tuple[tuple[Any, ...], dict[str, Any]]], expected: str
) -> None:
    found = changes(
        *((float(second), items, fields) for second, (items, fields) in enumerate(looks))
    )
    assert sentence(found[-1]) == expected


def test_a_cloud_event_s_source_is_a_uri_reference_whatever_the_vm_is_called() -> None:
    change = diff(Tracked(), document(item()), now(0)).changes[0]
    odd = record_of(change, Vm(name="a b\u202e"))
    assert cloud_event(odd, "d", {})["source"] == "/a-b-"
    assert cloud_event(record_of(change, None), "d", {})["source"] == "/unknown"
    assert cloud_event(record_of(change, VM), "d", {"x": 1})["data"] == {"x": 1}
    assert "subject" not in cloud_event(msgspec.structs.replace(odd, event_id=""), "d", {})


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
