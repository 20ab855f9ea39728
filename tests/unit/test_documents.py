"""The documents hold: references are not stale, configurations are right, commands can be typed, links lead on."""

import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import msgspec
import pytest
import yaml

from notbefore.commands.main import make_parser, understood
from notbefore.config.load import load
from notbefore.config.model import Config
from notbefore.config.sinks import KINDS
from notbefore.metrics import families, fleet
from notbefore.metrics.families import Metric

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS: Final = {field.encode_name for field in msgspec.structs.fields(Config)}
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS: Final = {  # where the version stands beside pyproject.toml
    "config/helm/notbefore/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)",
    "config/kubernetes/fleet.yaml": r"image: notbefore:(\S+)",
    "docs/getting-started.md": r"notbefore-([\d.]+)-bundle",
    "config/fleet/cloud-init.yml": r"notbefore-([\d.]+)-bundle",
}
_FENCE: Final = re.compile(r"^[ ]*```(\w+)[^\n]*\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Each block of a language, and the document that it stands in."""
    for path in DOCUMENTS:
        for kind, text in _FENCE.findall(path.read_text(encoding="utf-8")):
            if kind == language:
                yield path.name, text


# ---- references


PAGES: Final = runpy.run_path(str(ROOT / "tools" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_says_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    made = PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "it is stale: make reference"


def test_every_file_names_the_version() -> None:
    found = {name: set(re.findall(way, (ROOT / name).read_text(encoding="utf-8"))) for name, way in VERSIONS.items()}
    version: str = PROJECT["version"]
    assert found == {name: {version} for name in VERSIONS}
    assert f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_what_an_index_shows_is_complete_and_every_python_that_is_claimed_is_tested() -> None:
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog", "Security"} <= PROJECT["urls"].keys()
    assert "<" not in PROJECT["requires-python"], "newer Pythons could not even try"
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    claimed = set(re.findall(r"3\.\d\d", " ".join(PROJECT["classifiers"])))
    assert claimed
    assert claimed <= set(re.findall(r"3\.\d\d", workflow))


# ---- configurations


def as_configuration(text: str) -> dict[str, Any] | None:
    """The block as a whole configuration, if it is one or a part of one: sections, or sinks by their names."""
    values = yaml.safe_load(text)
    if not isinstance(values, dict):
        return None
    if set(values) <= SECTIONS:
        return values
    if all(isinstance(sink, dict) and len(sink) == 1 and set(sink) <= set(KINDS) for sink in values.values()):
        return {"sinks": values}
    return None


HUB: Final = "Endpoint=sb://x.example.org/;SharedAccessKeyName=root;SharedAccessKey=abc=;EntityPath=changes"
CONFIGURATIONS: Final = [
    (name, values) for name, text in blocks("yaml") if (values := as_configuration(text)) is not None
]


def test_the_schema_for_editors_takes_each_configuration_in_the_documents() -> None:
    schema = json.loads((ROOT / "config" / "notbefore.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    assert len(CONFIGURATIONS) >= 5
    for name, values in CONFIGURATIONS:
        assert [error.message for error in validator.iter_errors(values)] == [], name


SECRETS: Final = {"hub": HUB, "pager": "0" * 32}  # by what is in their names


def test_what_looks_like_a_configuration_is_one(tmp_path: Path) -> None:
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    for number, (name, values) in enumerate(CONFIGURATIONS):
        for route in values.get("routes", ()):  # of sinks that the block leaves out
            for sink in route["sinks"]:
                values.setdefault("sinks", {}).setdefault(sink, {"command": {"command": ["/bin/true"]}})
        text = yaml.safe_dump(values)
        for key, found in re.findall(r"((?:\w+_)?(?:file|env|credential)): (\S+)", text):
            secret = next((one for part, one in SECRETS.items() if part in found), "https://example.org/secret")
            if key.endswith("env"):
                environment[found] = "https://example.org/secret"
                continue
            (tmp_path / found.lstrip("/").replace("/", "-")).write_text(secret, encoding="utf-8")
            text = text.replace(f"{key}: {found}", f"{key}: {found.lstrip('/').replace('/', '-')}")
        path = tmp_path / f"{number} {name}"
        path.write_text(text, encoding="utf-8")
        load(path, environment, {})  # raises what is wrong, with its place


# ---- commands


def commands() -> Iterator[tuple[str, str]]:
    """Each ``notbefore ...`` that a reader may type."""
    for name, text in blocks("console"):
        for line in text.splitlines():
            for part in re.split(r"&&|\||\s#\s", re.sub(r"^\s*[$#>] ", "", line)):
                if part.strip().startswith("notbefore "):
                    yield name, part.strip()
    for path in DOCUMENTS:
        for span in re.findall(r"`(notbefore [^`\n]+)`", path.read_text(encoding="utf-8")):
            if not re.search(r"\[|\.\.\.", span):
                yield path.name, span


def test_every_command_can_be_typed() -> None:
    found = sorted(set(commands()))
    assert len(found) > 30
    for name, line in found:
        words = understood([word.rstrip(",") for word in shlex.split(line, posix=False)][1:])
        typed = words if len(words) > 1 else [*words, "--help"]  # only its name: there must be one of that name
        try:
            make_parser(words).parse_args(typed)
        except SystemExit as end:
            assert end.code == 0, f"{name}: {line}"


# ---- links and names


def test_every_link_leads_somewhere_and_every_program_that_is_named_is_there() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for target, anchor in _LINK.findall(text):
            leads = (path.parent / target).resolve() if target else path
            assert leads.exists(), f"{path.name}: {target}"
            if anchor and leads.suffix == ".md":
                assert anchor in anchors(leads), f"{path.name}: {target}#{anchor}"
        for program in re.findall(r"\b(?:benchmarks|tools)/\w+\.py\b", text):
            assert (ROOT / program).exists(), f"{path.name}: {program}"


@cache
def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_metric_that_is_named_exists() -> None:
    defined = (*vars(families).values(), *vars(fleet).values())
    known = {value.name for value in defined if isinstance(value, Metric)}
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:azure_scheduled_event|notbefore_)\w*)[`{]", path.read_text(encoding="utf-8")):
            family = re.sub(r"_(?:total|bucket|sum|count)$", "", name)
            assert family in known or name in known, f"{path.name}: {name}"


def test_the_table_of_the_house_has_every_room_and_module_and_names_only_what_is_there() -> None:
    source = ROOT / "src" / "notbefore"
    named = set(re.findall(r"`(\w+/(?:\w+/)*(?:\w+\.\w+)?)`", (ROOT / "docs" / "how-it-works.md").read_text("utf-8")))
    assert [name for name in named if not any((place / name).exists() for place in (source, ROOT))] == []
    modules = {str(path.relative_to(source)) for path in source.glob("*/*.py") if path.name != "__init__.py"}
    free = ("commands/", "fleet/")  # one for each command; docs/fleet.md has its own
    wanted = {name for name in modules if not name.startswith(free)} | {f"{name.split('/')[0]}/" for name in modules}
    assert wanted <= named, "add it to the table"
