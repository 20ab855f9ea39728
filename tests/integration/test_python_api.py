"""docs/python-api.md, run: its names exist, and its example does what it says."""

import importlib
import re
from pathlib import Path
from typing import Final

import pytest

PAGE: Final = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


def test_every_name_on_the_page_can_be_imported() -> None:
    found = 0

    for line in re.findall(r"^\| (`notbefore\.[^|]+) \|", PAGE, re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", line)
        module, _, name = first.rpartition(".")
        for one in (name, *others):
            assert hasattr(importlib.import_module(module), one), one
            found += 1

    assert found >= 8


def test_example_on_the_page_prints_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    exec(compile(example, "python-api.md", "exec"), {})  # noqa: S102 - our own page

    assert capsys.readouterr().out == "Reboot of this VM announced: at a time not given\n"
