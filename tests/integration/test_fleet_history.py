"""The history of a fleet on a disk: torn lines, replays, a full disk, retention."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from notbefore.fleet.history import MAX_WAITING, History, PastEvent, read_past
from support.agent import eventually
from support.past import THEN, past

ALWAYS = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
MARCH = "2026-03.jsonl"


@contextmanager
def writing(directory: Path, keep: float | None = None) -> Iterator[History]:
    history = History(directory, keep)
    history.start()
    yield history
    history.close(10)


def written(directory: Path, *lines: PastEvent) -> None:
    with writing(directory) as history:
        history.add(lines)
        assert history.flush(10)


def read(*directories: Path) -> list[PastEvent]:
    wrong: list[str] = []
    found = read_past(directories, *ALWAYS, wrong)
    assert wrong == []
    return found


def test_each_event_is_a_line_in_the_file_of_its_month(tmp_path: Path) -> None:
    later = past("B", closed=THEN + timedelta(days=30))
    written(tmp_path, past("A"), later)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARCH, "2026-04.jsonl"]
    assert msgspec.json.decode((tmp_path / MARCH).read_bytes(), type=PastEvent) == past("A")
    assert read(tmp_path) == [past("A"), later]
    assert (tmp_path / MARCH).stat().st_mode & 0o777 == 0o600


def test_what_is_replayed_is_not_written_again(tmp_path: Path) -> None:
    written(tmp_path, past("A"))
    written(tmp_path, past("a", closed=THEN + timedelta(seconds=5)), past("B"))  # by another process, a moment later
    assert [one.event_id for one in read(tmp_path)] == ["A", "B"]
    assert len((tmp_path / MARCH).read_bytes().splitlines()) == 2


def test_an_event_that_came_back_is_another_line(tmp_path: Path) -> None:
    written(tmp_path, past("A"), past("A", nth=1, closed=THEN + timedelta(hours=1)))
    assert [one.nth for one in read(tmp_path)] == [0, 1]


def test_where_the_outcome_turns_out_to_be_another_the_last_line_counts(tmp_path: Path) -> None:
    written(tmp_path, past("A", outcome="canceled"))
    written(tmp_path, past("A", closed=THEN + timedelta(hours=1)))
    assert [one.outcome for one in read(tmp_path)] == ["finished"]


@pytest.mark.parametrize("torn", [b'{"event_id": "C', b"\0" * 100_000, msgspec.json.encode(past("C"))])
def test_a_torn_last_line_is_cut_off_at_the_start(tmp_path: Path, torn: bytes) -> None:
    written(tmp_path, past("A"))
    whole = (tmp_path / MARCH).read_bytes()
    (tmp_path / MARCH).write_bytes(whole + torn)
    assert [one.event_id for one in read(tmp_path)] == ["A"]
    with writing(tmp_path) as history:
        eventually(lambda: (tmp_path / MARCH).read_bytes() == whole)
        history.add([past("C")])  # the fold comes to it again: it was torn before a snapshot without it was written
        assert history.flush(10)
    assert [one.event_id for one in read(tmp_path)] == ["A", "C"]


def test_a_line_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    written(tmp_path, past("A"))
    with (tmp_path / MARCH).open("ab") as file:
        file.write(b"{}\n\xff\xfe\n")
    written(tmp_path, past("B"))
    wrong: list[str] = []
    assert [one.event_id for one in read_past([tmp_path], *ALWAYS, wrong)] == ["A", "B"]
    assert [f"{MARCH}, line {number}" in text for number, text in zip((2, 3), wrong, strict=True)] == [True, True]


def test_a_full_disk_keeps_the_lines_in_memory_and_they_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/dev/full`` in the place of the file: every write of it fails with ENOSPC."""
    written(tmp_path, past("A"))
    real, full = os.open, {"now": True}

    def fill(path: Path, *words: int) -> int:
        return real("/dev/full", os.O_RDWR) if full["now"] else real(path, *words)

    monkeypatch.setattr("notbefore.fleet.history.os.open", fill)
    with writing(tmp_path) as history:
        history.add([past("B")])
        eventually(lambda: history.failures > 0)
        assert not history.flush(60)  # at once: it does not wait for a disk that could not be written
        assert history.waiting == 1
        full["now"] = False
        eventually(lambda: not history.waiting)
    assert [one.event_id for one in read(tmp_path)] == ["A", "B"]


def test_what_a_full_disk_has_torn_is_cut_off_before_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: Callable[[int], None] = os.fsync
    broken = {"now": True}

    def fail(file: int) -> None:
        if broken["now"]:
            os.ftruncate(file, 300)  # half of the line came to the disk
            raise OSError(errno.ENOSPC, "no space left on device")
        synced(file)

    monkeypatch.setattr("notbefore.fleet.history.os.fsync", fail)
    with writing(tmp_path) as history:
        history.add([past("A")])
        eventually(lambda: history.failures > 0)
        broken["now"] = False
        eventually(lambda: not history.waiting)
    assert [one.event_id for one in read(tmp_path)] == ["A"]


def test_what_waits_is_bounded_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    history = History(tmp_path / "file" / "below")
    (tmp_path / "file").write_bytes(b"")  # no directory can be made there
    history.start()
    history.add(past(str(number)) for number in range(MAX_WAITING + 3))
    assert (history.waiting, history.dropped) == (MAX_WAITING, 3)
    history.close(10)


def test_a_month_is_deleted_once_all_of_it_is_older_than_what_is_to_be_kept(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    for days in (0, 40, 100, 200):
        written(tmp_path, past(f"E{days}", closed=now - timedelta(days=days)))
    (tmp_path / "notes.txt").write_text("somebody else's")
    with writing(tmp_path, keep=45 * 86_400.0):
        eventually(lambda: len(list(tmp_path.glob("*.jsonl"))) < 4)
    assert [one.event_id for one in read(tmp_path)] == ["E40", "E0"]
    assert (tmp_path / "notes.txt").exists()


def test_several_instances_histories_are_read_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    written(one, past("A"), past("B"))
    written(two, past("B", closed=THEN + timedelta(seconds=9)), past("C"))
    assert [found.event_id for found in read(one, two)] == ["A", "C", "B"]


def test_only_what_was_over_in_the_time_is_read(tmp_path: Path) -> None:
    written(
        tmp_path, past("A"), past("B", closed=THEN + timedelta(hours=1)), past("C", closed=THEN + timedelta(days=40))
    )
    found = read_past([tmp_path], THEN + timedelta(minutes=1), THEN + timedelta(days=1), [])
    assert [one.event_id for one in found] == ["B"]
