"""The sink ``windows_event_log``, with a stand-in for pywin32: only Windows has the log."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.config.sinks import SinkConfig, WindowsEventLog
from notbefore.core.delivery import MessageKind
from notbefore.core.document import MAX_DESCRIPTION, MAX_NAME, MAX_RESOURCES
from notbefore.core.message import Message
from notbefore.errors import ConfigError, SendError
from peers.event_log import TYPES, Entry, EventLog
from support.azure import ID, STARTED
from support.messages import message
from support.messages import sent as messages_sent

REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}
STEPS = {  # as docs/windows.md has them
    101: message(REBOOT),
    102: message(REBOOT, REBOOT | {"NotBefore": "Sun, 01 Mar 2026 12:45:00 GMT"}),
    103: message(REBOOT, REBOOT | STARTED),
    104: message(REBOOT, None),
    105: message(REBOOT, REBOOT | STARTED, None),
    106: message(REBOOT, kind="ended"),
    107: message(REBOOT, kind="reminder"),
    111: message(REBOOT, kind="approved"),
    112: message(REBOOT, kind="approval_failed"),
    113: message(REBOOT, kind="approval_skipped"),
}


@pytest.fixture
def log() -> Iterator[EventLog]:
    with EventLog() as played:
        yield played
        assert not played.open_handles


def entry_of(log: EventLog, sent: Message, source: str = "notbefore") -> Entry:
    messages_sent(SinkConfig(windows_event_log=WindowsEventLog(source=source)), sent)
    return log.entries[-1]


@pytest.mark.parametrize("event_id", STEPS)
def test_step_has_an_id_of_its_own(event_id: int, log: EventLog) -> None:
    entry = entry_of(log, STEPS[event_id])

    assert entry.event_id == event_id


@pytest.mark.usefixtures("log")
def test_every_kind_of_message_but_heartbeats_has_an_id() -> None:
    from notbefore.courier.sinks.windows_event_log import EVENT_IDS  # noqa: PLC0415 - the stand-in comes first

    kinds: set[Any] = set()
    for part in get_args(MessageKind):
        kinds.update(get_args(part) or (part,))
    for part in list(kinds):
        kinds.update(get_args(part))
    named = {kind for kind in kinds if isinstance(kind, str)}

    assert named - EVENT_IDS.keys() == {"heartbeat"}
    assert max(EVENT_IDS.values()) <= 1000  # EventCreate.exe has no text for more


def test_entry_has_text_for_people_and_record_for_programs(log: EventLog) -> None:
    entry = entry_of(log, message(REBOOT), source="Azure events")

    text, record = entry.texts
    assert entry.source == "Azure events"
    assert text.startswith("Reboot of WestNO_0 in 14 min\n\nThe VM will be rebooted.")
    assert f"EventId: {ID}" in text
    assert json.loads(record)["azure.scheduled_event.type"] == "Reboot"


@pytest.mark.parametrize(
    ("sent", "entry_type"),
    [
        (message(REBOOT), "error"),
        (message({"EventType": "Freeze", "DurationInSeconds": 60}), "warning"),
        (message({}), "information"),
        (message(REBOOT, None), "information"),
    ],
)
def test_type_of_entry_follows_severity(sent: Message, entry_type: str, log: EventLog) -> None:
    assert entry_of(log, sent).entry_type == TYPES[entry_type]


def test_longest_event_fits_into_an_entry(log: EventLog) -> None:
    longest = {
        "EventType": "Reboot",
        "Description": "\U0001f525" * MAX_DESCRIPTION,
        "Resources": [f"{number:04}".ljust(MAX_NAME, "x") for number in range(MAX_RESOURCES)],
    }

    text, record = entry_of(log, message(longest)).texts

    assert ID in text
    assert record == ""


def test_stopped_service_is_named_and_tried_again(log: EventLog) -> None:
    log.down = True

    with pytest.raises(SendError, match="RPC server is unavailable") as raised:
        entry_of(log, message(REBOOT))

    assert not raised.value.permanent


def test_configuration_with_the_sink_is_refused_elsewhere(tmp_path: Any) -> None:
    config = tmp_path / "notbefore.yml"
    config.write_text("sinks: {log: {windows_event_log: {}}}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="only Windows has an event log"):
        load(config, {}, {})


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("register",), 1, "only Windows has an event log"),
        (("remove",), 1, "only Windows has an event log"),
        (("register", "--source", r"a\b"), 2, "--source: expected letters"),
    ],
)
def test_source_is_registered_only_in_windows(
    words: tuple[str, ...], code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["event-source", *words]) == code
    assert error in capsys.readouterr().err
