"""constraints.txt: one version and its hashes for everything that is installed, and what of it each
extra needs.
"""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "constraints.txt").read_text(encoding="utf-8")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ASKED = {"agent": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
part = runpy.run_path(str(ROOT / "tools" / "pins.py"))["part"]


def pinned(*groups: str) -> dict[str, str]:
    found = re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", part(TEXT, set(groups)))
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("group", ASKED)
def test_what_a_group_asks_for_is_pinned_to_a_version_that_it_allows(group: str) -> None:
    pins = pinned(group)
    for line in ASKED[group]:
        wanted = Requirement(line)
        if wanted.name == PROJECT["project"]["name"]:  # what another extra asks for
            continue
        version = pins.get(canonicalize_name(wanted.name), "none")
        fits = version != "none" and wanted.specifier.contains(version, prereleases=True)
        assert fits, f"{line}: {version} is pinned: run tools/pins.py"
    assert set(PROJECT["build-system"]["requires"]) <= set(ASKED["build"])


def test_every_package_has_hashes_and_nothing_says_where_it_comes_from() -> None:
    blocks = re.findall(r"(?m)^[\w.-]+==.*\n(?: .*\n)*", TEXT)
    assert len(blocks) > 100
    for block in blocks:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
    assert not re.search(r"//|@|\b(index|find-links)\b", TEXT)


def test_an_agent_alone_needs_little_and_what_an_extra_adds_is_added() -> None:
    assert {"msgspec", "waitress", "requests"} <= pinned("agent").keys()
    assert not {"apprise", "pytest", "opentelemetry-sdk"} & pinned("agent").keys()
    assert {"apprise", "waitress"} <= pinned("agent", "apprise").keys()


@pytest.mark.parametrize("place", ["Makefile", ".ci/run", "Dockerfile", ".github/workflows"])
def test_what_is_installed_is_installed_by_hash(place: str) -> None:
    path = ROOT / place
    files = sorted(path.glob("*.yml")) if path.is_dir() else [path]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files).replace("\\\n", " ")
    groups = {
        name
        for found in re.findall(r"pins.py --for \"?([\w,$(){}-]+)", text)
        for name in found.split(",")
    }
    assert groups - {"${EXTRAS}"} <= ASKED.keys()
    installs = [
        line
        for line in text.splitlines()
        if re.search(r"(pip|PIP\)?)\S* .*(install|--requirement|--editable)", line)
    ]
    assert installs
    for line in installs:
        assert "--require-hashes" in line or "--no-deps" in line or "PIP     =" in line, line
