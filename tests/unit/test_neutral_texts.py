"""No text of Azure brings control characters or direction marks into a message."""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notbefore.config.sinks import Alertmanager, Email, Messages
from notbefore.core.message import Message
from notbefore.core.record import Vm
from notbefore.core.text import escaped
from notbefore.courier.sinks import alertmanager, apprise, email, kubernetes, pagerduty, slack
from notbefore.wording.texts import Text, text_of
from support.azure import ME, STARTED
from support.messages import message, with_record_fields

SETTINGS = Messages()
ACCOUNT = Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",))
HOSTILE = st.text(
    st.one_of(
        st.sampled_from(
            "\n\r\t\0\x1b\x7f\x85\u2028\u2029\u202e\u2066\u2069\u200f\u061c\ufeff\u200b<>&*_`{}%$\\"
        ),
        st.characters(codec="utf-8"),
    ),
    max_size=20,
)


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a request, also the keys of its mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, content in value.items():
            yield from texts(name)
            yield from texts(content)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from texts(element)


def email_content(message: Message, text: Text) -> Any:
    mail = email.compose(message, text, ACCOUNT)
    return dict(mail.items()), [part.get_content() for part in mail.iter_parts()]


def alertmanager_content(message: Message, text: Text) -> Any:
    return alertmanager.alerts(message, text, Alertmanager(urls=("http://am-0:9093",)))


def apprise_content(message: Message, text: Text) -> Any:
    return apprise.notification(message, text, "markdown")


def kubernetes_content(message: Message, text: Text) -> Any:
    event = kubernetes.event_of(message, "aks-1", text)
    listed = kubernetes.listed_event(message)
    return event, kubernetes.condition_of([listed], "2026-03-01T12:00:00Z")


# controls, format characters, separators of lines and paragraphs
CATEGORIES = ("Cc", "Cf", "Zl", "Zp")
SINKS: dict[str, Callable[[Message, Text], Any]] = {
    "slack": slack.content,
    "email": email_content,
    "alertmanager": alertmanager_content,
    "pagerduty": pagerduty.event,
    "kubernetes": kubernetes_content,
    "apprise": apprise_content,
}
REBOOT = {"EventType": "Reboot"}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(
    "not_before",
    [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, tzinfo=UTC)],
    ids=["year 1", "year 9999"],
)
@pytest.mark.parametrize(
    "looks",
    [
        pytest.param((REBOOT,), id="announced"),
        pytest.param((REBOOT, REBOOT | STARTED), id="started"),
        pytest.param((REBOOT, None), id="canceled"),
    ],
)
def test_sink_has_texts_for_every_not_before(
    looks: tuple[dict[str, Any] | None, ...],
    not_before: datetime,
    sink: str,
) -> None:
    # the record of another agent may hold such a time
    extreme = with_record_fields(message(*looks), not_before=not_before, fleet_events=2)

    request = SINKS[sink](extreme, text_of(extreme, SETTINGS))

    assert list(texts(request))


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("kind", ["announced", "started"])
@settings(max_examples=25, deadline=None)
@given(HOSTILE, HOSTILE)
@example("\u202e\n\rBcc: x", "\x1b[31m")
@example("a\u2066b", "\0")
def test_text_of_azure_adds_no_line_and_no_direction_mark(
    kind: str,
    sink: str,
    first: str,
    second: str,
) -> None:
    look = {
        "EventId": f"id{first}",
        "EventType": f"type{second}",
        "EventSource": first,
        "Description": second,
        "Resources": [f"vm{first}", f"vm{second}", ME],
    }
    vm = Vm(
        name=first,
        resource_group=second,
        zone=first,
        scale_set=second,
        subscription_id=first,
        location=second,
    )
    looks = [look, look | STARTED] if kind == "started" else [look]
    hostile = message(*looks, vm=vm)

    text = text_of(hostile, SETTINGS)
    request = SINKS[sink](hostile, text)

    letters = set("".join(texts(request)))
    forbidden = {letter for letter in letters if unicodedata.category(letter) in CATEGORIES}
    assert forbidden <= {"\n", "\u200b"}  # the line ends and the spaces in mentions are ours
    assert "\n" not in text.title


def all_forbidden() -> list[str]:
    letters = [chr(code) for code in range(sys.maxunicode + 1)]
    return [letter for letter in letters if unicodedata.category(letter) in CATEGORIES]


def test_each_control_and_format_character_of_unicode_is_escaped() -> None:
    unchanged = [f"{ord(letter):x}" for letter in all_forbidden() if letter in escaped(letter)]

    assert unchanged == []


def test_escapes_are_those_of_json() -> None:
    forbidden = "".join(all_forbidden())

    assert escaped("a\u202e\U000e0020") == r"a\u202e\udb40\udc20"
    assert json.loads(escaped(json.dumps(forbidden, ensure_ascii=False))) == forbidden
