"""The kept corpus of ``tools/fuzz.py``: what must hold for any bytes holds for these."""

import pytest

from support.fuzzed import CORPUS, TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_what_must_hold_for_any_bytes_holds_for_the_corpus(target: str) -> None:
    kept = sorted((CORPUS / target).iterdir())
    assert kept
    for path in kept:
        try:
            TARGETS[target](path.read_bytes())
        except Exception as error:
            error.add_note(str(path))
            raise
