"""What is claimed of events whose lives are not simple, as docs/how-it-works.md has it."""

from pathlib import Path

import pytest

from support.claims import STORIES, claim, played, table

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def test_the_document_holds_the_table_that_the_stories_make() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table() in text, f"the table in {DOCUMENT} is to be this one:\n{table()}"


@pytest.mark.parametrize("words", list(STORIES))
def test_no_two_changes_of_a_story_share_an_id(words: str) -> None:
    changes = list(played(STORIES[words]))
    assert len({change.id for change in changes}) == len(changes)


def test_over_a_restart_the_same_is_claimed_as_without_one() -> None:
    through, restarted = (
        [claim(change) for change in played(STORIES[words])]
        for words in ("NotBefore moves there and back", "NotBefore moves there, the agent is restarted, and back")
    )
    assert through == restarted
