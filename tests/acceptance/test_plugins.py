"""An agent uses sinks of other packages, such as the example of docs/python-api.md."""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore, run, write_config
from support.azure import listed
from support.peers import Answer, HttpPeer

PAGE: Final = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")
EXAMPLE: Final = PAGE[PAGE.index("## A sink of your own") :]
MODULE, CONTRACT = re.findall(r"```python\n(.*?)```", EXAMPLE, re.DOTALL)
PROJECT: Final[str] = re.findall(r"```toml\n(.*?)```", EXAMPLE, re.DOTALL)[0]
(CONFIGURATION,) = re.findall(r"```yaml\n(.*?)```", EXAMPLE, re.DOTALL)

BROKEN: Final = """
import os
import time

from msgspec import Struct

from notbefore.courier.sink import Receipt, Sink
from notbefore.errors import SendError


class Settings(Struct):
    how: str = ""


class Broken(Sink):
    Settings = Settings

    def __init__(self, name, settings, messages):
        self.how = settings.how
        if self.how == "unmade":
            raise RuntimeError("a bug")

    def send(self, message):
        print("this is no record")
        if self.how == "crash":
            os._exit(3)
        if self.how == "exit":
            raise SystemExit(3)
        return Receipt()
"""


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """A directory into which the wheels of two packages with sinks are installed."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for module, text, project in (
            ("notbefore_gotify", MODULE, PROJECT),
            ("notbefore_broken", BROKEN, broken_project()),
            ("notbefore_unimportable", "import not_installed\n", unimportable_project()),
        ):
            source = place / module
            source.mkdir()
            (source / f"{module}.py").write_text(text, encoding="utf-8")
            (source / "pyproject.toml").write_text(project, encoding="utf-8")
            build = ("-m", "hatchling", "build", "-t", "wheel", "-d", place / "dist")
            succeeded("env", "-C", source, sys.executable, *build)
        words = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target")
        succeeded(sys.executable, *words, place / "site", *(place / "dist").glob("*.whl"))
        yield place / "site"


def broken_project() -> str:
    return PROJECT.replace("gotify", "broken").replace("Gotify", "Broken")


def unimportable_project() -> str:
    return PROJECT.replace("gotify", "unimportable").replace("Gotify", "Sink")


def succeeded(*command: object) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return packages


def plugin(name: str, **settings: Any) -> dict[str, Any]:
    return {"plugin": {"name": name, "settings": settings}}


def test_sink_of_another_package_gets_a_real_agents_messages(
    imds: Simulator, hook: HttpPeer, tmp_path: Path, installed: Path
) -> None:
    assert installed.is_dir()
    (tmp_path / "gotify-token").write_text("t0ken\n", encoding="utf-8")
    values = yaml.safe_load(CONFIGURATION)
    values["sinks"]["phone"]["plugin"]["settings"]["url"] = hook.url
    values["messages"] = {"title": "Mind: {{ title }}"}

    with RunningAgent(imds.endpoint, tmp_path / "state", values) as agent:
        imds.set_document(listed("e"))
        eventually(lambda: agent.count("delivered", "phone") == 1)
        loaded = Path(f"/proc/{agent.process.pid}/maps").read_text(encoding="utf-8")

    (request,) = hook.requests
    assert request.path == "/message"
    assert request.headers["x-gotify-key"] == "t0ken"
    assert json.loads(request.body)["title"].startswith("Mind: Freeze of WestNO_0 in ")
    assert "gotify" not in loaded


def test_failing_sinks_do_not_hurt_the_agent_and_the_others(
    imds: Simulator, hook: HttpPeer, tmp_path: Path, installed: Path
) -> None:
    assert installed.is_dir()
    hook_sink = {"webhook": {"url": hook.url, "allow_private": True}}
    values = {
        "sinks": {
            "hook": hook_sink,
            "missing": plugin("unimportable"),
            "printing": plugin("broken"),
        }
    }

    with RunningAgent(imds.endpoint, tmp_path / "state", values) as agent:
        imds.set_document(listed("e"))
        eventually(lambda: agent.count("delivered") == 1)
        eventually(lambda: agent.count("delivered", "printing") == 1)
        eventually(lambda: "cannot be imported: ModuleNotFoundError" in agent.log)
        agent.wait_until_ready()
        assert agent.kinds == ["announced"], "`print` does not write among the records"

    assert "this is no record" in agent.log
    assert agent.process.returncode == 0


class SlowPeer(HttpPeer):
    """Answers after a second: a courier that crashes in an attempt does not live that long."""

    def answer(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        time.sleep(1.0)
        super().answer(handler, answer)


def test_sink_that_crashes_the_courier_hurts_no_slow_receiver(
    imds: Simulator, tmp_path: Path, installed: Path
) -> None:
    assert installed.is_dir()
    crashes = 'notbefore_courier_starts_total{reason="crashed"}'
    with SlowPeer() as slow:
        values = {
            "sinks": {
                "crashing": plugin("broken", how="crash"),
                "hook": {"webhook": {"url": slow.url, "allow_private": True}},
                "zulip": {"webhook": {"url": slow.url, "allow_private": True}},
            }
        }

        with RunningAgent(imds.endpoint, tmp_path / "state", values) as agent:
            imds.set_document(listed("e"))
            eventually(lambda: (agent.metric(crashes) or 0) >= 2)
            for sink in ("hook", "zulip"):
                eventually(lambda: agent.count("delivered", sink) == 1)
            agent.wait_until_ready()

    assert agent.process.returncode == 0


@pytest.mark.parametrize(
    ("sink", "mistake"),
    [
        (plugin("unimportable"), "the sink unimportable cannot be imported: ModuleNotFoundError"),
        (
            plugin("broken", how="unmade"),
            "report it to the author of its package: it cannot be made: RuntimeError: a bug",
        ),
        (plugin("nobody"), "no installed package has a sink 'nobody' (installed: broken, gotify"),
        (plugin("gotify", url="x"), "settings: the key `token` is missing"),
        (plugin("gotify", url="x", token="t", tokn="t"), "settings.tokn: there is no such key"),
        (
            plugin("gotify", url="x", token_file="away"),
            "settings.token_file: the secret's file is missing",
        ),
    ],
)
def test_check_config_names_what_is_wrong_with_a_plugin(
    tmp_path: Path, installed: Path, sink: dict[str, Any], mistake: str
) -> None:
    assert installed.is_dir()

    checked = notbefore(
        "check-config", write_config(tmp_path / "state", {"sinks": {"phone": sink}})
    )

    assert checked.returncode == 2
    assert "sinks.phone.plugin" in checked.stderr
    assert mistake in checked.stderr


def test_relative_file_of_a_plugin_starts_at_the_configuration(
    tmp_path: Path, installed: Path
) -> None:
    assert installed.is_dir()
    (tmp_path / "token").write_text("t0ken", encoding="utf-8")
    sink = plugin("gotify", url="https://push.example.org", token_file="token")

    checked = notbefore(
        "check-config", write_config(tmp_path / "state", {"sinks": {"phone": sink}})
    )

    assert checked.returncode == 0, checked.stderr


def test_contract_tests_of_the_page_pass(tmp_path: Path, installed: Path) -> None:
    assert installed.is_dir()
    (tmp_path / "test_gotify.py").write_text(CONTRACT, encoding="utf-8")
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", os.devnull)

    tested = run(sys.executable, "-m", "pytest", *options, tmp_path / "test_gotify.py")

    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "3 passed" in tested.stdout
