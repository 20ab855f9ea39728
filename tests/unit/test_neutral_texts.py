"""No text of any sink has a control character, or a mark that changes the direction of text, that
came from Azure.
"""

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
from notbefore.courier.sinks import alertmanager, apprise, email, pagerduty, slack
from notbefore.wording.texts import Text, text_of
from support.azure import ME, STARTED
from support.messages import message, recording

SETTINGS = Messages()
ACCOUNT = Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",))
EVIL = st.text(
    st.one_of(
        st.sampled_from(
            "\n\r\t\0\x1b\x7f\x85\u2028\u2029\u202e\u2066\u2069\u200f\u061c\ufeff\u200b<>&*_`{}%$\\"
        ),
        st.characters(codec="utf-8"),
    ),
    max_size=20,
)


def texts(value: Any) -> Iterator[str]:
    """Every text in a request, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.items() for text in texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in texts(item))


def _email(one: Message, text: Text) -> Any:
    mail = email.compose(one, text, ACCOUNT)
    return dict(mail.items()), mail.get_content()


# controls, format characters, separators of lines and paragraphs
CATEGORIES = (
    "Cc",
    "Cf",
    "Zl",
    "Zp",
)
SINKS: dict[str, Callable[[Message, Text], Any]] = {
    "slack": slack.content,
    "email": _email,
    "alertmanager": lambda one, text: alertmanager.alerts(
        one, text, Alertmanager(urls=("http://am-0:9093",))
    ),
    "pagerduty": pagerduty.event,
    "apprise": lambda one, text: apprise.notification(one, text, "markdown"),
}


@pytest.mark.parametrize("moment", [datetime(1, 1, 1), datetime(9999, 12, 31, 23)])  # noqa: DTZ001 - UTC below; what another agent's record may hold
@pytest.mark.parametrize("sink", SINKS)
def test_every_text_survives_every_moment(sink: str, moment: datetime) -> None:
    look, moved = (
        {"EventType": "Reboot"},
        {"not_before": moment.replace(tzinfo=UTC), "fleet_events": 2},
    )
    for one in (message(look), message(look, look | STARTED), message(look, None)):
        late = recording(one, **moved)
        assert list(texts(SINKS[sink](late, text_of(late, SETTINGS))))


@pytest.mark.parametrize("sink", SINKS)
@settings(max_examples=25, deadline=None)
@given(EVIL, EVIL)
@example("\u202e\n\rBcc: x", "\x1b[31m")
@example("a\u2066b", "\0")
def test_nothing_forges_a_line_or_turns_the_text_around(sink: str, first: str, second: str) -> None:
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
    for one in (message(look, vm=vm), message(look, look | STARTED, vm=vm)):
        text = text_of(one, SETTINGS)
        for found in texts(SINKS[sink](one, text)):
            wrong = {letter for letter in found if unicodedata.category(letter) in CATEGORIES}
            assert wrong <= {"\n"}  # the line ends are ours
        assert "\n" not in text.title


def test_every_control_and_format_character_of_unicode_is_escaped() -> None:
    wrong = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in CATEGORIES
    ]
    assert [f"{ord(letter):x}" for letter in wrong if letter in escaped(letter)] == []
    assert escaped("a\u202e\U000e0020") == r"a\u202e\udb40\udc20"
    assert json.loads(escaped(json.dumps("".join(wrong), ensure_ascii=False))) == "".join(wrong)
