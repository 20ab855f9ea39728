"""The texts of messages: title, facts, advice, for one VM and for several."""

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace

from notbefore.config.sinks import Links, Messages
from notbefore.core.change import SILENT, ChangeKind
from notbefore.core.message import Message
from notbefore.core.record import Vm
from notbefore.courier.sinks import apprise, slack
from notbefore.wording import colors, texts
from notbefore.wording.phrases import MISSING
from notbefore.wording.texts import Text
from notbefore.wording.times import clock
from support.azure import ME, PEER, STARTED, T0
from support.messages import message, with_record_fields

EARLY = T0 + timedelta(seconds=60)  # 14 minutes before the NotBefore of most events here
REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}
LATER = {"NotBefore": "Sun, 01 Mar 2026 12:30:00 GMT"}
OF_TWO_VMS = {"Resources": [ME, PEER]}


def text_of(message: Message, **settings: Any) -> Text:
    """Return the text of a message as it reads at ``EARLY``."""
    return texts.text_of(replace(message, now=EARLY), Messages(**settings))


def test_text_leaves_out_parts_that_are_empty() -> None:
    silence = Text(title="2 VMs: silent", summary="", delivery_id="d")

    assert silence.plain == ""
    assert silence.whole == "\n\nDelivery: d"


# ---- the title


@pytest.mark.parametrize(
    ("looks", "title"),
    [
        (({}, STARTED), "Freeze of WestNO_0 has started"),
        ((STARTED,), "Freeze of WestNO_0 has started without notice"),
        (({}, None), "Freeze of WestNO_0 was canceled"),
        (({}, STARTED, None), "Freeze of WestNO_0 is over"),
        (({"Resources": [ME, PEER]}, {"Resources": [PEER]}), "Freeze no longer affects WestNO_0"),
        (
            ({"Resources": [PEER]}, {"Resources": [ME, PEER]}),
            "Freeze of WestNO_0 and 1 more in 14 min (changed)",
        ),
        (({"Resources": [PEER]},), "Freeze of WestNO_1 in 14 min"),
        (({"Resources": []},), "Freeze of an unknown VM in 14 min"),
        (({"NotBefore": None},), "Freeze of WestNO_0 at an unknown time"),
        (
            (REBOOT, REBOOT | STARTED, REBOOT | STARTED | {"Description": "x"}),
            "Reboot of WestNO_0 continues (changed)",
        ),
        (({"Resources": ["9" * 200, "a1b", "1", "\u0661"]},), "Freeze of 1 and 3 more in 14 min"),
    ],
)
def test_title_says_what_changes_for_whom(
    looks: tuple[dict[str, Any] | None, ...],
    title: str,
) -> None:
    assert text_of(message(*looks)).title == title


@pytest.mark.parametrize(
    ("looks", "topic"),
    [
        (({},), "Freeze of WestNO_0"),
        (({}, {"NotBefore": None}), "Freeze of WestNO_0"),
        (({}, STARTED, None), "Freeze of WestNO_0"),
        ((OF_TWO_VMS,), "Freeze of VMs of the scale set WestNO"),
        (({"Resources": []},), "Freeze of VMs of the scale set WestNO"),
    ],
)
def test_topic_is_the_same_for_all_steps(
    looks: tuple[dict[str, Any] | None, ...], topic: str
) -> None:
    assert text_of(message(*looks)).topic == topic


def test_topic_of_an_exercise_is_marked() -> None:
    assert text_of(message(exercise=True)).topic == "[EXERCISE] Freeze of WestNO_0"


def test_topic_of_a_wave_names_no_vm_that_may_leave_it() -> None:
    wave = with_record_fields(message(), event_id="wave-1", fleet_events=2, fleet_vms=1)

    assert text_of(wave).topic == "Freeze of VMs of the scale set WestNO"


@pytest.mark.parametrize(
    ("description", "topic"),
    [(None, "Silent VMs in westeurope"), (MISSING, "Missing VMs in westeurope")],
)
def test_topic_of_silent_vms_has_no_number(description: str | None, topic: str) -> None:
    silence = with_record_fields(
        message(vm=Vm(location="westeurope")), event_type=SILENT, description=description
    )

    assert text_of(silence).topic == topic


# ---- times


