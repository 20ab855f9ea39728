"""The kept corpus of ``tools/fuzz.py``: what must hold for any bytes holds for these."""

from pathlib import Path

import pytest

from support.fuzzed import CORPUS, TARGETS

KEPT = [(name, path) for name in TARGETS for path in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize(("target", "path"), KEPT, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_what_must_hold_for_any_bytes_holds_for_the_corpus(target: str, path: Path) -> None:
    TARGETS[target](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_there_is_a_corpus_for_each_target(target: str) -> None:
    assert any(name == target for name, _ in KEPT)
