"""The documents are true: generated pages, configurations, commands, links and names."""

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
TEXTS: Final = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
PYPROJECT: Final = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT: Final[dict[str, Any]] = tomllib.loads(PYPROJECT)["project"]
# the files that name the version, besides pyproject.toml, and how
VERSIONS: Final = {
    "src/notbefore/__init__.py": r'__version__ = "(.+)"',
    "config/helm/notbefore/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)",
    "config/kubernetes/fleet.yaml": r"image: notbefore:(\S+)",
    "docs/getting-started.md": r"notbefore-([\d.]+)-bundle",
    "config/fleet/cloud-init.yml": r"notbefore-([\d.]+)-bundle",
}
FENCE: Final = re.compile(r"^[ ]*```(\w+)[^\n]*\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
PYTHON_VERSION: Final = re.compile(r"3\.\d\d")


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def document_name(path: Path) -> str:
    return path.name


each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=document_name)


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the name of the document and the text of each block of a language."""
    named_blocks = []
    for path, text in TEXTS.items():
        for block_language, block in FENCE.findall(text):
            if block_language == language:
                named_blocks.append((path.name, block))
    return named_blocks


# ---- generated pages

PAGES: Final = runpy.run_path(str(ROOT / "tools" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)

    page = PAGES[name]()

    assert read(f"docs/{name}") == page, "it is stale: make reference"


# ---- versions


@pytest.mark.parametrize(("name", "pattern"), VERSIONS.items(), ids=VERSIONS.keys())
def test_file_names_the_version(name: str, pattern: str) -> None:
    assert set(re.findall(pattern, read(name))) == {PROJECT["version"]}


def test_changelog_has_the_version() -> None:
    version: str = PROJECT["version"]

    assert f"\n## {version} - " in read("CHANGELOG.md")


def test_newer_versions_of_python_are_allowed() -> None:
    assert "<" not in PROJECT["requires-python"]


def test_claimed_versions_of_python_are_tested() -> None:
    claimed = set(PYTHON_VERSION.findall(" ".join(PROJECT["classifiers"])))
    tested = set(PYTHON_VERSION.findall(read(".github/workflows/ci.yml")))

    assert claimed
    assert claimed <= tested


# ---- configurations


def defines_sinks(values: dict[str, Any]) -> bool:
    """Return whether a block defines sinks by their names, without the section ``sinks``."""
    return all(isinstance(sink, dict) and set(sink) <= set(KINDS) for sink in values.values())


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each block that is a configuration, a section of one, or some sinks."""
    for name, text in blocks("yaml"):
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            continue
        if set(values) <= SECTIONS:
            yield name, values
        elif defines_sinks(values):
            yield name, {"sinks": values}


CONFIGURATIONS: Final = list(configurations())
each_configuration = pytest.mark.parametrize(
    "values",
    [pytest.param(values, id=name) for name, values in CONFIGURATIONS],
)
HUB_SECRET: Final = (
    "Endpoint=sb://x.example.org/;SharedAccessKeyName=root;SharedAccessKey=abc=;EntityPath=changes"
)
URL_SECRET: Final = "https://example.org/secret"


def secret_for(place: str) -> str:
    """Return a secret of the kind that the name of its file suggests."""
    if "hub" in place:
        return HUB_SECRET
    if "pager" in place:
        return "0" * 32
    if "slack-token" in place:
        return "xoxb-1-2-abc"
    return URL_SECRET


# the variables of a pod of the chart
IN_A_POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "NODE_NAME": "aks-pool-12345-vmss00000c",
}


