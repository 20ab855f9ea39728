"""What a release needs beside passing tests, and what is missing (``make release-check``; the release workflow).

``python tools/release_check.py`` prints a line for each thing, and ends with 1 where one is missing. With ``--tag TAG``
the tag is there already, and has to be that of the version.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
# where the version stands beside pyproject.toml
VERSIONS: Final = {
    "config/helm/notbefore/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)",
    "config/kubernetes/fleet.yaml": r"image: notbefore:(\S+)",
    "docs/getting-started.md": r"notbefore-([\d.]+)-bundle",
    "config/fleet/cloud-init.yml": r"notbefore-([\d.]+)-bundle",
}
URLS: Final = {"Homepage", "Documentation", "Source", "Issues", "Changelog", "Security"}
FILES: Final = ("LICENSE", "SECURITY.md", ".github/CODEOWNERS", ".github/dependabot.yml", "constraints.txt")


def main() -> int:
    """Ask every check, and say what it found."""
    parser = argparse.ArgumentParser(description="what a release needs, and what is missing")
    parser.add_argument("--tag", help="the tag of the release, where there is one already")
    tag: str | None = parser.parse_args().tag
    project = tomllib.loads(read("pyproject.toml"))["project"]
    version: str = project["version"]
    checks: dict[str, Callable[[], Iterator[str]]] = {
        f"every file names the version {version}": lambda: versions(version),
        f"the changelog has a section {version}, and nothing unreleased": lambda: changelog(
            read("CHANGELOG.md"), version
        ),
        "the metadata is complete": lambda: metadata(project),
        "the files of a project are there": lambda: (name for name in FILES if not (ROOT / name).exists()),
        "the packages can be built, and their README stands by itself": packages,
        "the tag is the version, and the tree is committed": lambda: tags(version, tag),
    }
    missing = 0
    for what, check in checks.items():
        found = list(check())
        missing += len(found)
        sys.stdout.write(f"{'missing' if found else 'ok     '}  {what}\n")
        sys.stdout.write("".join(f"           {problem}\n" for problem in found))
    sys.stdout.write(f"{missing} missing\n" if missing else f"{version} is ready to be tagged: git tag v{version}\n")
    return 1 if missing else 0


def read(name: str) -> str:
    """The text of a file of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def versions(version: str) -> Iterator[str]:
    """Where another version stands than in pyproject.toml."""
    for name, pattern in VERSIONS.items():
        found = set(re.findall(pattern, read(name)))
        if found != {version}:
            yield f"{name}: expected {version}, got {', '.join(sorted(found)) or 'none'}"


def changelog(text: str, version: str) -> Iterator[str]:
    """What the changelog lacks for a release of this version."""
    sections = dict(re.findall(r"(?ms)^## \[?([\w.]+)\]?[^\n]*\n(.*?)(?=^## |\Z)", text))
    if not sections.get(version, "").strip():
        yield f"CHANGELOG.md: move what is Unreleased below a heading `## {version} - YYYY-MM-DD`"
    elif sections.get("Unreleased", "").strip():
        yield "CHANGELOG.md: something is still Unreleased: raise the version, or move it below its heading"


def metadata(project: dict[str, Any]) -> Iterator[str]:
    """What an index would not show."""
    yield from (f"[project.urls]: {name}" for name in sorted(URLS - project["urls"].keys()))
    if "<" in project["requires-python"]:
        yield f"requires-python: {project['requires-python']} has an upper bound: newer Pythons could not even try"
    tested = set(re.findall(r"3\.\d\d", read(".github/workflows/ci.yml")))
    claimed = set(re.findall(r"3\.\d\d", " ".join(project["classifiers"])))
    yield from (f"classifiers: Python {python} is claimed and not tested" for python in sorted(claimed - tested))


def packages() -> Iterator[str]:
    """What is wrong with the wheel and the source, once built."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "hatchling", "build", "-d", directory]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            yield f"hatchling: {built.stderr.strip().splitlines()[-1]}"
            return
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            text = archive.read(name).decode()
        yield from (
            f"README: {link} leads nowhere on an index" for link in re.findall(r"\]\((?!https:|#)([^)]*)\)", text)
        )


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
