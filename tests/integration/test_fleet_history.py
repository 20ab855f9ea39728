"""The history of an instance: a file with each ended event once."""

import sqlite3
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

from notbefore.errors import StoreError
from notbefore.fleet.history import History, PastEvent, read_past
from support.past_events import THEN, past_event

NOW = THEN.timestamp()


def write(directory: Path, *events: PastEvent) -> History:
    """Write events into the history of a state directory, and return the history."""
    history = History(directory)
    history.write(events, NOW)
    return history


def ids(events: Iterable[PastEvent]) -> list[str]:
    return [event.event_id for event in events]


def test_rewritten_event_replaces_its_earlier_entry(tmp_path: Path) -> None:
    history = write(tmp_path, past_event("A", outcome="unknown"), past_event("B"))

    history.write([past_event("a", closed=THEN + timedelta(hours=1))], NOW)

    assert ids(read_past(history.past(0.0))) == ["B", "a"]
    (event,) = read_past(history.past(NOW + 60))
    assert event.event_id == "a"
    assert event.outcome == "finished"


def test_events_with_the_same_id_have_their_own_entries(tmp_path: Path) -> None:
    history = write(
        tmp_path,
        past_event("B"),
        past_event("B", nth=1),  # it came back
        past_event("B", resource_group="lab"),
    )

    assert ids(read_past(history.past(0.0))) == ["B", "B", "B"]


def test_corrected_entry_keeps_what_was_measured_before(tmp_path: Path) -> None:
    by_agents = past_event("A", outcome="unknown", notice=(840.0,), azure_notice=None)
    by_azure = past_event(
        "A", notice=(), measured={}, reported_by=0, azure_notice=0.0, ended_by="azure"
    )

    history = write(tmp_path, by_agents, by_azure)
    history.write([by_azure], NOW)

    (event,) = read_past(history.past(0.0))
    assert event.outcome == "finished"
    assert event.measured == by_agents.measured
    assert event.reported_by == 3
    assert event.azure_notice == 0.0


def test_unreadable_entry_is_replaced(tmp_path: Path) -> None:
    history = write(tmp_path, past_event("A"))
    with sqlite3.connect(history.path) as database:
        database.execute("UPDATE past SET event = ?", [b"{"])

    history.write([past_event("A", outcome="canceled")], NOW)

    (event,) = read_past(history.past(0.0))
    assert event.outcome == "canceled"


def test_newest_entry_counts_when_histories_of_instances_are_merged(
    tmp_path: Path,
) -> None:
    first = write(tmp_path / "first", past_event("A"), past_event("B", outcome="unknown"))
    second = write(
        tmp_path / "second", past_event("B", closed=THEN + timedelta(seconds=9)), past_event("C")
    )
    empty = History(tmp_path / "empty")
    unreadable = b"{"

    events = read_past([*first.past(0.0), unreadable, *second.past(0.0), *empty.past(0.0)])

    assert ids(events) == ["A", "C", "B"]
    assert events[-1].outcome == "finished"


def test_history_deletes_events_older_than_its_limit(tmp_path: Path) -> None:
    history = History(tmp_path, keep=86_400.0)
    history.write([past_event("A", closed=THEN - timedelta(days=2)), past_event("B")], NOW)

    assert ids(read_past(history.past(0.0))) == ["B"]


def test_history_is_empty_until_its_table_is_created(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.path.touch()  # ``write`` also creates the file before SQLite uses it

    assert history.past(0.0) == []


@pytest.mark.parametrize("entry", [None, b"\xff", "text"])
def test_unreadable_entry_is_an_error_with_the_remedy(tmp_path: Path, entry: object) -> None:
    history = write(tmp_path, past_event("A"))
    database = sqlite3.connect(history.path, isolation_level=None)
    database.execute("UPDATE past SET event = ?", [entry])
    database.close()

    remedy = r"fleet-history.db cannot be read \(.*move the file away"
    with pytest.raises(StoreError, match=remedy):
        history.past(0.0)
