"""The table of event types, and the phrases for each of them."""

import pytest

from notbefore.core.event_types import EVENT_TYPES, event_type_of
from notbefore.wording import phrases


@pytest.mark.parametrize("name", EVENT_TYPES)
def test_event_type_has_phrases(name: str) -> None:
    type_phrases = phrases.TYPES[name]

    missing = {field for field, text in type_phrases._asdict().items() if not text}
    never_starts = EVENT_TYPES[name].is_advice
    assert missing == ({"started"} if never_starts else set())


def test_phrases_belong_to_event_types() -> None:
    assert phrases.TYPES.keys() == EVENT_TYPES.keys()


def test_undocumented_event_type_is_neither_critical_nor_promised() -> None:
    event_type = event_type_of("Novelty")

    assert event_type.severity == "warning"
    assert event_type.promised_notice == 0
    assert not event_type.reboots
    assert not event_type.vanishes


@pytest.mark.parametrize("name", EVENT_TYPES)
def test_event_type_is_critical_when_it_takes_the_vm_down(name: str) -> None:
    event_type = EVENT_TYPES[name]

    is_critical = event_type.severity == "critical"

    assert is_critical == (event_type.reboots or event_type.vanishes)
