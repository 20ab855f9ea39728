"""``check-config`` names each mistake of a table, and says what to do."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.commands.main import main

TABLE = Path(__file__).parents[1] / "corpus" / "wrong_configurations.yml"
CASES: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))

pytestmark = pytest.mark.usefixtures("log_as_before")


def on_one_line(case: dict[str, Any]) -> str:
    """Return the id of a case: the beginning of its configuration."""
    words = case["configuration"].split()
    return " ".join(words)[:60]


def pattern_of(message: str) -> str:
    """Return the pattern of a message; ``...`` in the table stands for any text."""
    if not message:
        return ""
    parts = [re.escape(part) for part in message.split("...")]
    return "notbefore: " + ".*".join(parts)


@pytest.mark.parametrize("case", CASES, ids=on_one_line)
def test_check_config_names_the_mistake_and_the_remedy(
    case: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text(case["configuration"].replace("HERE", str(tmp_path)), encoding="utf-8")
    path.chmod(0o600)
    (tmp_path / "data").write_text("no program", encoding="utf-8")
    for name, value in case.get("environment", {}).items():
        monkeypatch.setenv(name, value)

    exit_code = main(["check-config", str(path)])
    message = capsys.readouterr().err.strip()
    strict_exit_code = main(["check-config", "--strict", str(path)])

    message = message.replace(str(path), "FILE").replace(str(tmp_path), "HERE")
    assert re.fullmatch(pattern_of(case["message"]), message), message
    assert exit_code == case["exit_code"]
    # with ``--strict``, a warning is an error
    expected_strict_exit_code = 2 if message else 0
    assert strict_exit_code == expected_strict_exit_code
