"""Imports point inward: the core knows nobody, the edges do not know each other."""

import ast
import sys
from pathlib import Path

import pytest

import notbefore

SOURCE = Path(next(iter(notbefore.__path__)))
EDGES = ("imds", "simulator", "fleet")
IMPURE = {
    "asyncio", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil",
    "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
LATE = ("otlp.transport", "otlp.metrics")  # modules that are imported where they are configured, and may import much
HEAVY = (  # only inside functions: nobody pays for them unasked
    "apprise", "azure", "bcrypt", "google", "grpc", "opentelemetry", "yaml",
    *(f"notbefore.{module}" for module in LATE),
)  # fmt: skip
LATE_ONLY = ("asyncio", "dataclasses", "importlib.metadata")  # megabytes that the agent does without


def imported(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.append(node.module or "")
    return names


def at_top(tree: ast.Module) -> list[str]:
    return imported(
        ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])
    )


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module (``core.lifecycle``), in words."""
    tree = ast.parse(source)
    room = module.split(".", maxsplit=1)[0]
    # a sink's module is imported on first use, in the courier alone
    late = module in LATE or (module.startswith("delivery.sinks.") and not module.endswith("__init__"))
    light = () if late else (*HEAVY, *LATE_ONLY)
    found = [f"{name} at the top" for name in at_top(tree) for heavy in light if within(name, heavy)]
    for name in imported(tree):
        if room == "core":
            allowed = name.split(".")[0] in sys.stdlib_module_names and name.split(".")[0] not in IMPURE
            if not (
                allowed or within(name, "msgspec") or within(name, "notbefore.errors") or within(name, "notbefore.core")
            ):
                found.append(f"the core imports {name}")
        elif room in EDGES and within(name, "notbefore"):
            inner = (f"notbefore.{room}", "notbefore.core", "notbefore.errors")
            if not any(within(name, package) for package in inner):
                found.append(f"the edge {room} imports {name}")
    return found


def modules() -> list[str]:
    paths = (path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py")))
    return [".".join(path.parts) for path in paths]


@pytest.mark.parametrize("module", modules())
def test_imports_point_inward(module: str) -> None:
    source = (SOURCE / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
    assert faults(module, source) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("core.x", "import socket", "the core imports socket"),
        ("core.x", "def f():\n    import time", "the core imports time"),
        ("core.x", "from notbefore.store.state import Store", "the core imports notbefore.store.state"),
        ("core.x", "import yaml as y", "the core imports yaml"),
        ("imds.x", "from notbefore.store import store", "the edge imds imports notbefore.store"),
        ("simulator.x", "import notbefore.agent.agent", "the edge simulator imports notbefore.agent.agent"),
        ("agent", "from notbefore.otlp.metrics import metrics_request", "notbefore.otlp.metrics at the top"),
        ("agent", "import apprise.plugins", "apprise.plugins at the top"),
        ("agent", "try:\n    import asyncio\nexcept ImportError: pass", "asyncio at the top"),
    ],
)
def test_the_check_finds_what_it_is_for(module: str, source: str, fault: str) -> None:
    assert fault in faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.x", "import hashlib\nfrom notbefore.core.change import Change"),
        ("imds.x", "import socket\nfrom notbefore.core.record import Vm"),
        ("agent", "def f():\n    import yaml"),
    ],
)
def test_the_check_lets_pass_what_is_right(module: str, source: str) -> None:
    assert faults(module, source) == []
