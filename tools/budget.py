"""What the project weighs: lines, threads, locks, large classes, beside the most that there should be.

``python tools/budget.py`` prints the table, and the lines of each room. It ends with 1 where one is over.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
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
    found = dict(zip(MOST, measured(), strict=True))
    for name, value in found.items():
        print(f"{'over' if value > MOST[name] else 'ok':4}  {value:6,}  of {MOST[name]:6,}  {name}")
    for place in sorted(SOURCE.glob("[a-z]*/")):
        print(f"      {lines(place.rglob('*.py')):6,}  {place.name}/")
    return int(any(value > MOST[name] for name, value in found.items()))


def measured() -> tuple[int, ...]:
    """Each figure of ``MOST``, in its order."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    whole = "".join(texts)
    classes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    methods = [sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body) for node in classes]
    return (
        whole.count("\n"),
        sum(code_lines(text) for text in texts),
        len(re.findall(r"\bThread\(", whole)),
        len(re.findall(r"\b(?:RLock|Lock|Condition)\(\)", whole)),
        sum(count > LARGE for count in methods),
        max(methods),
        lines((ROOT / "tests").rglob("*.py")),
        lines([*(ROOT / "benchmarks").glob("*.*"), *(ROOT / "tools").glob("*.*")]),
        lines((ROOT / "docs").glob("*.md")),
    )


def lines(paths: Iterable[Path]) -> int:
    """Lines of files, together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


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
