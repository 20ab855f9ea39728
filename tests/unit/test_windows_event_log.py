"""What an entry of Windows' event log holds, as far as it can be said without Windows."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from notbefore.config.messages import Messages
from notbefore.config.sinks import WindowsEventLog
from notbefore.core.change import APPROVAL_KINDS, LIFECYCLE_KINDS
from notbefore.courier.sinks.windows_event_log import (
    ERROR,
    EVENT_IDS,
    INFORMATION,
    MAX_TITLE,
    WARNING,
    Sink,
    entry,
)
from notbefore.courier.wording import Text, built_in
from notbefore.errors import SendError
from support.azure import STARTED, T0
from support.messages import message, recording


def test_the_id_says_what_kind_of_change_it_is_and_the_type_how_severe() -> None:
    reboot = {"EventType": "Reboot"}
    for looks, event_id, kind in (
        (({},), 1, INFORMATION),
        (({"DurationInSeconds": 9},), 1, WARNING),
        ((reboot,), 1, ERROR),
        ((reboot, reboot | STARTED), 3, ERROR),
        ((reboot, reboot | STARTED, None), 5, INFORMATION),
    ):
        one = message(*looks)
        found = entry(one, built_in(one, T0, Messages()))
        assert found[:2] == (event_id, kind)
        title, text, record = found[2]
        assert one.record.event_type in title
        assert "Affected VMs: WestNO_0" in text
        assert json.loads(record) == one.record.flat()


def test_every_change_has_an_id_of_its_own() -> None:
    assert set(EVENT_IDS) == {*LIFECYCLE_KINDS, *APPROVAL_KINDS, "reminder", "sink_failed"}
    assert len(set(EVENT_IDS.values())) == len(EVENT_IDS)


def test_what_the_system_would_not_take_is_cut_and_the_record_stays_json() -> None:
    resources = [f"{number}-{'x' * 200}" for number in range(500)]
    large = message({"Resources": resources, "Description": "d\0" * 2_000})
    _, _, strings = entry(large, built_in(large, T0, Messages()))
    assert sum(map(len, strings)) * 2 < 60_000
    record = json.loads(strings[2])
    assert record["notbefore.truncated"] == ["description", "resources"]
    assert record["azure.scheduled_event.resources"] == resources[:20]
    huge = recording(large, body="x" * 30_000)
    _, _, strings = entry(huge, Text("t\0" * 5_000, "", "id"))
    assert (strings[0], strings[2]) == ("t" * MAX_TITLE, "{}")


def test_what_azure_says_stands_for_no_other_string() -> None:
    one = message({"Description": "100%1 %%2 50% of it"})
    _, _, strings = entry(one, built_in(one, T0, Messages()))
    assert not any(re.search(r"%[%\d]", text) for text in strings)
    assert "Azure's description: 100% 1 % % 2 50% of it" in strings[1]
    assert json.loads(strings[2]) == one.record.flat()


class Registry(ModuleType):
    """A stand-in for the module ``winreg``."""

    HKEY_LOCAL_MACHINE = 0x80000002

    def __init__(self) -> None:
        super().__init__("winreg")
        self.keys: set[str] = set()

    def OpenKey(self, _key: int, sub_key: str) -> SimpleNamespace:  # noqa: N802 - its name there
        if sub_key not in self.keys:
            raise FileNotFoundError(2, "The system cannot find the file specified")
        return SimpleNamespace(Close=lambda: None)


def test_a_source_that_is_not_registered_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setitem(sys.modules, "win32evtlogutil", ModuleType("win32evtlogutil"))  # nothing is asked of it
    settings = WindowsEventLog(source="my VMs", log="Azure")
    command = "New-EventLog -LogName 'Azure' -Source 'my VMs'"
    sink = Sink("log", settings, Messages())
    assert "sink log: the source my VMs is not registered in the log Azure" in caplog.text
    assert command in caplog.text
    with pytest.raises(SendError, match=command):
        sink.connect()
    registry.keys.add(r"SYSTEM\CurrentControlSet\Services\EventLog\Azure\my VMs")
    sink.connect()
    caplog.clear()
    Sink("log", settings, Messages())
    assert not caplog.text
