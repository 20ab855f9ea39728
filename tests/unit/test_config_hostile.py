"""Hostile configurations cost little, and are refused in words: by `check-config`, at the start, and by SIGHUP."""

from pathlib import Path

import pytest
import yaml

from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.errors import ConfigError

REFUSED = {
    "long": {"routes": [{"match": {"event_type": "x" * 300}}], "messages": {"advice": {"Reboot": "x" * 2_001}}},
    "name": {"server": {"listen": "a" * 300 + ":10169", "insecure": True}},
}
RAW = {
    "a list as a key": "? [a, b]\n: c\n",
    "a NUL byte in a path": 'fleet: {hub: {namespace: n, hub: h}, inventory_file: "a\\0b"}\n',
    "a NUL byte in a file": 'server: {web_config_file: "x\\0y"}\n',
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "notbefore.yml"
    path.touch(mode=0o600)
    return path


@pytest.mark.usefixtures("log_as_before")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_deep_or_too_large_is_refused_in_words(
    name: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(yaml.safe_dump(REFUSED[name]), encoding="utf-8")
    assert main(["check-config", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"notbefore: {path}:")


@pytest.mark.parametrize("name", RAW)
def test_what_no_key_and_no_path_can_be_is_refused_in_words(name: str, path: Path) -> None:
    path.write_text(RAW[name], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    assert str(caught.value).startswith(f"{path}:1:")
