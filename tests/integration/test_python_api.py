"""The page docs/python-api.md: its names exist, and its example prints what the page says."""

import importlib
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from support.agent import run

PAGE: Final = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


def names_on_the_page() -> list[tuple[str, str]]:
    """Return the modules and names in the rows of the table; a row names its module once."""
    names: list[tuple[str, str]] = []
    for row in re.findall(r"^\| (`notbefore\.[^|]+) \|", PAGE, re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", row)
        module, _, first_name = first.rpartition(".")
        for name in (first_name, *others):
            names.append((module, name))
    return names


def test_page_has_a_table_of_names() -> None:
    assert len(names_on_the_page()) >= 8


@pytest.mark.parametrize(("module", "name"), names_on_the_page())
def test_name_on_the_page_can_be_imported(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_example_on_the_page_prints_a_change(tmp_path: Path) -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")

    result = run(sys.executable, script)

    assert result.stderr == ""
    assert result.stdout == "Reboot of this VM announced: at a time not given\n"
