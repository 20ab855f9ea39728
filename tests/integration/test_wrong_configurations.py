"""What people write wrongly, and what ``check-config`` says to it: the table in
``corpus/wrong_configurations.yml``.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.commands.main import main

TABLE = Path(__file__).parents[1] / "corpus" / "wrong_configurations.yml"
CASES: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))


pytestmark = pytest.mark.usefixtures("log_as_before")


@pytest.mark.parametrize("case", CASES, ids=[f"line-{number}" for number, _ in enumerate(CASES)])
def test_it_is_said_what_is_wrong_and_what_to_do(
    case: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text(case["given"].replace("HERE", str(tmp_path)), encoding="utf-8")
    path.chmod(0o600)
    (tmp_path / "data").write_text("no program", encoding="utf-8")
    for name, value in case.get("set", {}).items():
        monkeypatch.setenv(name, value)
    code = main(["check-config", str(path)])
    said = capsys.readouterr().err.strip().replace(str(path), "FILE").replace(str(tmp_path), "HERE")
    expected = ".*".join(map(re.escape, case["says"].split("...")))
    assert re.fullmatch(f"notbefore: {expected}" if expected else "", said), said
    assert code == case["exit"]
    if code == 0 and said:
        assert main(["check-config", "--strict", str(path)]) == 2, (
            "a warning is an error where that is asked for"
        )
