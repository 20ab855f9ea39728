"""The rooms of the package import inward, and without cycles."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import notbefore

SOURCE = Path(next(iter(notbefore.__path__)))
AT_THE_ROOT = {"__init__", "__main__", "errors", "logs", "testing"}
# a room may import itself and the layers before its own, but no other room of its layer
LAYERS = (
    {"core"},
    {"wording"},
    {"metrics", "config"},
    {"net", "imds", "store", "simulator"},
    {"web", "otlp", "process"},
    {"courier"},
    {"agent", "fleet"},
    {"commands"},
)
IMPURE = {
    "asyncio",
    "http",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
}

RANKS: dict[str, int] = {}
for rank, rooms in enumerate(LAYERS):
    RANKS.update(dict.fromkeys(rooms, rank))


def module_names() -> list[str]:
    """Return the names of all modules, such as ``core.lifecycle``."""
    paths = [path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))]
    return [".".join(path.parts) for path in paths]


def source_of(module: str) -> str:
    return (SOURCE / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")


def imports_of(module: str) -> Iterator[str]:
    """Yield every name that a module imports, at the top or inside a function.

    Of ``from a import b`` these are both a and a.b.
    """
    for node in ast.walk(ast.parse(source_of(module))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def points_inward(importing_room: str, imported_room: str) -> bool:
    """Return whether a room may import another.

    A module outside the rooms may import all, and may be imported by all.
    """
    if importing_room not in RANKS or imported_room not in RANKS:
        return True
    if importing_room == imported_room:
        return True
    return RANKS[imported_room] < RANKS[importing_room]


def is_pure(package: str) -> bool:
    """Return whether the core may import a package."""
    if package == "msgspec":
        return True
    return package in sys.stdlib_module_names and package not in IMPURE


def test_root_has_few_modules() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == AT_THE_ROOT


def test_each_room_belongs_to_a_layer() -> None:
    directories = {path.name for path in SOURCE.iterdir() if path.is_dir()}

    assert directories - {"__pycache__"} <= RANKS.keys()


@pytest.mark.parametrize("module", module_names())
def test_module_imports_rooms_of_lower_layers(module: str) -> None:
    room = module.partition(".")[0]
    own_imports = [name.split(".") for name in imports_of(module) if name.startswith("notbefore.")]

    outward = [parts for parts in own_imports if not points_inward(room, parts[1])]

    assert outward == []


CORE = [name for name in module_names() if name.startswith("core.")]


@pytest.mark.parametrize("module", CORE)
def test_module_of_the_core_imports_nothing_impure(module: str) -> None:
    packages = {name.partition(".")[0] for name in imports_of(module)} - {"notbefore"}

    assert [package for package in packages if not is_pure(package)] == []


def test_imports_have_no_cycle() -> None:
    imports = {f"notbefore.{module}": set(imports_of(module)) for module in module_names()}
    del imports["notbefore.__init__"]
    graph = {name: (names & imports.keys()) - {name} for name, names in imports.items()}

    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.fixture(scope="module")
def modules_of_an_agent() -> list[str]:
    """The modules that a process has loaded once it has read the command ``run``."""
    program = """
import sys
import notbefore.agent.agent
from notbefore.commands.main import parsed
parsed(["run"])
print(*sorted(sys.modules))
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return process.stdout.split()


def test_agent_loads_no_command_but_its_own(modules_of_an_agent: list[str]) -> None:
    commands = [name for name in modules_of_an_agent if name.startswith("notbefore.commands.")]

    assert commands == [
        "notbefore.commands.main",
        "notbefore.commands.options",
        "notbefore.commands.run",
    ]


def test_agent_loads_nothing_for_a_page_that_is_not_opened(modules_of_an_agent: list[str]) -> None:
    of_the_page = [
        name
        for name in modules_of_an_agent
        if name.startswith("notbefore.web.page") or name == "jinja2"
    ]

    assert of_the_page == []


@pytest.mark.parametrize("module", module_names())
def test_module_does_not_tune_the_garbage_collector(module: str) -> None:
    tuning = {"set_threshold", "disable", "freeze"}
    calls: set[str] = set()
    for node in ast.walk(ast.parse(source_of(module))):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "gc":
            calls.add(node.attr)

    assert calls.isdisjoint(tuning)
