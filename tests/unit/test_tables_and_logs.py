"""Texts that people read: durations, tables, and log lines."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.commands.approve import describe
from notbefore.commands.history import show_history
from notbefore.commands.listing import event_listing
from notbefore.commands.options import due
from notbefore.core.change import Scope
from notbefore.core.clock import Instant
from notbefore.core.document import Event
from notbefore.core.duration import countdown, span
from notbefore.core.record import Record
from notbefore.core.text import shortened
from notbefore.core.tracked import PendingEvent, TrackedEvent
from notbefore.logs import LogFormatter, set_up
from support.azure import at
from support.fleet_records import report, vm

# ---- times


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (7.24, "7.2s"),
        (59.44, "59s"),
        (845, "14m05s"),
        (11_400, "3h10m"),
        (532_800, "6d04h"),
        (-90, "-1m30s"),
    ],
)
def test_duration_is_shown_in_two_units(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (840, "in 14 min"),
        (119, "in 119 s"),
        (120, "in 2 min"),
        (7.9, "in 8 s"),
        (-2.4, "2 s ago"),
        (0.5, "now"),
        (-0.5, "now"),
        (-180, "3 min ago"),
        (7_200, "in 2 h"),
        (11_400, "in 3 h 10 min"),
        (172_800, "in 2 d"),
        (-532_800, "6 d 4 h ago"),
    ],
)
def test_countdown_says_how_long_until_or_since_a_time(seconds: float, text: str) -> None:
    assert countdown(at(seconds), at(0)) == text


@pytest.mark.parametrize(
    ("left", "text"),
    [(None, "-"), (845, "in 14m05s"), (29.6, "in 30s"), (-0.2, "0s ago"), (-43, "43s ago")],
)
def test_time_to_not_before_has_words_and_no_sign(left: float | None, text: str) -> None:
    assert due(left) == text


@pytest.mark.parametrize(("text", "expected"), [("abcd", "abcd"), ("abcde", "abc…")])
def test_long_text_is_cut_with_an_ellipsis(text: str, expected: str) -> None:
    assert shortened(text, 4) == expected


# ---- the table of events


def events_answer(**fields: Any) -> dict[str, Any]:
    """Return an answer of ``/api/v1/events``."""
    return {"unreadable": 0, "silence": "", "events": [], **fields}


LISTED = {
    "event_id": "x",
    "event_type": "x",
    "event_status": "x",
    "scope": "x",
    "event_source": "x",
    "not_before": None,
    "seconds_to_not_before": None,
    "expected_duration_seconds": None,
    "resources": ["r"],
}


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({}, "Nothing is scheduled."),
        (
            {"silence": "old", "unreadable": 1},
            "1 listed event cannot be read: the agent's log says why.",
        ),
        (
            {"silence": "old", "events": [LISTED]},
            "Events that were listed when IMDS last answered:",
        ),
        ({"events": [LISTED]}, "EVENT ID"),
    ],
)
def test_listing_begins_with_what_is_known_about_events(
    fields: dict[str, Any],
    beginning: str,
) -> None:
    lines = event_listing(events_answer(**fields)).lines

    assert lines[0].startswith(beginning)


@pytest.mark.parametrize(
    ("approval", "words"),
    [
        ({}, "-"),
        ({"approval": None}, "-"),
        ({"approval": {"words": "left alone: no rule matches"}}, "left alone: no rule matches"),
    ],
)
def test_events_are_shown_with_what_the_approval_rules_do(
    approval: dict[str, Any], words: str
) -> None:
    head, row = event_listing(events_answer(events=[{**LISTED, **approval}])).lines

    assert row[head.index("APPROVAL") :] == words


def test_listing_claims_nothing_when_imds_is_silent() -> None:
    listing = event_listing(events_answer(silence="IMDS has given no valid answer yet"))

    assert listing.lines == []


def test_table_shows_no_control_characters() -> None:
    events = [LISTED | {"event_type": "a\x1b[2Jb\n"}]

    head, row = event_listing(events_answer(events=events)).lines

    assert "\x1b" not in head + row
    assert "\n" not in row


# ---- the history

FINISHED = report(vm("vm_0"), "finished", reason="gone_after_start")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        pytest.param(FINISHED, "it was Started, and is no longer listed", id="end"),
        pytest.param(
            replace(
                FINISHED,
                change="approved",
                reason="accepted",
                approval_rule="drained",
                approval_by="rule",
            ),
            "Azure accepted it (rule drained)",
            id="approved by rule",
        ),
        pytest.param(
            replace(
                FINISHED,
                change="approval_failed",
                reason="too_late",
                approval_rule="operator",
                approval_by="ann",
            ),
            "NotBefore comes first (by hand, ann)",
            id="approval failed",
        ),
    ],
)
def test_history_shows_the_reason_of_a_change(
    record: Record,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_history([record.flat()])

    _, line = capsys.readouterr().out.splitlines()
    assert line.partition(record.event_id)[2].strip() == reason


# ---- approval


def pending_freeze(resources: list[str], scope: Scope) -> PendingEvent:
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    event = Event("E-1", "Freeze", "Scheduled", resources=tuple(resources), duration=5)
    tracked = TrackedEvent(event, scope, Instant(moment), beginning_seen=True)
    return PendingEvent.of(tracked, moment)


@pytest.mark.parametrize(
    ("resources", "scope", "ending"),
    [
        (["a"], "self", "for this VM: a."),
        (["a"], "peer", "for ANOTHER VM: a."),
        (["a", "b"], "self", "for all 2 VMs: a, b."),
        (["a", "b"], "peer", "for all 2 VMs: a, b, and this VM is none of them."),
        ([], "unknown", "for VMs that Azure does not name."),
    ],
)
def test_approval_by_hand_shows_which_vms_an_event_affects(
    resources: list[str],
    scope: Scope,
    ending: str,
) -> None:
    description = describe(pending_freeze(resources, scope))

    assert description.splitlines()[-1].endswith(ending)


@pytest.mark.parametrize(
    ("resources", "scope", "effect"),
    [
        (["a"], "self", "The VM is"),
        (["a"], "peer", "The VM is"),
        (["a", "b"], "self", "Each affected VM is"),
        (["a", "b"], "peer", "Each affected VM is"),
        ([], "unknown", "Each affected VM is"),
    ],
)
def test_approval_by_hand_shows_what_happens_to_the_vms(
    resources: list[str], scope: Scope, effect: str
) -> None:
    assert effect in describe(pending_freeze(resources, scope))


# ---- the log


def log_record(**fields: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "notbefore",
            "levelno": logging.WARNING,
            "msg": "a %s",
            "args": ("b\nc",),
            **fields,
        }
    )


def test_json_log_line_holds_its_exception() -> None:
    error = RuntimeError("broken")
    record = log_record(exc_info=(RuntimeError, error, None))

    line = LogFormatter(as_json=True).format(record)

    assert "\n" not in line
    assert "RuntimeError: broken" in json.loads(line)["exception"]


FORGED = "vm_0\n12:00:00 WARNING approved (accepted)\x1b[2J\u202etxt\x85\u2028end"


def hide(text: str) -> str:
    """Redact, as the formatter of the agent does with real secrets."""
    return text.replace("s3cret", "***")


def forged_record() -> logging.LogRecord:
    """Return a record whose message and exception hold a forged line and a secret."""
    text = f"{FORGED} s3cret"
    return log_record(
        created=1_800_000_000.0,
        levelname="WARNING",
        args=(text,),
        exc_info=(RuntimeError, RuntimeError(text), None),
    )


def test_text_log_line_begins_with_time_and_level() -> None:
    time, level, *_ = LogFormatter(hide).format(forged_record()).split()

    assert datetime.fromisoformat(time) == datetime.fromtimestamp(1_800_000_000, UTC)
    assert level == "WARNING"


def test_text_log_stays_on_one_line_when_message_is_forged() -> None:
    first, *exception = LogFormatter(hide).format(forged_record()).splitlines()

    assert r"vm_0\u000a12:00:00 WARNING" in first
    assert first.isprintable()
    assert exception
    for line in exception:
        assert line.startswith("  | ")  # it cannot be taken for a line of the log
        assert line.isprintable()


def test_text_log_hides_secrets() -> None:
    text = LogFormatter(hide).format(forged_record())

    first, *exception = text.splitlines()
    assert first.count("***") == 1
    assert "".join(exception).count("***") == 1
    assert "s3cret" not in text


@pytest.mark.usefixtures("log_as_before")
@pytest.mark.parametrize(("form", "is_json"), [("json", True), ("auto", True), ("text", False)])
def test_log_has_the_configured_form_and_level(
    form: str,
    capsys: pytest.CaptureFixture[str],
    *,
    is_json: bool,
) -> None:
    set_up(form, "warning")  # type: ignore[arg-type]

    logging.getLogger("notbefore.test").warning("hello")
    logging.getLogger("notbefore.test").info("not this")

    text = capsys.readouterr().err
    assert text.startswith("{") == is_json
    assert "hello" in text
    assert "not this" not in text
