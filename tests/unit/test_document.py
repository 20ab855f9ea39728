"""``parse`` reads a document, rejects single events, or refuses all of it with a reason."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.core.document import (
    MAX_BYTES,
    MAX_DESCRIPTION,
    MAX_NAME,
    MAX_RESOURCES,
    parse,
    read_time,
)
from notbefore.errors import DocumentError
from support.azure import ID, STARTED, body, document, event, item

CAPTURED = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


def test_documented_example_is_read() -> None:
    example = document(
        item(NotBefore="Mon, 11 Apr 2022 22:26:58 GMT", Resources=["WestNO_0", "WestNO_1"]),
        incarnation=2,
    )

    (read,) = example.events
    assert example.incarnation == 2
    assert example.flaws == ()
    assert read.event_type == "Freeze"
    assert read.event_status == "Scheduled"
    assert read.event_source == "Platform"
    assert read.duration == 5
    assert read.resources == ("WestNO_0", "WestNO_1")
    assert read.not_before == CAPTURED


def test_missing_fields_of_old_versions_are_unknown() -> None:
    (read,) = document({"EventId": "a", "EventType": "Reboot", "EventStatus": "Scheduled"}).events

    assert read.description is None
    assert read.event_source is None
    assert read.duration is None
    assert read.not_before is None
    assert read.resources == ()
    assert read.resource_type is None


def test_negative_duration_is_unknown() -> None:
    read = event(DurationInSeconds=-1, NotBefore="")

    assert read.duration is None


def test_byte_order_mark_is_ignored() -> None:
    assert parse(b"\xef\xbb\xbf" + body()).events == ()


# ---- incarnation


def test_incarnation_in_quotes_is_a_number() -> None:
    quoted = body().replace(b'"DocumentIncarnation":1', b'"DocumentIncarnation":"2"')

    assert parse(quoted).incarnation == 2


@pytest.mark.parametrize(
    "data",
    [b'{"Events": []}', b'{"DocumentIncarnation": null, "Events": []}'],
)
def test_document_without_incarnation_is_read(data: bytes) -> None:
    assert parse(data).events == ()


# ---- times


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Mon, 11 Apr 2022 22:26:58 GMT", CAPTURED),
        ("Thu, 11 Apr 2022 22:26:58 GMT", CAPTURED),  # a wrong weekday was seen
        ("11 apr 2022 22:26:58", CAPTURED),  # no zone: Azure's times are UTC
        ("2022-04-11T22:26:58Z", CAPTURED),
        ("2022-04-12T00:26:58+02:00", CAPTURED),
        ("Mon, 11 Apr 0000 22:26:58 GMT", None),
        ("0001-01-01T00:00:00Z", None),  # .NET's "no time"
        ("9999-12-31T23:59:59-10:00", None),
        ("soon", None),
        ("2026-03-01", None),  # a day is no moment
        ("x" * 100, None),
    ],
)
def test_time_is_read_in_each_known_shape(text: str, expected: datetime | None) -> None:
    assert read_time(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 11 Apr 2022 22:26:58 UTC",
        "Mon, 11 Apr 2022 22:26:58 +0000",
        "Tue, 12 Apr 2022 00:26:58 +0200",
        "2022-04-11T22:26:58 UTC",
        "2022-04-11 22:26:58 +0000",
    ],
)
def test_time_with_a_zone_is_read(text: str) -> None:
    assert read_time(text) == CAPTURED


@given(st.text(max_size=80))
def test_time_is_utc_or_unknown_when_text_is_random(text: str) -> None:
    time = read_time(text)

    assert time is None or time.tzinfo is UTC


# ---- unreadable fields and events


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("NotBefore", "soon", "not_before"),
        ("NotBefore", 5, "not_before"),
        ("Resources", "WestNO_0", "resources"),
        ("Resources", ["WestNO_0", 5], "resources"),
        ("Resources", ["n" * (MAX_NAME + 1)], "resources"),
        ("Resources", ["n"] * (MAX_RESOURCES + 1), "resources"),
        ("Description", 5, "description"),
        ("Description", "d" * (MAX_DESCRIPTION + 1), "description"),
        ("EventSource", ["Platform"], "event_source"),
        ("ResourceType", 1, "resource_type"),
        ("DurationInSeconds", "9", "duration"),
        ("DurationInSeconds", True, "duration"),
        ("DurationInSeconds", 10**12, "duration"),
    ],
)
def test_unreadable_field_is_a_flaw_of_an_event_that_stays(
    field: str,
    value: Any,
    reason: str,
) -> None:
    read = document(item(**{field: value}))

    (flaw,) = read.flaws
    assert flaw.reason == reason
    assert not flaw.rejected
    assert read.events[0].event_id == ID


@pytest.mark.parametrize(
    ("bad", "reason", "event_id"),
    [
        (5, "not_an_event", None),
        (item(""), "event_id", None),
        (item("i" * 129), "event_id", None),
        ({**item(), "EventId": 7}, "event_id", None),
        (item(EventType=""), "event_type", ID),
        (item(EventType=["Freeze"]), "event_type", ID),
        (item(EventStatus=None), "event_status", ID),
    ],
)
def test_bad_event_is_rejected_and_others_are_read(
    bad: object,
    reason: str,
    event_id: str | None,
) -> None:
    read = document(item("good-1"), bad, item("good-2"))

    assert [event.event_id for event in read.events] == ["good-1", "good-2"]
    (flaw,) = read.flaws
    assert flaw.reason == reason
    assert flaw.event_id == event_id
    assert flaw.rejected


@pytest.mark.parametrize(
    "bad",
    [b'"EventId":"A","DurationInSeconds":' + b"9" * 5000, b'"EventId":"\xff"'],
    ids=["number too long", "not UTF-8"],
)
def test_undecodable_event_is_rejected_without_an_id(bad: bytes) -> None:
    read = parse(b'{"DocumentIncarnation":1,"Events":[{' + bad + b"}]}")

    (flaw,) = read.flaws
    assert flaw.reason == "not_an_event"
    assert flaw.event_id is None


def test_underscore_before_the_names_of_2017_03_01_is_removed() -> None:
    read = document(item(Resources=["_WestNO_0", "WestNO_1"]))

    assert read.events[0].resources == ("WestNO_0", "WestNO_1")
    assert read.flaws == ()


# ---- two events with one id


def test_first_event_is_kept_when_two_have_one_id() -> None:
    read = document(item("A", EventType="Reboot"), item("a", EventType="Freeze"))

    assert [event.event_type for event in read.events] == ["Reboot"]
    assert [flaw.reason for flaw in read.flaws] == ["duplicate_event_id"]


def test_started_event_is_kept_when_two_have_one_id() -> None:
    read = document(item("A", EventType="Reboot"), item("a", EventType="Freeze", **STARTED))

    assert [event.event_type for event in read.events] == ["Freeze"]
    assert [flaw.reason for flaw in read.flaws] == ["duplicate_event_id"]


@pytest.mark.parametrize(
    "spoilt",
    [{"Resources": 17}, {"NotBefore": 17}, {"EventStatus": 17}],
    ids=["resources", "not_before", "rejected"],
)
@pytest.mark.parametrize("spoilt_first", [False, True])
def test_dropped_copy_leaves_no_flaw_on_the_kept_one(
    spoilt: dict[str, Any], *, spoilt_first: bool
) -> None:
    kept = item("A", **STARTED)
    dropped = item("a", **spoilt)
    copies = [kept, dropped]
    if spoilt_first:
        copies.reverse()

    read = document(*copies)

    assert read.events == document(kept).events
    (flaw,) = read.flaws
    assert flaw.reason == "duplicate_event_id"
    assert not flaw.rejected


# ---- bounds


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"", "empty"),
        (b"[]", "wrong_shape"),
        (b'{"error":"gone"}', "wrong_shape"),
        (b'{"DocumentIncarnation":"one","Events":[]}', "wrong_shape"),
        (b'{"DocumentIncarnation":"9223372036854775808","Events":[]}', "wrong_shape"),
        (b'{"DocumentIncarnation":1e999,"Events":[]}', "wrong_shape"),
        (b'{"DocumentIncarnation":' + b"9" * 19 + b',"Events":[]}', "wrong_shape"),
        (b'{"DocumentIncarnation":' + b"9" * 400 + b',"Events":[]}', "wrong_shape"),
        pytest.param(
            b'{"DocumentIncarnation":' + b"9" * 5000 + b',"Events":[]}',
            "wrong_shape",
            id="wrong_shape-5000 digits",
        ),
        (b'{"DocumentIncarnation":NaN,"Events":[]}', "not_json"),
        (b'{"DocumentIncarnation":1,"Events":[]', "not_json"),
        (b'{"DocumentIncarnation":1,"Events":[]}}', "not_json"),
        (b'{"DocumentIncarnation":1,"Events":[{"a":"\\ud800"}]}', "not_json"),
        (b"<html>Service Unavailable</html>", "not_json"),
        (b"\xff\xfe\x00", "not_json"),
        pytest.param(
            b'{"DocumentIncarnation":1,"Events":' + b"[" * 100_000,
            "too_deep",
            id="too_deep-events",
        ),
        pytest.param(
            b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"DocumentIncarnation":1,"Events":[]}',
            "too_deep",
            id="too_deep-another key",
        ),
        pytest.param(b" " * MAX_BYTES + b"{}", "too_large", id="too_large"),
        pytest.param(
            b'{"DocumentIncarnation":1,"Events":[' + b",".join([b"0"] * 10_001) + b"]}",
            "too_many_events",
            id="too_many_events",
        ),
    ],
)
def test_malformed_document_is_refused_with_its_reason(bad: bytes, reason: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(bad)

    assert caught.value.reason == reason


def test_ten_thousand_events_are_read() -> None:
    compact = [
        {"EventId": f"{number}", "EventType": "Freeze", "EventStatus": "Started"}
        for number in range(10_000)
    ]

    assert len(document(*compact).events) == 10_000


# ---- the digest


def test_digest_ignores_order_and_case_of_resources() -> None:
    digest = event(Resources=["b", "A"]).digest()

    assert event(Resources=["a", "B"]).digest() == digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("NotBefore", ""),
        ("Description", "x"),
        ("DurationInSeconds", 6),
        ("EventStatus", "Started"),
    ],
)
def test_digest_changes_with_each_field(field: str, value: Any) -> None:
    digest = event(Resources=["a", "b"]).digest()

    assert event(Resources=["a", "b"], **{field: value}).digest() != digest


@pytest.mark.parametrize("absent", ["", None])
def test_empty_description_reads_like_an_absent_one(absent: str | None) -> None:
    without = item("A")
    del without["Description"]

    (read,) = document(item("A", Description=absent)).events

    (expected,) = document(without).events
    assert read == expected
    assert replace(read, description="").digest() == expected.digest()