@pytest.mark.parametrize(
    ("zone", "time"),
    [
        (None, "2026-03-01 12:15:00 UTC, in 14 min"),
        ("UTC", "2026-03-01 12:15:00 UTC, in 14 min"),
        ("Europe/Berlin", "2026-03-01 13:15:00 CET (12:15:00 UTC), in 14 min"),
        ("Europe/London", "2026-03-01 12:15:00 GMT (12:15:00 UTC), in 14 min"),
        (
            "Pacific/Auckland",
            "2026-03-02 01:15:00 NZDT (2026-03-01 12:15:00 UTC), in 14 min",
        ),
        ("Mars/Phobos", "2026-03-01 12:15:00 UTC, in 14 min"),  # removed since the check
    ],
)
def test_times_are_shown_in_the_configured_zone_and_in_utc(zone: str | None, time: str) -> None:
    assert f"Not before: {time}" in text_of(message(), time_zone=zone).plain


@pytest.mark.parametrize(
    ("steps", "fact"),
    [
        (({}, LATER), "Previously: 2026-03-01 13:15:00 CET (12:15:00 UTC)"),
        (({}, STARTED), "Started: 2026-03-01 13:00:02 CET (12:00:02 UTC)"),
        (({}, STARTED, None), "Over since: 2026-03-01 13:00:03 CET (12:00:03 UTC)"),
    ],
)
def test_every_time_of_a_message_is_in_the_configured_zone(
    steps: tuple[dict[str, Any] | None, ...], fact: str
) -> None:
    assert fact in text_of(message(*steps), time_zone="Europe/Berlin").plain


def test_time_of_silence_is_in_the_configured_zone() -> None:
    text = text_of(with_record_fields(message(), event_type=SILENT), time_zone="Europe/Berlin")

    assert "Since: 2026-03-01 13:00:01 CET (12:00:01 UTC)" in text.plain


def test_clock_follows_daylight_saving_time() -> None:
    in_summer = datetime(2026, 7, 1, 12, tzinfo=UTC)

    assert clock(in_summer, ZoneInfo("Europe/Berlin")) == "2026-07-01 14:00:00 CEST (12:00:00 UTC)"


def test_clock_shows_a_time_that_the_zone_cannot_express_in_utc() -> None:
    latest = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)

    assert clock(latest, ZoneInfo("Europe/Berlin")) == "9999-12-31 23:59:59 UTC"


# ---- the end of an event


def test_end_of_several_vms_has_the_interruption_of_this_vm() -> None:
    over = message(OF_TWO_VMS, OF_TWO_VMS | STARTED, None)
    measured = with_record_fields(over, interruption_seconds=4.2)  # each VM measures only its own

    text = text_of(measured)

    assert text.title == "Freeze of WestNO_0 and 1 more is over"
    assert "Measured interruption of WestNO_0: 4.2 s" in text.plain


def test_end_says_that_its_outcome_is_unknown() -> None:
    gone = with_record_fields(message({}, STARTED, None, kind="ended"), outcome="unknown")

    text = text_of(gone)

    assert text.title == "Freeze of WestNO_0 may have happened: Azure no longer lists it"
    assert text.summary.startswith(
        "It is not known whether the event happened. The reason: it was Started,"
    )


def test_end_proved_by_a_reboot_reads_like_one_that_was_seen() -> None:
    gone = message(REBOOT, None, kind="ended")
    proved = with_record_fields(gone, outcome="finished", reason="machine_rebooted")

    text = text_of(proved)

    assert text.title == "Reboot of WestNO_0 is over"
    assert text.summary.startswith("The event is over.")
    assert text.advice == "Check that all applications on the VM run again."


def test_end_has_severity_info_and_a_measured_interruption() -> None:
    over = message(REBOOT, REBOOT | STARTED, None)

    text = text_of(with_record_fields(over, interruption_seconds=95.0))

    assert text.summary == "The event is over. Nothing more will happen."
    assert "Expected interruption: unknown\nMeasured interruption of WestNO_0: 95 s\n" in text.plain
    assert "Severity: info" in text.plain
    assert text.advice == "Check that all applications on the VM run again."


def test_end_says_that_its_interruption_is_unknown() -> None:
    over = message(REBOOT, REBOOT | STARTED, None)

    text = text_of(with_record_fields(over, interruption_seconds=None))

    assert "interruption of WestNO_0: unknown" in text.plain


@pytest.mark.parametrize("event_type", ["Preempt", "Terminate"])
def test_end_says_that_vm_is_gone_when_its_type_deletes_it(event_type: str) -> None:
    fields = {"EventType": event_type}

    over = message(fields, fields | STARTED, None)

    assert text_of(over).summary == "The event is over, and the VM is gone."


