"""What people read: spans, tables, log lines."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from notbefore.commands.approve import describe
from notbefore.commands.events import show_events
from notbefore.commands.history import show_history
from notbefore.commands.options import due
from notbefore.core.change import Scope
from notbefore.core.clock import Instant
from notbefore.core.document import Event
from notbefore.core.duration import countdown, span
from notbefore.core.tracked import PendingEvent, TrackedEvent
from notbefore.logs import LogFormatter, set_up
from support.azure import at
from support.fleet_records import report, vm


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
def test_spans_are_written_for_people(seconds: float | None, text: str) -> None:
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
    ],
)
def test_a_countdown_says_how_long_it_is_to_a_time_or_how_long_ago_it_was(
    seconds: float, text: str
) -> None:
    assert countdown(at(seconds), at(0)) == text


@pytest.mark.parametrize(
    ("left", "text"),
    [(None, "-"), (845, "in 14m05s"), (29.6, "in 30s"), (-0.2, "0s ago"), (-43, "43s ago")],
)
def test_how_far_not_before_is_has_no_sign_that_must_be_interpreted(
    left: float | None, text: str
) -> None:
    assert due(left) == text


def answer(**fields: Any) -> dict[str, Any]:
    """What ``/api/v1/events`` says."""
    return {"unreadable": 0, "silence": "", "events": [], **fields}


LISTED = dict.fromkeys(("event_id", "event_type", "event_status", "scope", "event_source"), "x") | {
    **dict.fromkeys(("not_before", "seconds_to_not_before", "expected_duration_seconds")),
    "resources": ["r"],
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Nothing is scheduled."),
        ({"silence": "IMDS has given no valid answer yet"}, ""),
        (
            {"silence": "old", "unreadable": 1},
            "1 listed events cannot be read: the agent's log says why.",
        ),
        (
            {"silence": "old", "events": [LISTED]},
            "Events that were listed when IMDS last answered:",
        ),
        ({"events": [LISTED]}, "EVENT ID"),
    ],
)
def test_that_nothing_is_scheduled_is_said_only_where_it_is_known(
    fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_events(answer(**fields))
    shown = capsys.readouterr().out
    assert shown.startswith(said)
    assert bool(shown) == bool(said)


def test_the_history_says_in_words_why_an_ending_or_an_approval_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = report(vm("vm_0"), "finished", reason="gone_after_start")
    accepted = {
        "change": "approved",
        "reason": "accepted",
        "approval_rule": "drained",
        "approval_by": "rule",
    }
    too_late = {
        "change": "approval_failed",
        "reason": "too_late",
        "approval_rule": "operator",
        "approval_by": "ann",
    }
    records = [
        seen,
        *(msgspec.structs.replace(seen, **changed) for changed in (accepted, too_late)),
    ]
    show_history([record.flat() for record in records])
    said = [
        line.partition(seen.event_id)[2].strip()
        for line in capsys.readouterr().out.splitlines()[1:]
    ]
    assert said == [
        "it was Started, and is no longer listed",
        "Azure accepted it (rule drained)",
        "NotBefore comes first (by hand, ann)",
    ]


def test_a_name_cannot_move_the_cursor_of_the_terminal_that_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_events(answer(events=[LISTED | {"event_type": "a\x1b[2Jb\n"}]))
    shown = capsys.readouterr().out
    assert ("\x1b" in shown, shown.count("\n")) == (False, 2)


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


def test_a_log_line_holds_its_exception() -> None:
    error = RuntimeError("broken")
    line = LogFormatter(as_json=True).format(log_record(exc_info=(RuntimeError, error, None)))
    assert "\n" not in line
    assert "RuntimeError: broken" in json.loads(line)["exception"]


FORGED = "vm_0\n12:00:00 WARNING approved (accepted)\x1b[2J\u202etxt\x85\u2028end"


def test_text_log_stays_on_one_line_and_hides_secrets() -> None:
    said = f"{FORGED} s3cret"
    formatter = LogFormatter(lambda text: text.replace("s3cret", "***"))
    failed = (RuntimeError, RuntimeError(said), None)
    record = log_record(created=1_800_000_000.0, levelname="WARNING", args=(said,), exc_info=failed)
    first, *others = formatter.format(record).splitlines()
    time, level, *_ = first.split()
    assert (datetime.fromisoformat(time), level) == (
        datetime.fromtimestamp(1_800_000_000, UTC),
        "WARNING",
    )
    assert r"vm_0\u000a12:00:00 WARNING" in first
    assert first.isprintable()
    assert others
    assert all(line.startswith("  | ") and line.isprintable() for line in others), (
        "none may be one of the log"
    )
    assert [text.count("***") for text in (first, "".join(others))] == [1, 1]
    assert "s3cret" not in "".join((first, *others))


@pytest.mark.usefixtures("log_as_before")
@pytest.mark.parametrize(
    ("form", "json_expected"), [("json", True), ("auto", True), ("text", False)]
)
def test_the_form_of_the_log_is_as_configured(
    form: str, capsys: pytest.CaptureFixture[str], *, json_expected: bool
) -> None:
    set_up(form, "warning")  # type: ignore[arg-type]  # one of the three
    logging.getLogger("notbefore.test").warning("hello")
    logging.getLogger("notbefore.test").info("not this")
    said = capsys.readouterr().err
    assert said.startswith("{") == json_expected
    assert "hello" in said
    assert "not this" not in said


@pytest.mark.parametrize(
    ("resources", "scope", "said"),
    [
        (["a"], "self", "for this VM: a."),
        (["a"], "peer", "for ANOTHER VM: a."),
        (["a", "b"], "self", "for all 2 VMs: a, b."),
        (["a", "b"], "peer", "for all 2 VMs: a, b, and this VM is none of them."),
        ([], "unknown", "for VMs that Azure does not name."),
    ],
)
def test_whoever_approves_is_shown_whose_event_it_is(
    resources: list[str], scope: Scope, said: str
) -> None:
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    event = Event("E-1", "Freeze", "Scheduled", resources=tuple(resources), duration=5)
    listed = PendingEvent.of(
        TrackedEvent(event, scope, Instant(moment), beginning_seen=True), moment
    )
    assert describe(listed).splitlines()[-1].endswith(said)
    assert ("The VM is" in describe(listed)) == (len(resources) == 1), "several VMs are not one"
