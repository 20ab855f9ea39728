"""The history of an instance: events that are over, each once; in one file."""

import sqlite3
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

from notbefore.errors import StoreError
from notbefore.fleet.history import History, PastEvent, read_past
from support.past import THEN, past

NOW = THEN.timestamp()


def write(directory: Path, *events: PastEvent) -> History:
    history = History(directory)
    history.write(events, NOW)
    return history


def ids(found: Iterable[PastEvent]) -> list[str]:
    return [one.event_id for one in found]


def test_an_event_that_is_written_again_stays_one_with_what_was_learnt_late(tmp_path: Path) -> None:
    later = THEN + timedelta(hours=1)
    write(
        tmp_path,
        past("A", outcome="unknown"),
        past("B"),
        past("B", nth=1),
        past("B", resource_group="lab"),
    )
    history = write(tmp_path, past("a", closed=later))
    assert ids(read_past(history.past(0.0))) == ["B", "B", "B", "a"]
    (one,) = read_past(history.past(NOW + 60))  # only what was over since then
    assert (one.event_id, one.outcome) == ("a", "finished")


def test_several_instances_histories_are_read_together_and_the_newest_counts(
    tmp_path: Path,
) -> None:
    one = write(tmp_path / "one", past("A"), past("B", outcome="unknown"))
    two = write(tmp_path / "two", past("B", closed=THEN + timedelta(seconds=9)), past("C"))
    found = read_past(
        [*one.past(0.0), b"{", *two.past(0.0), *History(tmp_path / "nothing").past(0.0)]
    )
    assert ids(found) == ["A", "C", "B"]
    assert found[-1].outcome == "finished"


def test_what_is_older_than_is_to_be_kept_is_deleted(tmp_path: Path) -> None:
    history = History(tmp_path, keep=86_400.0)
    history.write([past("A", closed=THEN - timedelta(days=2)), past("B")], NOW)
    assert ids(read_past(history.past(0.0))) == ["B"]


def test_history_is_empty_until_its_table_is_created(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.path.touch()  # as ``write`` does before SQLite uses the file

    assert history.past(0.0) == []


def test_a_history_with_an_entry_that_is_no_event_says_so_and_what_to_do(tmp_path: Path) -> None:
    history = write(tmp_path, past("A"))
    for entry in (None, b"\xff", "text"):
        sqlite3.connect(history.path, isolation_level=None).execute(
            "UPDATE past SET event = ?", [entry]
        )
        with pytest.raises(
            StoreError, match=r"fleet-history.db cannot be read \(.*move the file away"
        ):
            history.past(0.0)
