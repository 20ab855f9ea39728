"""The house: which room may import which, and that nothing goes in circles."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import notbefore

SOURCE = Path(next(iter(notbefore.__path__)))
AT_THE_ROOT = {"__init__", "__main__", "errors", "logs"}
LAYERS = (  # a room may import the layers before its own, and itself; the rooms of one layer do not know each other
    {"core"},
    {"metrics"},
    {"config", "imds", "store", "simulator"},
    {"web", "otlp", "process"},
    {"courier"},
    {"agent", "fleet"},
    {"commands"},
)
IMPURE = {
    "asyncio", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil",
    "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
# modules that are imported where they are needed, and may import much
LATE = (
    "fleet.blob_snapshots",
    "fleet.checkpoints",
    "fleet.consumer",
    "fleet.keeper",
    "fleet.instance",
    "fleet.others",
    "fleet.reader",
    "fleet.page",
    "fleet.sdk",
    "fleet.fleet_view",
    "otlp.sender",
    "otlp.signals",
    "web.exposition",
    "web.page.render",
)
HEAVY = (  # only inside functions: nobody pays for them unasked
    "apprise", "azure", "bcrypt", "google", "grpc", "jinja2", "markupsafe", "opentelemetry", "prometheus_client",
    "yaml",
    *(f"notbefore.{module}" for module in LATE),
)  # fmt: skip
LATE_ONLY = ("asyncio", "dataclasses", "importlib.metadata")  # megabytes that the agent does without


def modules() -> list[str]:
    paths = (path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py")))
    return [".".join(path.parts) for path in paths]


def source_of(module: str) -> str:
    return (SOURCE / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name that is imported, at the top or inside a function; of ``from a import b`` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_top(tree: ast.Module) -> Iterator[str]:
    nodes = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return imported(ast.Module([node for node in nodes if not for_types_alone(node)], []))


def for_types_alone(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer(room: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def room_of(name: str) -> str | None:
    """``notbefore.store.state`` -> ``store``; ``None`` for what lies at the root, or is none of ours."""
    parts = name.split(".")
    known = len(parts) > 1 and parts[0] == "notbefore" and any(parts[1] in rooms for rooms in LAYERS)
    return parts[1] if known else None


def direction_faults(module: str, tree: ast.Module) -> Iterator[str]:
    room = room_of(f"notbefore.{module}")
    if room is None:
        return
    for name in imported(tree):
        other = room_of(name)
        if other is None or other == room or layer(other) < layer(room):
            continue
        yield f"{room} imports {other}"


def purity_faults(tree: ast.Module) -> Iterator[str]:
    for name in imported(tree):
        first = name.split(".")[0]
        pure = first in sys.stdlib_module_names and first not in IMPURE
        if not pure and first not in ("notbefore", "msgspec"):
            yield f"the core imports {name}"


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module (``core.lifecycle``), in words."""
    tree = ast.parse(source)
    # a sink's module is imported on first use, in the courier alone
    late = module in LATE or (module.startswith("courier.sinks.") and not module.endswith("__init__"))
    light = () if late else (*HEAVY, *LATE_ONLY)
    found = [f"{name} at the top" for name in at_top(tree) for heavy in light if within(name, heavy)]
    found += direction_faults(module, tree)
    if module.startswith("core."):
        found += purity_faults(tree)
    return found


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other, imports inside functions included; empty where there are none."""
    known = {f"notbefore.{module}": module for module in sources}
    graph = {
        module: {known[name] for name in imported(ast.parse(source)) if name in known} - {module}
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_nothing_else_lies_at_the_root() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == AT_THE_ROOT
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set().union(*LAYERS)


def test_imports_point_inward() -> None:
    assert {module: found for module in modules() if (found := faults(module, source_of(module)))} == {}


def test_no_import_goes_in_a_circle() -> None:
    assert circle({module: source_of(module) for module in modules() if module != "__init__"}) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("core.x", "import socket", "the core imports socket"),
        ("core.x", "from notbefore.metrics.totals import Totals", "core imports metrics"),
        ("imds.x", "from notbefore.store import state", "imds imports store"),
        ("config.x", "def f():\n    from notbefore.web.access import Access", "config imports web"),
        ("fleet.x", "from notbefore.agent.view import AgentView", "fleet imports agent"),
        ("agent.x", "from notbefore.otlp.signals import metrics_data", "notbefore.otlp.signals at the top"),
        ("agent.x", "import apprise.plugins", "apprise.plugins at the top"),
        ("agent.x", "try:\n    import asyncio\nexcept ImportError: pass", "asyncio at the top"),
    ],
)
def test_the_check_finds_what_it_is_for(module: str, source: str, fault: str) -> None:
    assert fault in faults(module, source)


def test_the_check_lets_pass_what_is_right() -> None:
    assert faults("core.x", "import hashlib\nfrom notbefore.core.change import Change") == []
    assert faults("agent.x", "import socket\ndef f():\n    import yaml\n    from notbefore.core.record import Vm") == []


def test_an_agent_loads_no_command_but_its_own() -> None:
    code = (
        "import sys; from notbefore.commands.main import make_parser; make_parser(['run'])\n"
        "print(*sorted(name for name in sys.modules if name.startswith('notbefore.commands.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == [f"notbefore.commands.{name}" for name in ("main", "options", "run")]


def test_a_circle_is_found_also_through_a_function() -> None:
    sources = {
        "web.a": "from notbefore.web import b",
        "web.b": "import notbefore.web.c",
        "web.c": "def f():\n    from notbefore.web.a import A",
    }
    assert set(circle(sources)) == {"web.a", "web.b", "web.c"}
    assert circle(sources | {"web.c": ""}) == []
