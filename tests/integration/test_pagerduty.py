"""PagerDuty: one incident for each event, and bodies that the published schema accepts."""

from collections.abc import Iterator
from typing import Any

import pytest

from notbefore.config.secret import Secret
from notbefore.config.sinks import PagerDuty as Settings
from notbefore.config.sinks import SinkConfig
from notbefore.core.document import MAX_DESCRIPTION, MAX_ID, MAX_NAME, MAX_RESOURCES, MAX_WORD
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.errors import SendError
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.azure import ID, ME, PEER, STARTED
from support.messages import LINKS, message
from support.messages import sent as messages_sent
from support.peers import Answer

REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}


@pytest.fixture
def pager() -> Iterator[PagerDuty]:
    with PagerDuty() as running:
        yield running


def sent(pager: PagerDuty, *messages: Message) -> None:
    settings = Settings(
        routing_key=Secret(ROUTING_KEY),
        url=f"{pager.url}/v2/enqueue",
        timeout=Duration("60s"),
    )
    try:
        messages_sent(SinkConfig(pagerduty=settings), *messages)
    finally:
        assert not pager.faults


def test_event_is_one_incident_until_it_ends(pager: PagerDuty) -> None:
    later = REBOOT | {"NotBefore": "Sun, 01 Mar 2026 12:45:00 GMT"}
    looks = (REBOOT, later, later | STARTED, None)
    steps = [message(*looks[: number + 1]) for number in range(4)]

    sent(pager, *steps[:3], message(REBOOT, kind="reminder"), steps[3])

    assert pager.effects == ["opened", "added", "added", "added", "resolved"]
    assert not pager.open
    assert [step.event["payload"]["severity"] for step in pager.steps] == ["critical"] * 4 + [
        "info"
    ]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param((REBOOT, None), id="canceled"),
        pytest.param((REBOOT, REBOOT | STARTED, REBOOT, None), id="scheduled again and canceled"),
        pytest.param((REBOOT, REBOOT | {"Resources": [PEER]}), id="another VM's"),
    ],
)
def test_incident_is_closed_when_its_event_no_longer_affects_the_vm(
    pager: PagerDuty, looks: tuple[Any, ...]
) -> None:
    sent(pager, message(REBOOT), message(*looks))

    assert pager.effects == ["opened", "resolved"]


def test_incident_has_fields_and_links_of_the_event(pager: PagerDuty) -> None:
    sent(pager, message(REBOOT))

    event = pager.steps[0].event
    assert event["dedup_key"] == f"notbefore/{ID.casefold()}"
    assert event["payload"]["source"] == ME
    assert event["payload"]["group"] == "WestNO"
    assert event["payload"]["class"] == "Reboot"
    assert event["payload"]["component"] == "Platform"
    assert event["payload"]["custom_details"]["EventId"] == ID
    assert [link["href"] for link in event["links"]] == [LINKS.dashboard, LINKS.runbook]


def test_longest_event_stays_within_the_limits_of_pagerduty(pager: PagerDuty) -> None:
    longest = {
        "EventId": "\u0130" * MAX_ID,  # folded, it is longer than a key may be
        "EventType": "\U0001f525" * MAX_WORD,
        "EventSource": "\U0001f525" * MAX_WORD,
        "Description": "\U0001f525" * MAX_DESCRIPTION,
        "Resources": [f"{number:04}".ljust(MAX_NAME, "x") for number in range(MAX_RESOURCES)],
    }

    sent(pager, message(longest), message(longest, STARTED | longest), message(longest, None))

    assert pager.effects == ["opened", "added", "resolved"]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(202, body=b'["success"]'),
        Answer(202, body=b"[" * 60_000),
        Answer(202, body=b""),
        Answer(200, body=b'{"status": "success"}'),
    ],
    ids=["list", "deep", "empty", "status 200"],
)
def test_any_success_accepts_an_event(pager: PagerDuty, answer: Answer) -> None:
    pager.default = answer

    sent(pager, message(REBOOT))


@pytest.mark.parametrize(
    ("answer", "permanent"),
    [
        pytest.param(Answer(202, body=b'{"status": "failure"}'), False, id="failure"),
        pytest.param(Answer(400, body=b'{"status": "invalid event"}'), True, id="invalid event"),
    ],
)
def test_answer_with_another_status_accepts_nothing(
    pager: PagerDuty, answer: Answer, *, permanent: bool
) -> None:
    pager.default = answer

    with pytest.raises(SendError) as raised:
        sent(pager, message(REBOOT))

    assert raised.value.permanent is permanent