@pytest.mark.parametrize(
    ("outcome", "color", "kind"),
    [("unknown", colors.COLORS["warning"], "warning"), ("finished", colors.OVER, "success")],
)
def test_end_is_good_news_only_when_its_outcome_is_known(
    outcome: str,
    color: str,
    kind: str,
) -> None:
    gone = with_record_fields(message({}, None, kind="ended"), outcome=outcome)
    text = text_of(gone)

    (attachment,) = slack.content(gone, text)["attachments"]
    notification = apprise.notification(gone, text, "text")

    assert attachment["color"] == color
    assert notification["notify_type"] == kind


# ---- several VMs


@pytest.mark.parametrize(
    ("resources", "vm"),
    [
        (["web_10", "web_2", "Web_1"], Vm(name="web_2")),
        (["Web_1", "web_2", "web_10"], Vm(name="web_10", zone="3")),
    ],
)
def test_vms_are_sorted_by_name_and_number_on_each_vm(resources: list[str], vm: Vm) -> None:
    text = text_of(message({"Resources": resources}, vm=vm))

    assert text.title == "Freeze of Web_1 and 2 more in 14 min"
    assert "Affected VMs: Web_1, web_2, web_10\n" in text.plain


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param((OF_TWO_VMS,), id="announced"),
        pytest.param((OF_TWO_VMS, OF_TWO_VMS | STARTED), id="started"),
        pytest.param((OF_TWO_VMS, OF_TWO_VMS | STARTED, None), id="finished"),
        pytest.param((OF_TWO_VMS, None), id="canceled"),
    ],
)
def test_shared_message_omits_facts_that_differ_between_vms(
    looks: tuple[dict[str, Any] | None, ...],
) -> None:
    another_vm = Vm(
        name=PEER,
        zone="9",
        vm_id="x",
        resource_group="rg-1",
        location="westeurope",
        subscription_id="s-1",
        scale_set="WestNO",
    )

    of_this_vm = with_record_fields(message(*looks), interruption_seconds=1.5)
    of_peer = message(*looks, vm=another_vm)

    assert text_of(of_this_vm.shared) == text_of(of_peer.shared)
    assert text_of(of_this_vm).plain != text_of(of_peer).plain


def text_of_started_wave(under_way: int, over: int) -> Text:
    """Return the text of a started wave of five reboots."""
    reboots = REBOOT | OF_TWO_VMS
    wave = with_record_fields(
        message(reboots, reboots | STARTED),
        fleet_events=5,
        fleet_under_way=under_way,
        fleet_over=over,
        event_id="wave-1",
    )
    return text_of(wave)


@pytest.mark.parametrize(
    ("under_way", "over", "summary"),
    [
        (1, 0, "One after the other, the affected VMs are rebooted. "),
        (1, 4, "One after the other, the affected VMs are rebooted. "),
        (5, 0, "Each affected VM is being rebooted. "),
    ],
)
def test_started_wave_says_how_its_vms_are_rebooted(
    under_way: int,
    over: int,
    summary: str,
) -> None:
    text = text_of_started_wave(under_way, over)

    assert text.summary.startswith(summary)
    assert "name each affected VM." in text.advice
    assert "Wave: wave-1\n" in text.plain


def test_started_wave_advises_for_the_vms_that_follow() -> None:
    text = text_of_started_wave(under_way=1, over=0)

    assert "For the VMs that follow: Move" in text.advice
    assert "has begun: 1 of 5 events is under way" in text.title


@pytest.mark.parametrize(("under_way", "over"), [(1, 4), (5, 0)])
def test_started_wave_has_no_advice_to_move_when_no_vm_follows(under_way: int, over: int) -> None:
    text = text_of_started_wave(under_way, over)

    assert "For the VMs that follow: Move" not in text.advice
    assert "has begun: 1 of 5 events is under way" not in text.title


def test_message_of_a_fleet_is_shared_unchanged() -> None:
    over = message(OF_TWO_VMS, STARTED, None)
    wave = with_record_fields(over, fleet_vms=2, started_seconds=600.0)

    assert wave.shared == wave
    assert "Duration of the event: 10 min\n" in text_of(wave.shared).plain


def test_end_of_a_wave_is_no_good_news_while_reports_are_missing() -> None:
    over = message(OF_TWO_VMS, STARTED, None)
    wave = with_record_fields(over, fleet_vms=2, reason="as_far_as_known")

    assert wave.is_good_news is False
    assert text_of(wave).summary.endswith("known: not every VM has reported it.")


