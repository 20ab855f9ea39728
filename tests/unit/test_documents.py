"""The documents hold: references are not stale, configurations are right, commands can be typed,
links lead on.
"""

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

from notbefore.commands.main import COMMANDS, parsed
from notbefore.config.load import load
from notbefore.config.model import Config
from notbefore.config.sinks import KINDS
from notbefore.metrics import families, fleet
from notbefore.metrics.families import Metric

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SECTIONS: Final = {field.encode_name for field in msgspec.structs.fields(Config)}
PROJECT: Final[dict[str, Any]] = tomllib.loads(
    (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
VERSIONS: Final = {  # where the version stands beside pyproject.toml
    "src/notbefore/__init__.py": r'__version__ = "(.+)"',
    "config/helm/notbefore/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)",
    "config/kubernetes/fleet.yaml": r"image: notbefore:(\S+)",
    "docs/getting-started.md": r"notbefore-([\d.]+)-bundle",
    "config/fleet/cloud-init.yml": r"notbefore-([\d.]+)-bundle",
}
_FENCE: Final = re.compile(r"^[ ]*```(\w+)[^\n]*\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


TEXTS: Final = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}


def blocks(language: str) -> list[tuple[str, str]]:
    """Each block of a language, and the document that it stands in."""
    return [
        (path.name, block)
        for path, text in TEXTS.items()
        for kind, block in _FENCE.findall(text)
        if kind == language
    ]


PAGES: Final = runpy.run_path(str(ROOT / "tools" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_says_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    made = PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "it is stale: make reference"


def test_every_file_names_the_version_and_the_pythons_that_are_claimed_are_tested() -> None:
    found = {
        name: set(re.findall(way, (ROOT / name).read_text(encoding="utf-8")))
        for name, way in VERSIONS.items()
    }
    version: str = PROJECT["version"]
    assert found == {name: {version} for name in VERSIONS}
    assert f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "<" not in PROJECT["requires-python"], "newer Pythons could not even try"
    claimed = set(re.findall(r"3\.\d\d", " ".join(PROJECT["classifiers"])))
    assert claimed
    assert claimed <= set(
        re.findall(r"3\.\d\d", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    )


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """The blocks that are a configuration or a part of one: sections, or sinks by their names."""
    for name, text in blocks("yaml"):
        values = yaml.safe_load(text)
        if isinstance(values, dict) and set(values) <= SECTIONS:
            yield name, values
        elif isinstance(values, dict) and all(
            isinstance(one, dict) and set(one) <= set(KINDS) for one in values.values()
        ):
            yield name, {"sinks": values}


def test_what_looks_like_a_configuration_is_one_and_the_schema_for_editors_takes_it(
    tmp_path: Path,
) -> None:
    schema = json.loads((ROOT / "config" / "notbefore.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    hub = "Endpoint=sb://x.example.org/;SharedAccessKeyName=root;SharedAccessKey=abc=;EntityPath=changes"
    secrets = {"hub": hub, "pager": "0" * 32}  # by what is in their names
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    found = list(configurations())
    assert len(found) >= 5
    for number, (name, values) in enumerate(found):
        assert [error.message for error in validator.iter_errors(values)] == [], name
        for route in values.get("routes", ()):  # of sinks that the block leaves out
            for sink in route["sinks"]:
                values.setdefault("sinks", {}).setdefault(
                    sink, {"command": {"command": ["/bin/true"]}}
                )
        text = yaml.safe_dump(values)
        for key, place in re.findall(r"((?:\w+_)?(?:file|env|credential)): (\S+)", text):
            if key.endswith("env"):
                environment[place] = "https://example.org/secret"
                continue
            file = tmp_path / place.lstrip("/").replace("/", "-")
            secret = next(
                (one for part, one in secrets.items() if part in place),
                "https://example.org/secret",
            )
            file.write_text(secret, encoding="utf-8")
            text = text.replace(f"{key}: {place}", f"{key}: {file.name}")
        path = tmp_path / f"{number} {name}"
        path.write_text(text, encoding="utf-8")
        load(path, environment, {})  # raises what is wrong, with its place


def commands() -> Iterator[tuple[str, str]]:
    """Each ``notbefore ...`` that a reader may type."""
    for name, text in blocks("console"):
        for line in text.splitlines():
            for part in re.split(r"&&|\||\s#\s", re.sub(r"^\s*[$#>] ", "", line)):
                if part.strip().startswith("notbefore "):
                    yield name, part.strip()
    for path, text in TEXTS.items():
        for span in re.findall(r"`(notbefore [^`\n]+)`", text):
            if not re.search(r"\[|\.\.\.", span):
                yield path.name, span


def test_every_command_can_be_typed() -> None:
    found = sorted(set(commands()))
    assert len(found) > 30
    for name, line in found:
        words = [word.rstrip(",") for word in shlex.split(line, posix=False)][1:]
        try:
            # only its name: there must be one of that name
            parsed(words if len(words) > 1 else [*words, "--help"])
        except SystemExit as end:
            assert end.code == 0, f"{name}: {line}"
    table = TEXTS[ROOT / "README.md"].partition("## The commands")[2].partition("\n## ")[0]
    assert set(re.findall(r"(?m)^\| `([\w-]+)", table)) <= {*COMMANDS, "--version"}
    assert [name for name in COMMANDS if f"`{name}" not in table] == []


def test_every_link_leads_somewhere_and_every_program_that_is_named_is_there() -> None:
    for path, text in TEXTS.items():
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
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_every_metric_that_is_named_exists() -> None:
    defined = (*vars(families).values(), *vars(fleet).values())
    known = {value.name for value in defined if isinstance(value, Metric)}
    for path, text in TEXTS.items():
        for name in re.findall(r"`((?:azure_scheduled_event|notbefore_)\w*)[`{]", text):
            family = re.sub(r"_(?:total|bucket|sum|count)$", "", name)
            assert family in known or name in known, f"{path.name}: {name}"


def test_the_table_of_the_house_has_every_room_and_module_and_names_only_what_is_there() -> None:
    source = ROOT / "src" / "notbefore"
    named = set(
        re.findall(
            r"`(\w+/(?:\w+/)*(?:\w+\.\w+)?)`",
            (ROOT / "docs" / "how-it-works.md").read_text("utf-8"),
        )
    )
    assert [
        name for name in named if not any((place / name).exists() for place in (source, ROOT))
    ] == []
    modules = {
        str(path.relative_to(source))
        for path in source.glob("*/*.py")
        if path.name != "__init__.py"
    }
    free = ("commands/", "fleet/")  # one for each command; docs/fleet.md has its own
    wanted = {name for name in modules if not name.startswith(free)} | {
        f"{name.split('/')[0]}/" for name in modules
    }
    assert wanted <= named, "add it to the table"