def with_missing_sinks(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the sinks that its routes name and the document leaves out."""
    sinks = dict(values.get("sinks", {}))
    for route in values.get("routes", ()):
        for sink in route["sinks"]:
            sinks.setdefault(sink, {"command": {"command": ["/bin/true"]}})
    if not sinks:
        return values
    return {**values, "sinks": sinks}


def test_documents_have_configurations() -> None:
    assert len(CONFIGURATIONS) >= 5


@each_configuration
def test_configuration_is_accepted_by_the_schema_for_editors(values: dict[str, Any]) -> None:
    schema = json.loads(read("config/notbefore.schema.json"))

    errors = jsonschema.Draft7Validator(schema).iter_errors(values)

    assert [error.message for error in errors] == []


def install_plugin(name: str, place: Path) -> None:
    """Write the metadata of an installed package that has this sink."""
    package = place / f"{name}-1.0.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Name: {name}\nVersion: 1.0.0\n", encoding="utf-8")
    (package / "entry_points.txt").write_text(
        f"[notbefore.sinks]\n{name} = {name}:Sink\n", encoding="utf-8"
    )


@each_configuration
def test_configuration_is_loaded(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("gotify", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path), **IN_A_POD}
    text = yaml.safe_dump(with_missing_sinks(values))
    for key, place in re.findall(r"((?:\w+_)?(?:file|env|credential)): (\S+)", text):
        if key.endswith("env"):
            environment[place] = URL_SECRET
            continue
        file = tmp_path / place.lstrip("/").replace("/", "-")
        file.write_text(secret_for(place), encoding="utf-8")
        text = text.replace(f"{key}: {place}", f"{key}: {file.name}")
    path = tmp_path / "configuration.yaml"
    path.write_text(text, encoding="utf-8")

    load(path, environment, {})  # raises each mistake with its place


# ---- commands


def commands() -> Iterator[tuple[str, str]]:
    """Yield the document and the text of each ``notbefore ...`` that a reader may type."""
    for name, text in blocks("console"):
        for line in text.splitlines():
            without_prompt = re.sub(r"^\s*[$#>] ", "", line)
            for part in re.split(r"&&|\||\s#\s", without_prompt):
                if part.strip().startswith("notbefore "):
                    yield name, part.strip()
    for path, text in TEXTS.items():
        for span in re.findall(r"`(notbefore [^`\n]+)`", text):
            if not re.search(r"\[|\.\.\.", span):
                yield path.name, span


COMMAND_LINES: Final = sorted(set(commands()))


def test_documents_have_commands() -> None:
    assert len(COMMAND_LINES) > 30


@pytest.mark.parametrize(("name", "line"), COMMAND_LINES)
def test_command_can_be_typed(name: str, line: str) -> None:
    words = [word.rstrip(",") for word in shlex.split(line, posix=False)][1:]
    if len(words) == 1:  # only the name of a command, which must exist
        words.append("--help")

    try:
        parsed(words)
    except SystemExit as end:
        assert end.code == 0, f"{name}: {line}"


@pytest.mark.parametrize(
    "words",
    ["Azure delays restarts", "up to 15 minutes", "`automaticallyApprove`", "terminate notif"],
)
def test_installation_says_what_polling_changes(words: str) -> None:
    assert words in read("docs/getting-started.md")


def test_readme_has_a_table_of_all_commands() -> None:
    table = read("README.md").partition("## The commands")[2].partition("\n## ")[0]

    listed = set(re.findall(r"(?m)^\| `([\w-]+)", table))

    assert listed <= {*COMMANDS, "--version"}
    assert [name for name in COMMANDS if f"`{name}" not in table] == []


# ---- links and names


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    letters = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.strip().replace(" ", "-") for text in letters}


@each_document
def test_links_have_targets(path: Path) -> None:
    for target, anchor in LINK.findall(TEXTS[path]):
        linked = path
        if target:
            linked = (path.parent / target).resolve()

        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{target}#{anchor}"


@each_document
def test_programs_exist(path: Path) -> None:
    programs = re.findall(r"\b(?:benchmarks|tools)/\w+\.py\b", TEXTS[path])

    assert [program for program in programs if not (ROOT / program).exists()] == []


METRIC_NAMES: Final = {
    value.name
    for value in (*vars(families).values(), *vars(fleet).values())
    if isinstance(value, Metric)
}


@each_document
def test_metrics_exist(path: Path) -> None:
    for name in re.findall(r"`((?:azure_scheduled_event|notbefore_)\w*)[`{]", TEXTS[path]):
        family = re.sub(r"_(?:total|bucket|sum|count)$", "", name)
        assert family in METRIC_NAMES or name in METRIC_NAMES, name


# ---- the table of modules

SOURCE: Final = ROOT / "src" / "notbefore"


def places_in_table() -> set[str]:
    return set(re.findall(r"`(\w+/(?:\w+/)*(?:\w+\.\w+)?)`", read("docs/how-it-works.md")))


def test_table_of_modules_names_existing_files() -> None:
    missing = [
        name
        for name in places_in_table()
        if not (SOURCE / name).exists() and not (ROOT / name).exists()
    ]

    assert missing == []


def rows_of_changes() -> dict[str, str]:
    """Return the table "Where would I change X?": X -> where."""
    section = read("docs/how-it-works.md").partition("## Where would I change X?")[2]
    table = section.partition("\n## ")[0]
    return dict(re.findall(r"(?m)^\| ([^*|]+) \| (.+) \|$", table))


def test_table_of_changes_names_existing_files_and_names() -> None:
    rows = rows_of_changes()
    assert len(rows) > 50

    for subject, place in rows.items():
        words = re.findall("`([^`]+)`", place)
        files = [word for word in words if "/" in word or word.endswith(".py")]
        names = [word.rpartition(".")[2] for word in words if word not in files]
        code = ""
        for file in files:
            path = ROOT / "src/notbefore" / file
            if not path.exists():
                path = ROOT / file
            assert path.exists(), f"{subject}: {file}"
            if path.is_file():
                code += path.read_text(encoding="utf-8")
        missing = [name for name in names if name not in code]
        assert missing == [], subject


def test_table_of_modules_is_complete() -> None:
    paths = [path for path in SOURCE.glob("*/*.py") if path.name != "__init__.py"]
    modules = {path.relative_to(SOURCE).as_posix() for path in paths}
    rooms = {f"{path.parent.name}/" for path in paths}
    # commands/ has a module for each command, and docs/fleet.md has a table of fleet/
    listed_modules = {name for name in modules if not name.startswith(("commands/", "fleet/"))}

    assert rooms | listed_modules <= places_in_table(), "add it to the table"
