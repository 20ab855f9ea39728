"""Hostile configurations cost little, and are refused in words: by `check-config`, at the start, and by SIGHUP."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.exceptions import SecurityError

from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.core.record import Vm
from notbefore.courier.sandbox import compile_template
from notbefore.errors import ConfigError

MEMORY = 512 * 2**20  # bytes of address space that `check-config` may have
URL = "https://hooks.slack.com/services/x"


def slack(template: str) -> dict[str, Any]:
    return {"sinks": {"a": {"slack": {"url": URL, "title": template}}}}


REFUSED = {
    "brackets": slack("{{" + "(" * 2_000 + "1" + ")" * 2_000 + "}}"),
    "blocks": slack("{% if 1 %}" * 400 + "{% endif %}" * 400),
    "digits": slack("{{ 1" + "0" * 5_000 + " }}"),
    "long": slack("x" * 10_001),
    "name": {"server": {"listen": "a" * 300 + ":10169", "insecure": True}},
}
TAKEN = {
    "multiplied": "{{ 'a' * 10**9 }}",
    "centred": "{{ 'a'.center(10**9) }}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
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


def test_a_check_of_templates_computes_nothing_of_them(path: Path) -> None:
    sinks = {name: {"slack": {"url": URL, "title": template}} for name, template in TAKEN.items()}
    path.write_text(yaml.safe_dump({"sinks": sinks}), encoding="utf-8")

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    command = [sys.executable, "-m", "notbefore", "check-config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=little)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", TAKEN)
def test_no_template_makes_gigabytes(name: str) -> None:
    with pytest.raises(SecurityError, match=r"is for numbers only|unsafe"):
        compile_template(TAKEN[name], str).render()


def test_what_templates_are_for_works_as_before() -> None:
    shown = compile_template("{{ vm.name|upper }} {{ vm.name.lower() }} {{ 3 * 20 % 50 }} {{ names|join(', ') }}", str)
    assert shown.render(vm=Vm(name="Web_0"), names=["a", "b"]) == "WEB_0 web_0 10 a, b"
