"""The words of a message."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.config.sinks import Links, Messages
from notbefore.core.change import ChangeKind
from notbefore.core.message import Message
from notbefore.core.record import Vm
from notbefore.courier.sinks import apprise, slack
from notbefore.wording import texts
from notbefore.wording.texts import Text
from support.azure import ME, PEER, STARTED, T0
from support.messages import message, recording

EARLY = T0 + timedelta(seconds=60)
REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}
LATER = {"NotBefore": "Sun, 01 Mar 2026 12:30:00 GMT"}


def text_of(one: Message, **settings: Any) -> Text:
    return texts.text_of(replace(one, now=EARLY), Messages(**settings))


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
            "Reboot of WestNO_0 goes on (changed)",
        ),
        (({"Resources": ["9" * 200, "a1b", "1", "\u0661"]},), "Freeze of 1 and 3 more in 14 min"),
    ],
)
def test_each_change_has_its_title(looks: tuple[dict[str, Any] | None, ...], title: str) -> None:
    assert text_of(message(*looks)).title == title


def test_what_is_over_says_how_long_it_took_and_an_end_that_nobody_saw_that_it_is_not_known() -> (
    None
):
    both = {"Resources": [ME, PEER]}  # of several VMs each measures only its own
    several = recording(message(both, both | STARTED, None), interruption_seconds=4.2)
    assert text_of(several).title == "Freeze of WestNO_0 and 1 more is over"
    assert "Measured interruption of WestNO_0: 4.2 s" in text_of(several).plain
    gone = recording(message({}, STARTED, None, kind="ended"), outcome="unknown")
    assert text_of(gone).title == "Freeze of WestNO_0 may have happened: Azure no longer lists it"
    assert text_of(gone).summary.startswith(
        "It is not known whether the event happened. The reason: it was Started,"
    )
    proved = text_of(
        recording(
            message(REBOOT, None, kind="ended"), outcome="finished", reason="machine_rebooted"
        )
    )
    assert (proved.title, proved.summary[:18]) == (
        "Reboot of WestNO_0 is over",
        "The event is over.",
    )
    assert proved.advice == "Check that all applications on the VM run again."


def test_an_approval_by_hand_says_who_and_why() -> None:
    one = message(kind="approved")
    given = {
        "approval_rule": "operator",
        "approval_by": "root",
        "approval_reason": "CHG-1: drained\n",
    }
    text = text_of(recording(one, reason="accepted", **given))
    assert "Approval: Azure accepted it (by hand, root): CHG-1: drained\n" in text.plain


# ---- several VMs


def test_vms_are_sorted_by_name_and_number_and_the_same_whoever_speaks() -> None:
    names = ["web_10", "web_2", "Web_1"]
    mine, other = Vm(name="web_2"), Vm(name="web_10", zone="3")
    one, two = (
        message({"Resources": order}, vm=vm) for order, vm in ((names, mine), (names[::-1], other))
    )
    assert text_of(one).title == text_of(two).title == "Freeze of Web_1 and 2 more in 14 min"
    assert "Affected VMs: Web_1, web_2, web_10\n" in text_of(one).plain


def test_what_differs_between_the_vms_that_report_is_not_shared() -> None:
    both = {"Resources": [ME, PEER]}
    looks = [(both,), (both, both | STARTED), (both, both | STARTED, None), (both, None)]
    other = Vm(
        name=PEER,
        zone="9",
        vm_id="x",
        resource_group="rg-1",
        location="westeurope",
        subscription_id="s-1",
        scale_set="WestNO",
    )
    for steps in looks:
        one, two = recording(message(*steps), interruption_seconds=1.5), message(*steps, vm=other)
        assert text_of(one.shared) == text_of(two.shared)
        assert text_of(one).plain != text_of(two).plain


@pytest.mark.parametrize(
    ("under_way", "over", "summary", "advice"),
    [
        (
            1,
            0,
            "One after the other, the affected VMs are rebooted. ",
            "For the VMs that follow: Move",
        ),
        (1, 4, "One after the other, the affected VMs are rebooted. ", ""),
        (5, 0, "Each affected VM is being rebooted. ", ""),
    ],
)
def test_a_wave_that_has_started_distinguishes_those_that_follow_from_the_others(
    under_way: int, over: int, summary: str, advice: str
) -> None:
    listed = REBOOT | {"Resources": [ME, PEER]}
    wave = {
        "fleet_events": 5,
        "fleet_under_way": under_way,
        "fleet_over": over,
        "event_id": "wave-1",
    }
    text = text_of(recording(message(listed, listed | STARTED), **wave))
    assert text.summary.startswith(summary)
    assert "name each affected VM." in text.advice
    assert ("For the VMs that follow: Move" in text.advice) == bool(advice)
    assert ("has begun: 1 of 5 events is under way" in text.title) == bool(advice)
    assert "Wave: wave-1\n" in text.plain


def test_what_many_vms_say_together_is_shared_as_it_is() -> None:
    wave = recording(
        message({"Resources": [ME, PEER]}, STARTED, None), fleet_vms=2, started_seconds=600.0
    )
    assert wave.shared == wave
    assert "Duration of the event: 10 min\n" in text_of(wave.shared).plain
    part = recording(
        message({"Resources": [ME, PEER]}, STARTED, None), fleet_vms=2, reason="as_far_as_known"
    )
    assert (part.is_good_news, text_of(part).summary[-36:]) == (
        False,
        "known: not every VM has reported it.",
    )


@pytest.mark.parametrize(("kind", "over"), [("started", ()), ("finished", ("Over since",))])
def test_silent_vms_are_shown_with_since_when_and_where(
    kind: ChangeKind, over: tuple[str, ...]
) -> None:
    silent = recording(message(kind=kind), event_type="Silent", resources=(PEER, ME), fleet_vms=2)
    text = text_of(silent)
    assert [fact.name for fact in text.facts] == ["Since", *over, "VMs", "Place", "Severity"]
    assert "Since: 2026-03-01 12:00:01 UTC\n" in text.plain
    assert (text.title, bool(text.advice)) == (silent.record.body, kind == "started")


@pytest.mark.parametrize(
    ("outcome", "color", "kind"),
    [("unknown", slack.COLORS["warning"], "warning"), ("finished", slack.OVER, "success")],
)
def test_an_end_that_nobody_saw_is_no_good_news(outcome: str, color: str, kind: str) -> None:
    gone = recording(message({}, None, kind="ended"), outcome=outcome)
    (attachment,) = slack.content(gone, text_of(gone))["attachments"]
    assert attachment["color"] == color
    assert apprise.notification(gone, text_of(gone), "text")["notify_type"] == kind


# ---- the body


UNKNOWN: dict[str, Any] = dict.fromkeys(("Description", "NotBefore", "EventSource")) | {
    "Resources": []
}
PREEMPT = {"EventType": "Preempt", "DurationInSeconds": -1}
# announced after it
LATE = REBOOT | {
    "EventSource": "User",
    "NotBefore": "Sun, 01 Mar 2026 11:59:00 GMT",
}


@pytest.mark.parametrize(
    ("looks", "said", "unsaid"),
    [
        ((UNKNOWN,), ("Not before: unknown\n", "Affected VMs: unknown (Azure names none)\n"), ()),
        ((UNKNOWN,), ("Caused by: unknown\n", "Azure's description: none\n"), ()),
        (
            (REBOOT,),
            ("Expected interruption: unknown\n", "Caused by: Azure (Platform)\n"),
            ("Measured", "Previously"),
        ),
        (({}, LATER), ("Previously: 2026-03-01 12:15:00 UTC\n",), ("What changed",)),
        (({}, LATER), ("Not before: 2026-03-01 12:30:00 UTC, in 29 min\n",), ()),
        (
            ({"Resources": [PEER]}, {"Resources": [ME, PEER]}),
            ("What changed: WestNO_0 is affected now\n",),
            (),
        ),
        (
            ({}, {"Description": "x"}),
            ("What changed: the affected VMs, or what Azure says of the event\n",),
            (),
        ),
        ((PREEMPT, PREEMPT | STARTED), (), ("nterruption",)),
        ((PREEMPT, PREEMPT | STARTED, None), (), ("nterrupt",)),
        (({"EventSource": "User"},), ("Caused by: a user of your subscription (User)\n",), ()),
        (({"EventSource": "Else"},), ("Caused by: Else\n",), ()),
        (({"EventType": "Novelty"},), ("Read Azure's description",), ()),
        ((REBOOT | STARTED,), ("Treat the VM as crashed",), ()),
        ((REBOOT, REBOOT | STARTED), (), ("crashed",)),
        ((LATE, LATE | STARTED), (), ("crashed", "without notice")),
    ],
)
def test_each_step_says_what_is_known(
    looks: tuple[dict[str, Any] | None, ...], said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    text = text_of(message(*looks))
    plain = f"{text.title}\n{text.plain}"
    assert ([one for one in said if one not in plain], [one for one in unsaid if one in plain]) == (
        [],
        [],
    )


def test_what_is_over_is_said_in_the_past_tense_and_is_information() -> None:
    over = recording(message(REBOOT, REBOOT | STARTED, None), interruption_seconds=95.0)
    text = text_of(over)
    assert text.summary == "The event is over. Nothing more will happen."
    assert "Expected interruption: unknown\nMeasured interruption of WestNO_0: 95 s\n" in text.plain
    assert "Severity: info" in text.plain
    assert text.advice == "Check that all applications on the VM run again."
    assert (
        "interruption of WestNO_0: unknown"
        in text_of(recording(over, interruption_seconds=None)).plain
    )


@pytest.mark.parametrize("event_type", ["Preempt", "Terminate"])
def test_end_says_that_vm_is_gone_when_its_type_deletes_it(event_type: str) -> None:
    fields = {"EventType": event_type}
    over = message(fields, fields | STARTED, None)

    assert text_of(over).summary == "The event is over, and the VM is gone."


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
    seconds: int, summary: str, advice: str, fact: str
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


@pytest.mark.parametrize("event_type", ["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"])
def test_each_type_says_what_happens_and_what_to_do(event_type: str) -> None:
    seen = set()
    steps: tuple[tuple[dict[str, str] | None, ...], ...] = (
        ({},),
        ({}, STARTED),
        ({}, STARTED, None),
    )
    for looks in steps:
        text = text_of(
            message(
                *({"EventType": event_type, **look} if look is not None else None for look in looks)
            )
        )
        assert text.summary
        assert text.advice
        seen.add((text.summary, text.advice))
    assert len(seen) == 3
    assert text_of(message({"EventType": event_type})).summary.startswith("The VM will be ")
    assert text_of(message({"EventType": event_type, "Resources": [ME, PEER]})).summary.startswith(
        "Each affected VM "
    )


def test_the_user_s_advice_stands_instead_until_the_event_is_over() -> None:
    own = {"reboot": "Call the night shift."}
    for looks in ((REBOOT,), (REBOOT, REBOOT | STARTED)):
        assert text_of(message(*looks), advice=own).advice == "Call the night shift."
    assert (
        text_of(message(REBOOT, REBOOT | STARTED, None), advice=own).advice
        != "Call the night shift."
    )
    assert text_of(message(), advice=own).advice.startswith("Usually nothing")
    assert text_of(message(REBOOT), advice={"Reboot": ""}).plain.count("What to do") == 0


def test_links_are_filled_in_and_left_out_where_a_name_is_missing() -> None:
    links = Links(
        dashboard="https://g/d?vm={vm}", runbook="https://w/{event_type}", page="https://p/"
    )
    found = {
        link.name: link.value for link in text_of(message(vm=Vm(name="a b/c")), links=links).links
    }
    assert found == {
        "Dashboard": "https://g/d?vm=a%20b%2Fc",
        "Runbook": "https://w/Freeze",
        "Agent's page": "https://p/",
    }
    assert [link.name for link in text_of(message(vm=Vm()), links=links).links] == [
        "Runbook",
        "Agent's page",
    ]
