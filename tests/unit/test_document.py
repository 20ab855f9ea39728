"""``parse``: what is read, what is refused, and that nothing else can happen."""

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


def reasons(*items: Any) -> list[str]:
    return [flaw.reason for flaw in document(*items).flaws]


def test_it_reads_the_documented_example() -> None:
    example = document(
        item(NotBefore="Mon, 11 Apr 2022 22:26:58 GMT", Resources=["WestNO_0", "WestNO_1"]),
        incarnation=2,
    )
    (read,) = example.events
    assert example.incarnation == 2
    assert example.flaws == ()
    assert (read.event_type, read.event_status, read.event_source, read.duration) == (
        "Freeze",
        "Scheduled",
        "Platform",
        5,
    )
    assert read.resources == ("WestNO_0", "WestNO_1")
    assert read.not_before == CAPTURED


def test_it_takes_missing_fields_of_old_versions_for_unknown() -> None:
    (read,) = document({"EventId": "a", "EventType": "Reboot", "EventStatus": "Scheduled"}).events
    assert (read.description, read.event_source, read.duration, read.not_before) == (
        None,
        None,
        None,
        None,
    )
    assert event(DurationInSeconds=-1, NotBefore="").duration is None
    assert (read.resources, read.resource_type) == ((), None)


def test_a_byte_order_mark_does_no_harm() -> None:
    assert parse(b"\xef\xbb\xbf" + body()).events == ()


def test_an_incarnation_in_quotes_is_a_number() -> None:
    assert (
        parse(body().replace(b'"DocumentIncarnation":1', b'"DocumentIncarnation":"2"')).incarnation
        == 2
    )


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
def test_it_reads_times_of_every_shape(text: str, expected: datetime | None) -> None:
    assert read_time(text) == expected


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
def test_an_unreadable_field_is_a_flaw_and_the_event_stays(
    field: str, value: Any, reason: str
) -> None:
    read = document(item(**{field: value}))
    assert [flaw.reason for flaw in read.flaws] == [reason]
    assert not read.flaws[0].rejected
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
def test_one_bad_event_does_not_lose_the_others(
    bad: object, reason: str, event_id: str | None
) -> None:
    read = document(item("good-1"), bad, item("good-2"))
    assert [event.event_id for event in read.events] == ["good-1", "good-2"]
    assert [(flaw.reason, flaw.event_id, flaw.rejected) for flaw in read.flaws] == [
        (reason, event_id, True)
    ]


@pytest.mark.parametrize(
    "bad", [b'"EventId":"A","DurationInSeconds":' + b"9" * 5000, b'"EventId":"\xff"']
)
def test_an_event_that_cannot_be_decoded_is_rejected_without_a_name(bad: bytes) -> None:
    read = parse(b'{"DocumentIncarnation":1,"Events":[{' + bad + b"}]}")
    assert [(flaw.reason, flaw.event_id) for flaw in read.flaws] == [("not_an_event", None)]


def test_of_two_events_with_one_id_the_started_one_counts_else_the_first() -> None:
    for second, counts in (({}, "Reboot"), (STARTED, "Freeze")):
        read = document(item("A", EventType="Reboot"), item("a", EventType="Freeze", **second))
        assert [event.event_type for event in read.events] == [counts]
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
    assert [(flaw.reason, flaw.rejected) for flaw in read.flaws] == [("duplicate_event_id", False)]


@pytest.mark.parametrize("absent", ["", None])
def test_empty_description_reads_like_an_absent_one(absent: str | None) -> None:
    without = item("A")
    del without["Description"]

    (read,) = document(item("A", Description=absent)).events
    (expected,) = document(without).events

    assert read == expected
    assert replace(read, description="").digest() == expected.digest()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"", "empty"),
        (b"[]", "wrong_shape"),
        (b'{"error":"gone"}', "wrong_shape"),
        (b'{"DocumentIncarnation":"one","Events":[]}', "wrong_shape"),
        (b'{"DocumentIncarnation":"9223372036854775808","Events":[]}', "wrong_shape"),
        (b'{"DocumentIncarnation":1e999,"Events":[]}', "wrong_shape"),
        *(
            (b'{"DocumentIncarnation":' + b"9" * n + b',"Events":[]}', "wrong_shape")
            for n in (19, 400, 5000)
        ),
        (b'{"DocumentIncarnation":NaN,"Events":[]}', "not_json"),
        (b'{"DocumentIncarnation":1,"Events":[]', "not_json"),
        (b'{"DocumentIncarnation":1,"Events":[]}}', "not_json"),
        (b'{"DocumentIncarnation":1,"Events":[{"a":"\\ud800"}]}', "not_json"),
        (b"<html>Service Unavailable</html>", "not_json"),
        (b"\xff\xfe\x00", "not_json"),
        (b'{"DocumentIncarnation":1,"Events":' + b"[" * 100_000, "too_deep"),
        (
            b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"DocumentIncarnation":1,"Events":[]}',
            "too_deep",
        ),
        (b" " * MAX_BYTES + b"{}", "too_large"),
        (
            b'{"DocumentIncarnation":1,"Events":[' + b",".join([b"0"] * 10_001) + b"]}",
            "too_many_events",
        ),
    ],
)
def test_what_is_no_document_is_refused_with_its_reason(bad: bytes, reason: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(bad)
    assert caught.value.reason == reason


def test_ten_thousand_events_are_read() -> None:
    compact = [
        {"EventId": f"{n}", "EventType": "Freeze", "EventStatus": "Started"} for n in range(10_000)
    ]
    assert len(document(*compact).events) == 10_000


def test_the_digest_is_the_same_for_the_same_content_and_another_for_other_content() -> None:
    same = event(Resources=["b", "A"]).digest()
    assert event(Resources=["a", "B"]).digest() == same
    for field, value in (
        ("NotBefore", ""),
        ("Description", "x"),
        ("DurationInSeconds", 6),
        ("EventStatus", "Started"),
    ):
        assert event(Resources=["a", "b"], **{field: value}).digest() != same


@given(st.text(max_size=80))
def test_no_text_breaks_the_reading_of_times(text: str) -> None:
    time = read_time(text)
    assert time is None or time.tzinfo is UTC


@pytest.mark.parametrize(
    "document", [b'{"Events": []}', b'{"DocumentIncarnation": null, "Events": []}']
)
def test_document_without_incarnation_is_read(document: bytes) -> None:
    assert parse(document).events == ()


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
    assert read_time(text) == datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


def test_underscore_before_the_names_of_2017_03_01_is_removed() -> None:
    document = parse(body(item(Resources=["_WestNO_0", "WestNO_1"])))

    assert document.events[0].resources == ("WestNO_0", "WestNO_1")
    assert document.flaws == ()
