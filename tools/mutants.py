"""How many small faults in a module do its tests find? Each is made in a copy of `src`, and the tests are run on it.

    tools/mutants.py core/approval                        the module's own tests, as named in TESTS below
    tools/mutants.py agent/tracker --sample 40            40 mutants, chosen at random (with one --seed, the same ones)
    tools/mutants.py store/lock --tests tests/unit/test_store.py tests/integration/test_store.py

Put the fast tests first: a mutant ends with the first test that fails. The survivors are printed, then how many were
killed. A mutant on which the tests do not end in time is counted as killed.

Why not a library: mutmut 3 leaves out dataclasses and the body of a module, where our values and tables are; cosmic-ray
writes into the source itself, one mutant at a time, and takes `X | None` in a type hint for a calculation.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

ROOT: Final = Path(__file__).parent.parent
TESTS: Final = {
    "core/lifecycle": ["tests/unit/test_lifecycle.py"],
    "core/tracked": ["tests/unit/test_lifecycle.py"],
    "core/approval": ["tests/unit/test_approval.py"],
    "store/outbox": [f"tests/integration/test_{name}.py" for name in ("outbox", "spare", "outbox_command")],
    "store/outbox_intake": ["tests/integration/test_outbox.py"],
    "store/outbox_reader": ["tests/integration/test_outbox.py", "tests/integration/test_outbox_command.py"],
    "store/outbox_fallback": ["tests/integration/test_outbox.py"],
    "store/agent_outbox": ["tests/integration/test_agent_outbox.py"],
    "agent/tracker": ["tests/integration/test_tracker.py"],
    "agent/state": ["tests/integration/test_tracker.py"],
    "agent/approval_log": ["tests/integration/test_tracker.py", "tests/integration/test_approver.py"],
    "process/clock": ["tests/integration/test_tracker.py", "tests/integration/test_freeze.py"],
    "agent/freeze": ["tests/integration/test_freeze.py"],
    "agent/approver": ["tests/integration/test_approver.py"],
    "courier/supervisor": ["tests/integration/test_supervisor.py"],
}
# of functions and classes: what says nothing about their behaviour, or says it to Python alone
SKIPPED_FIELDS: Final = {
    "annotation",
    "returns",
    "decorator_list",
    "keywords",
    "type_params",
}  # of functions and classes
COMPARISONS: Final[dict[type[ast.cmpop], list[type[ast.cmpop]]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: where it is, what it changes, and the text of the whole module with it."""

    module: str
    line: int
    change: str
    source: str


def expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Return what may stand instead of an expression."""
    match node:
        case ast.Compare(left, [op, *others], comparators):
            for other in COMPARISONS[type(op)]:
                yield ast.Compare(left, [other(), *others], comparators)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield from (ast.BoolOp(op, [v for v in values if v is not left_out]) for left_out in values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Name(name) if name in FUNCTIONS:
            yield ast.Name(FUNCTIONS[name], node.ctx)
        case ast.Constant(value):
            yield from map(ast.Constant, constants(value))
        case _:
            pass


def constants(value: object) -> Iterator[bool | float | str]:
    """Return what may stand instead of a constant."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str) and " " not in value:  # a word is data; a sentence is for people
        yield value + "?"


def statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """Return what may stand instead of a statement."""
    match node:
        case ast.If(test, body, orelse) if not isinstance(test, ast.Compare):  # a comparison is itself turned round
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and not value.value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case _:
            pass


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Return what may stand instead of a node."""
    if isinstance(node, ast.expr):
        yield from expressions(node)
    elif isinstance(node, ast.stmt):
        yield from statements(node)


def places(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], object]]]:
    """Return every node below `node`, each with the function that puts another in its place."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return  # the text of a message; a docstring
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS and isinstance(node, ast.arg | ast.AnnAssign | ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(value, ast.AST):
            yield value, partial(setattr, node, field)
            yield from places(value)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield item, partial(value.__setitem__, index)
                    yield from places(item)


def mutants(module: str) -> Iterator[Mutant]:
    """Make every mutant of a module: one node is changed, the text is taken, and the node is put back."""
    text = (ROOT / "src/notbefore" / f"{module}.py").read_text()
    tree, lines = ast.parse(text), text.splitlines()
    for node, put in places(tree):
        for other in replacements(node):
            put(other)
            line: int = node.lineno  # type: ignore[attr-defined]  # what is replaced is an expression or a statement
            change = f"{first_line(node)}  ->  {first_line(other)}    in: {lines[line - 1].strip()}"
            yield Mutant(module, line, change, ast.unparse(ast.fix_missing_locations(tree)))
            put(node)


def first_line(node: ast.AST) -> str:
    """Return the first line of a piece of code."""
    return ast.unparse(node).splitlines()[0][:100]


class Bench:
    """A copy of `src`, and the tests that are run on it."""

    def __init__(self, directory: Path, tests: list[str]) -> None:
        self._tests, self._src, self._scratch = tests, directory / "src", directory / "t"
        shutil.copytree(ROOT / "src", self._src, ignore=shutil.ignore_patterns("__pycache__"))
        # no bytecode: two mutants of one size within one second would pass for each other
        self._environment = os.environ | {
            "PYTHONPATH": str(self._src),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(directory / "hypothesis"),
        }

    def fails(self, limit: float) -> bool | None:
        """Run the tests: did one fail? None: they did not end within `limit` seconds."""
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(self._scratch)]
        with subprocess.Popen(
            [*words, *self._tests], cwd=ROOT, env=self._environment, start_new_session=True, stdout=subprocess.DEVNULL
        ) as tests:
            try:
                return tests.wait(limit) != 0
            except subprocess.TimeoutExpired:
                os.killpg(tests.pid, signal.SIGKILL)
                return None

    def try_out(self, mutant: Mutant, limit: float) -> bool | None:
        """Run the tests on a mutant; the copy is whole again afterwards."""
        path = self._src / "notbefore" / f"{mutant.module}.py"
        original = path.read_text()
        path.write_text(mutant.source)
        try:
            return self.fails(limit)
        finally:
            path.write_text(original)


def measure(module: str, tests: list[str], sample: int | None, seed: int, parallel: int) -> bool:
    """Try all mutants of a module (or a sample), print what came of them; False if the tests fail without any."""
    chosen = list(mutants(module))
    if sample is not None and sample < len(chosen):
        chosen = sorted(random.Random(seed).sample(chosen, sample), key=lambda mutant: mutant.line)  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="m") as directory:
        free: SimpleQueue[Bench] = SimpleQueue()
        benches = [Bench(Path(directory, str(number)), tests) for number in range(parallel)]
        began = time.monotonic()
        if benches[0].fails(600) is not False:
            print(f"{module}: the tests fail without any mutant: {' '.join(tests)}")
            return False
        limit = 10 + 5 * parallel * (time.monotonic() - began)
        for bench in benches:
            free.put(bench)

        def run(mutant: Mutant) -> bool | None:
            bench = free.get()
            try:
                return bench.try_out(mutant, limit)
            finally:
                free.put(bench)

        results: Counter[bool | None] = Counter()
        with ThreadPoolExecutor(parallel) as pool:
            for mutant, failed in zip(chosen, pool.map(run, chosen), strict=True):
                results[failed] += 1
                if failed is False:
                    print(f"src/notbefore/{module}.py:{mutant.line}: survived: {mutant.change}", flush=True)
    killed = results[True] + results[None]
    print(
        f"{module}: {killed} of {len(chosen)} mutants killed ({killed / max(1, len(chosen)):.0%}), "
        f"{results[False]} survived, {results[None]} of the killed ran out of time",
        flush=True,
    )
    return True


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[], metavar="MODULE", help=f"default: {' '.join(TESTS)}")
    parser.add_argument("--tests", nargs="+", help="what pytest is given; default: the module's own in TESTS")
    parser.add_argument("--sample", type=int, help="try so many mutants of each module, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2)
    given = parser.parse_args()
    modules = [module.removeprefix("src/notbefore/").removesuffix(".py") for module in given.modules] or list(TESTS)
    for module in modules:
        if module not in TESTS and not given.tests:
            parser.error(f"{module} has no tests in TESTS: name them with --tests")
    results = [measure(m, given.tests or TESTS[m], given.sample, given.seed, given.parallel) for m in modules]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
