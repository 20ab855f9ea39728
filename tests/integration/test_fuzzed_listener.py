"""The kept corpus of ``tools/fuzz.py``: what once was interesting stays harmless."""

from pathlib import Path

import pytest

from support.fuzzed_listener import SECRET, answers, check

CORPUS = sorted((Path(__file__).parents[1] / "corpus/listener").iterdir())
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_what_was_found_once_is_answered_well_and_every_answer_is_there() -> None:
    found = {status for path in CORPUS for status in check(path.read_bytes())}
    assert found >= {200, 400, 404, 405, 413, 421, 431, 501}


def test_the_check_would_notice_what_it_looks_for() -> None:
    assert check(SCRAPE * 2) == [200, 200]
    said, methods = answers(SCRAPE, closed=False)
    assert SECRET in said
    assert methods == ["GET"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("notbefore.web.auth.AccessControl.__call__", lambda self, *words: self._app(*words))
        with pytest.raises(AssertionError, match="read without a password"):
            check(SCRAPE)