def silent_vms(kind: ChangeKind) -> Message:
    return with_record_fields(
        message(kind=kind),
        event_type="Silent",
        resources=(PEER, ME),
        fleet_vms=2,
    )


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("started", ["Since", "VMs", "Place", "Severity"]),
        ("finished", ["Since", "Over since", "VMs", "Place", "Severity"]),
    ],
)
def test_message_of_silent_vms_has_time_and_place(kind: ChangeKind, facts: list[str]) -> None:
    silent = silent_vms(kind)

    text = text_of(silent)

    assert [fact.name for fact in text.facts] == facts
    assert "Since: 2026-03-01 12:00:01 UTC\n" in text.plain
    assert text.title == silent.record.body


def test_message_of_silent_vms_advises_until_they_are_heard() -> None:
    assert text_of(silent_vms("started")).advice
    assert not text_of(silent_vms("finished")).advice


# ---- the body


def test_approval_by_hand_names_the_operator_and_the_reason() -> None:
    approved = with_record_fields(
        message(kind="approved"),
        reason="accepted",
        approval_rule="operator",
        approval_by="root",
        approval_reason="CHG-1: drained\n",
    )

    text = text_of(approved)

    assert "Approval: Azure accepted it (by hand, root): CHG-1: drained\n" in text.plain


UNKNOWN: dict[str, Any] = {
    "Description": None,
    "NotBefore": None,
    "EventSource": None,
    "Resources": [],
}
PREEMPT = {"EventType": "Preempt", "DurationInSeconds": -1}
LATE = REBOOT | {  # announced after its NotBefore
    "EventSource": "User",
    "NotBefore": "Sun, 01 Mar 2026 11:59:00 GMT",
}


@pytest.mark.parametrize(
    ("looks", "line"),
    [
        ((UNKNOWN,), "Not before: unknown\n"),
        ((UNKNOWN,), "Affected VMs: unknown (Azure names none)\n"),
        ((UNKNOWN,), "Caused by: unknown\n"),
        ((UNKNOWN,), "Azure's description: none\n"),
        ((REBOOT,), "Expected interruption: unknown\n"),
        ((REBOOT,), "Caused by: Azure (Platform)\n"),
        (({}, LATER), "Previously: 2026-03-01 12:15:00 UTC\n"),
        (({}, LATER), "Not before: 2026-03-01 12:30:00 UTC, in 29 min\n"),
        (
            ({"Resources": [PEER]}, {"Resources": [ME, PEER]}),
            "What changed: WestNO_0 is affected now\n",
        ),
        (
            ({}, {"Description": "x"}),
            "What changed: the affected VMs, or what Azure says of the event\n",
        ),
        (({"EventSource": "User"},), "Caused by: a user of your subscription (User)\n"),
        (({"EventSource": "Else"},), "Caused by: Else\n"),
        (({"EventType": "Novelty"},), "Read Azure's description"),
        ((REBOOT | STARTED,), "Treat the VM as crashed"),
        ((UNKNOWN | {"EventStatus": "Paused"},), "Not before: unknown\n"),
    ],
)
def test_message_has_a_line_for_each_fact(
    looks: tuple[dict[str, Any] | None, ...], line: str
) -> None:
    text = text_of(message(*looks))

    assert line in text.plain


@pytest.mark.parametrize(
    ("not_before", "time"),
    [(None, "unknown"), (LATER["NotBefore"], "2026-03-01 12:30:00 UTC")],
)
def test_message_about_an_approval_has_the_time_of_the_event(
    not_before: str | None, time: str
) -> None:
    text = text_of(message({"NotBefore": not_before}, kind="approved"))

    assert f"Not before: {time}\n" in text.plain


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ((REBOOT,), "Measured"),
        ((REBOOT,), "Previously"),
        (({}, LATER), "What changed"),
        ((PREEMPT, PREEMPT | STARTED), "nterruption"),
        ((PREEMPT, PREEMPT | STARTED, None), "nterrupt"),
        ((REBOOT, REBOOT | STARTED), "crashed"),
        ((LATE, LATE | STARTED), "crashed"),
        ((LATE, LATE | STARTED), "without notice"),
    ],
)
def test_message_omits_what_does_not_apply(
    looks: tuple[dict[str, Any] | None, ...],
    words: str,
) -> None:
    text = text_of(message(*looks))

    assert words not in text.title
    assert words not in text.plain


