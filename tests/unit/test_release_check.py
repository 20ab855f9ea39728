"""What a release needs: each check finds what is missing, and nothing where all is there."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from unit.test_pins import tool

ROOT = Path(__file__).parents[2]
CHECK = tool("release_check")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_file_names_the_version() -> None:
    assert list(CHECK.versions(PROJECT["version"])) == []
    assert len(list(CHECK.versions("9.9.9"))) == len(CHECK.VERSIONS)


def test_what_an_index_shows_is_complete() -> None:
    assert list(CHECK.metadata(PROJECT)) == []
    bounded = {**PROJECT, "requires-python": ">=3.11,<3.14", "urls": {}, "classifiers": ["Python :: 3.99"]}
    found = list(CHECK.metadata(bounded))
    assert len(found) == len(CHECK.URLS) + 2
    assert "classifiers: Python 3.99 is claimed and not tested" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Changelog\n\n## Unreleased\n- x\n", "move what is Unreleased below a heading `## 1.2.0 - YYYY-MM-DD`"),
        ("## Unreleased\n- y\n\n## 1.2.0 - 2026-01-01\n- x\n", "something is still Unreleased"),
        ("## Unreleased\n\n## 1.2.0 - 2026-01-01\n\n", "move what is Unreleased"),
        ("## Unreleased\n\n## 1.2.0 - 2026-01-01\n### Agent\n- x\n\n## 1.1.0 - 2025-01-01\n- y\n", ""),
        ("## [1.2.0] - 2026-01-01\n- x\n", ""),
    ],
)
def test_the_changelog_has_to_say_what_is_released(text: str, said: str) -> None:
    found = "\n".join(CHECK.changelog(text, "1.2.0"))
    assert re.search(re.escape(said), found) if said else found == ""


def test_a_tag_of_another_version_is_refused() -> None:
    assert list(CHECK.tags("1.2.0", "v1.2.0")) == []
    assert list(CHECK.tags("1.2.0", "v1.2.1")) == ["the tag is v1.2.1, and the version 1.2.0"]
