"""constraints.txt pins one version, with hashes, of each package, and says which extra needs it."""

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
REQUIREMENTS = {
    "agent": PROJECT["project"]["dependencies"],
    **PROJECT["project"]["optional-dependencies"],
}
part_of_constraints = runpy.run_path(str(ROOT / "tools" / "pins.py"))["part"]


def pinned(*groups: str) -> dict[str, str]:
    """Return the pinned version of each package that these groups need."""
    pins = re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", part_of_constraints(TEXT, set(groups)))
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("group", REQUIREMENTS)
def test_requirements_are_pinned_to_allowed_versions(group: str) -> None:
    pins = pinned(group)

    for line in REQUIREMENTS[group]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["project"]["name"]:
            continue  # the line names another extra, which has a case of its own
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{line}: not pinned: run tools/pins.py"
        fits = requirement.specifier.contains(version, prereleases=True)
        assert fits, f"{line}: {version} is pinned: run tools/pins.py"


def test_requirements_of_the_build_are_pinned() -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(REQUIREMENTS["build"])


def test_each_package_has_hashes() -> None:
    packages = re.findall(r"(?m)^[\w.-]+==.*\n(?: .*\n)*", TEXT)

    assert len(packages) > 100
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", package), package


def test_constraints_name_no_source_of_packages() -> None:
    assert not re.search(r"//|@|\b(index|find-links)\b", TEXT)


def test_agent_needs_few_packages() -> None:
    packages = pinned("agent").keys()

    assert packages >= {"msgspec", "waitress", "requests"}
    assert not packages & {"apprise", "pytest", "opentelemetry-sdk"}


def test_extra_adds_its_packages_to_those_of_the_agent() -> None:
    assert pinned("agent", "apprise").keys() >= {"apprise", "waitress"}


def text_of_place(place: str) -> str:
    """Return the text of a file or of all workflows, with continued lines joined."""
    path = ROOT / place
    files = sorted(path.glob("*.yml")) if path.is_dir() else [path]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return text.replace("\\\n", " ")


PLACES = pytest.mark.parametrize(
    "place", ["Makefile", ".ci/run", "Dockerfile", ".github/workflows"]
)


@PLACES
def test_groups_to_install_exist(place: str) -> None:
    groups: set[str] = set()
    for names in re.findall(r"pins.py --for \"?([\w,$(){}-]+)", text_of_place(place)):
        groups.update(names.split(","))

    assert groups
    assert groups - {"${EXTRAS}"} <= REQUIREMENTS.keys()


@PLACES
def test_packages_are_installed_by_hash(place: str) -> None:
    installs = [
        line
        for line in text_of_place(place).splitlines()
        if re.search(r"(pip|PIP\)?)\S* .*(install|--requirement|--editable)", line)
    ]

    assert installs
    for line in installs:
        assert "--require-hashes" in line or "--no-deps" in line or "PIP     =" in line, line
