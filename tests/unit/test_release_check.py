"""What a release needs: what each commit has of it, and what tools/release_check.py finds missing."""

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from unit.test_pins import tool

ROOT = Path(__file__).parents[2]
CHECK = tool("release_check")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# where the version stands beside pyproject.toml
VERSIONS: Final = {
    "config/helm/notbefore/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)",
    "config/kubernetes/fleet.yaml": r"image: notbefore:(\S+)",
    "docs/getting-started.md": r"notbefore-([\d.]+)-bundle",
    "config/fleet/cloud-init.yml": r"notbefore-([\d.]+)-bundle",
}


def test_every_file_names_the_version() -> None:
    found = {name: set(re.findall(way, (ROOT / name).read_text(encoding="utf-8"))) for name, way in VERSIONS.items()}
    assert set().union(*found.values()) == {PROJECT["version"]}
    assert all(found.values())


def test_what_an_index_shows_is_complete_and_every_python_that_is_claimed_is_tested() -> None:
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog", "Security"} <= PROJECT["urls"].keys()
    assert "<" not in PROJECT["requires-python"], "newer Pythons could not even try"
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    claimed = set(re.findall(r"3\.\d\d", " ".join(PROJECT["classifiers"])))
    assert claimed
    assert claimed <= set(re.findall(r"3\.\d\d", workflow))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Changelog\n\n## Unreleased\n- x\n", "move what is Unreleased below a heading `## 1.2.0 - YYYY-MM-DD`"),
        ("## Unreleased\n- y\n\n## 1.2.0 - 2026-01-01\n- x\n", "something is still Unreleased"),
        ("## Unreleased\n\n## 1.2.0 - 2026-01-01\n### Agent\n- x\n\n## 1.1.0 - 2025-01-01\n- y\n", ""),
    ],
)
def test_the_changelog_has_to_say_what_is_released(text: str, said: str) -> None:
    found = "\n".join(CHECK.changelog(text, "1.2.0"))
    assert re.search(re.escape(said), found) if said else found == ""


def test_a_tag_of_another_version_is_refused() -> None:
    assert list(CHECK.tags("1.2.0", "v1.2.0")) == []
    assert list(CHECK.tags("1.2.0", "v1.2.1")) == ["the tag is v1.2.1, and the version 1.2.0"]
