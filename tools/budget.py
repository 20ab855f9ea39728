"""What the project weighs: lines, threads, locks, large classes, beside the most that there should be.

``python tools/budget.py`` prints the table; ``--rooms`` adds the lines of each room. It ends with 1 where one is over.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src" / "notbefore"
LARGE: Final = 15  # methods: a class with more does several things
MOST: Final = {
    "lines of Python in src": 18_000,
    "of them code, without comments and docstrings": 13_000,
    "threading.Thread(": 14,
    "locks and conditions": 8,
    f"classes with more than {LARGE} methods": 3,
    "methods of the largest class": 20,
    "lines of tests": 22_000,
    "lines of benchmarks and tools": 2_000,
    "lines of docs": 3_500,
}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what the project weighs, beside the most that there should be")
    parser.add_argument("--rooms", action="store_true", help="the lines of each room as well")
    rooms: bool = parser.parse_args().rooms
    found = measured()
    for name, value in found.items():
        over = value > MOST[name]
        sys.stdout.write(f"{'over' if over else 'ok':4}  {value:6,}  of {MOST[name]:6,}  {name}\n")
    if rooms:
        for place in sorted(path for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"):
            sys.stdout.write(f"      {lines(place.rglob('*.py')):6,}  {place.name}/\n")
    return int(any(value > MOST[name] for name, value in found.items()))


def measured() -> dict[str, int]:
    """Each figure of ``MOST``, in its order."""
    sources = sorted(SOURCE.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in sources]
    methods = [count for text in texts for count in methods_of_classes(text)]
    whole = "".join(texts)
    values = (
        lines(sources),
        sum(code_lines(text) for text in texts),
        len(re.findall(r"\bThread\(", whole)),
        len(re.findall(r"\b(?:RLock|Lock|Condition)\(\)", whole)),
        sum(count > LARGE for count in methods),
        max(methods),
        lines((ROOT / "tests").rglob("*.py")),
        lines([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")]),
        lines((ROOT / "docs").glob("*.md")),
    )
    return dict(zip(MOST, values, strict=True))


def lines(paths: Iterable[Path]) -> int:
    """Lines of files, together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def methods_of_classes(text: str) -> Iterator[int]:
    """Of each class of a module, how many methods it defines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)


def code_lines(text: str) -> int:
    """Lines with code: neither empty, nor a comment, nor a docstring."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(used)


if __name__ == "__main__":
    sys.exit(main())
