"""``check-config --json``."""

import json
from pathlib import Path

from support.agent import notbefore


def test_an_error_is_json_as_well(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yaml"
    path.write_text("imdz: {}", encoding="utf-8")
    done = notbefore("check-config", str(path), "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"], done.stderr) == (2, False, "")
    assert said["error"].startswith(f"{path}:1:1: imdz: there is no such key here")
    path.write_text("log: {level: debug}", encoding="utf-8")
    said = json.loads(notbefore("check-config", str(path), "--json").stdout)
    assert (said["ok"], said["config"]["log"]["level"]) == (True, "debug")
