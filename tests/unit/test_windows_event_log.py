"""What an entry of Windows' event log holds, as far as it can be said without Windows."""

import json

import msgspec
import pytest

from notbefore.delivery.render import built_in
from notbefore.delivery.settings import SinkConfig, WindowsEventLog
from notbefore.delivery.sinks import check_installed
from notbefore.delivery.sinks.windows_event_log import (
    ERROR,
    EVENT_IDS,
    INFORMATION,
    MAX_STRING,
    WARNING,
    entry,
)
from notbefore.errors import ConfigError
from notbefore.events.change import APPROVAL_KINDS, STEPS
from support.azure import T0
from support.messages import STARTED, message


def test_the_id_says_what_kind_of_change_it_is_and_the_type_how_grave() -> None:
    reboot = {"EventType": "Reboot"}
    for looks, event_id, kind in (
        (({},), 1, INFORMATION),
        (({"DurationInSeconds": 9},), 1, WARNING),
        ((reboot,), 1, ERROR),
        ((reboot, reboot | STARTED), 3, ERROR),
        ((reboot, reboot | STARTED, None), 5, INFORMATION),
    ):
        one = message(*looks)
        found = entry(one, built_in(one, T0))
        assert found[:2] == (event_id, kind)
        title, text, record = found[2]
        assert one.record["azure.scheduled_event.type"] in title
        assert "Affected: WestNO_0" in text
        assert json.loads(record) == one.record


def test_every_change_has_an_id_of_its_own() -> None:
    assert set(EVENT_IDS) == {*STEPS, *APPROVAL_KINDS, "reminder"}
    assert len(set(EVENT_IDS.values())) == len(EVENT_IDS)


def test_what_the_system_would_not_take_is_cut() -> None:
    one = message()
    one = msgspec.structs.replace(one, line=b"\0" + b"d" * 40_000)
    _, _, strings = entry(one, built_in(one, T0))
    assert max(map(len, strings)) == MAX_STRING
    assert not any("\0" in text for text in strings)


def test_elsewhere_it_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="on Windows alone"):
        check_installed(SinkConfig(windows_event_log=WindowsEventLog()))


@pytest.mark.parametrize("name", ["", "a\\b"])
def test_a_source_is_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="without a backslash"):
        WindowsEventLog(source=name)
