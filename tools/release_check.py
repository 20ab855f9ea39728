"""Whether this commit can be the release that pyproject.toml names (``make release-check``; the release workflow).

Prints what is missing, and ends with 1 where something is. With ``--tag TAG`` the tag is there already, and has to be
that of the version. What must hold in every commit is in tests/unit/test_release_check.py.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def main() -> int:
    """Say what is missing."""
    parser = argparse.ArgumentParser(description="what a release needs, and what is missing")
    parser.add_argument("--tag", help="the tag of the release, where there is one already")
    tag: str | None = parser.parse_args().tag
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    missing = [*changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version), *tags(version, tag)]
    sys.stdout.write("".join(f"{line}\n" for line in missing))
    if not missing:
        sys.stdout.write(f"{version} is ready to be tagged: git tag v{version}\n")
    return 1 if missing else 0


def changelog(text: str, version: str) -> Iterator[str]:
    """What the changelog lacks for a release of this version."""
    sections = dict(re.findall(r"(?ms)^## \[?([\w.]+)\]?[^\n]*\n(.*?)(?=^## |\Z)", text))
    if not sections.get(version, "").strip():
        yield f"CHANGELOG.md: move what is Unreleased below a heading `## {version} - YYYY-MM-DD`"
    elif sections.get("Unreleased", "").strip():
        yield "CHANGELOG.md: something is still Unreleased: raise the version, or move it below its heading"


def tags(version: str, tag: str | None) -> Iterator[str]:
    """Whether this commit is, or can be, the release."""
    if tag is not None:
        if tag != f"v{version}":
            yield f"the tag is {tag}, and the version {version}"
        return
    if git("status", "--porcelain"):
        yield "git status: something is not committed"
    if git("tag", "--list", f"v{version}"):
        yield f"the tag v{version} is there already: raise the version in pyproject.toml"


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S607


if __name__ == "__main__":
    sys.exit(main())