@pytest.mark.parametrize(
    ("seconds", "summary", "advice", "fact"),
    [
        (-1, "paused for some seconds.", "If an application does not tolerate", "unknown"),
        (30, "paused for about 30 s.", "If an application does not tolerate", "30 s"),
        (9, "paused for about 9 s.", "Usually nothing: a pause of less than 10 s", "9 s"),
        (0, "Azure expects that this event interrupts no VM.", "Nothing: Azure expects", "none"),
    ],
)
def test_freeze_advises_by_its_expected_duration(
    seconds: int,
    summary: str,
    advice: str,
    fact: str,
) -> None:
    text = text_of(message({"DurationInSeconds": seconds}))

    assert summary in text.summary
    assert text.advice.startswith(advice)
    assert f"Expected interruption: {fact}\n" in text.plain


@pytest.mark.parametrize("seconds", [5, 60])
def test_no_text_says_that_event_can_start_before_not_before(seconds: int) -> None:
    ahead = text_of(message({"DurationInSeconds": seconds}))

    assert "any moment" not in ahead.plain
    assert "now" not in ahead.advice


EVENT_TYPES = pytest.mark.parametrize(
    "event_type",
    ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"],
)


@EVENT_TYPES
def test_each_step_has_its_own_summary_and_advice(event_type: str) -> None:
    scheduled = {"EventType": event_type}
    started = scheduled | STARTED

    step_texts = [
        text_of(message(scheduled)),
        text_of(message(scheduled, started)),
        text_of(message(scheduled, started, None)),
    ]

    for text in step_texts:
        assert text.summary
        assert text.advice
    assert len({(text.summary, text.advice) for text in step_texts}) == 3


@EVENT_TYPES
def test_summary_says_what_happens_to_the_vm(event_type: str) -> None:
    text = text_of(message({"EventType": event_type}))

    assert text.summary.startswith("The VM will be ")


@EVENT_TYPES
def test_summary_says_what_happens_to_each_vm_of_several(event_type: str) -> None:
    text = text_of(message({"EventType": event_type, **OF_TWO_VMS}))

    assert text.summary.startswith("Each affected VM ")


# ---- settings

NIGHT_SHIFT = {"reboot": "Call the night shift."}


@pytest.mark.parametrize("looks", [(REBOOT,), (REBOOT, REBOOT | STARTED)])
def test_configured_advice_is_shown_until_event_is_over(looks: tuple[dict[str, Any]]) -> None:
    text = text_of(message(*looks), advice=NIGHT_SHIFT)

    assert text.advice == "Call the night shift."


def test_text_mentions_only_people_named_in_configured_advice() -> None:
    mentioning = {"EventType": "@everyone", "Description": "@here <!channel> ops@example.org"}

    text = text_of(message(mentioning, vm=Vm(name="@all")), advice={"@everyone": "@here: look"})

    assert text.title.startswith("@\u200beveryone")
    assert ("Azure's description", "@\u200bhere <\u200b!channel> ops@example.org") in text.facts
    assert ("Reported by", "@\u200ball") in text.facts
    assert text.advice == "@here: look"


def test_configured_advice_is_not_shown_once_event_is_over() -> None:
    text = text_of(message(REBOOT, REBOOT | STARTED, None), advice=NIGHT_SHIFT)

    assert text.advice != "Call the night shift."


def test_configured_advice_is_only_for_its_event_type() -> None:
    text = text_of(message(), advice=NIGHT_SHIFT)

    assert text.advice.startswith("Usually nothing")


def test_message_has_no_advice_when_configured_advice_is_empty() -> None:
    text = text_of(message(REBOOT), advice={"Reboot": ""})

    assert "What to do" not in text.plain


LINKS = Links(
    dashboard="https://g/d?vm={vm}",
    runbook="https://w/{event_type}",
    page="https://p/",
)


def test_links_contain_names_of_vm_and_type() -> None:
    text = text_of(message(vm=Vm(name="a b/c")), links=LINKS)

    assert {link.name: link.value for link in text.links} == {
        "Dashboard": "https://g/d?vm=a%20b%2Fc",
        "Runbook": "https://w/Freeze",
        "Agent's page": "https://p/",
    }


def test_link_is_omitted_when_its_vm_has_no_name() -> None:
    text = text_of(message(vm=Vm()), links=LINKS)

    assert [link.name for link in text.links] == ["Runbook", "Agent's page"]
