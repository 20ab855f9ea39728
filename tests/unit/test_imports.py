"""The house: which room may import which, and that nothing goes in circles."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import notbefore

SOURCE = Path(next(iter(notbefore.__path__)))
AT_THE_ROOT = {"__init__", "__main__", "errors", "logs"}
# a room may import the layers before its own, and itself; the rooms of one layer do not know each
# other
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

RANKS = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> list[str]:
    paths = (path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py")))
    return [".".join(path.parts) for path in paths]


def source_of(module: str) -> str:
    return (SOURCE / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name that is imported, at the top or inside a function.

    Of ``from a import b`` both a and a.b.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(module: str, source: str) -> Iterator[str]:
    """What is wrong with the imports of a module (``core.lifecycle``), in words.

    Ruff knows what is too heavy.
    """
    room = module.partition(".")[0]
    for name in imported(ast.parse(source)):
        first, other = (*name.split("."), "")[:2]
        if first == "notbefore":
            if room in RANKS and other in RANKS and other != room and RANKS[other] >= RANKS[room]:
                yield f"{room} imports {other}"
        elif (
            room == "core"
            and first != "msgspec"
            and (first not in sys.stdlib_module_names or first in IMPURE)
        ):
            yield f"the core imports {name}"


def test_nothing_else_lies_at_the_root() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == AT_THE_ROOT
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set().union(*LAYERS)


def test_imports_point_inward() -> None:
    assert {
        module: found for module in modules() if (found := list(faults(module, source_of(module))))
    } == {}


def test_no_import_goes_in_a_circle_those_inside_functions_included() -> None:
    found = {
        f"notbefore.{module}": set(imported(ast.parse(source_of(module)))) for module in modules()
    }
    del found["notbefore.__init__"]
    TopologicalSorter(
        {name: (names & found.keys()) - {name} for name, names in found.items()}
    ).prepare()


def test_an_agent_loads_no_command_but_its_own_and_nothing_for_a_page_that_nobody_opens() -> None:
    code = (
        "import sys, notbefore.agent.agent; from notbefore.commands.main import parsed;"
        " parsed(['run'])\nothers = ('notbefore.commands.', 'notbefore.web.page',"
        " 'jinja2')\nprint(*sorted(name for name in sys.modules if name.startswith(others)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == [f"notbefore.commands.{name}" for name in ("main", "options", "run")]
