"""docs/python-api.md, run: its names exist; its sink is installed, keeps the contract, and is used by an agent."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.config.load import load
from notbefore.config.messages import Messages
from notbefore.config.secret import Secret
from notbefore.config.sinks import Plugin, SinkConfig
from notbefore.core.outbox import GivenDelivery, SendResult
from notbefore.courier.contract import check_accepts, check_marks_exercises, check_refuses, messages
from notbefore.courier.message import Message, Receipt, Sink
from notbefore.courier.sinks import make, try_out
from notbefore.courier.worker import Worker
from notbefore.errors import ConfigError, SendError
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import FUTURE, ME, body, item
from support.peers import HttpPeer, Say

PAGE: Final = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")
PYTHON: Final = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package of the page is installed, by pip."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "gotify_sink.py").write_text(PYTHON[1], encoding="utf-8")
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (source / "pyproject.toml").write_text(project, encoding="utf-8")
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target, source)
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package))


def plugin(**settings: Any) -> SinkConfig:
    return SinkConfig(plugin=Plugin(use="gotify", secrets={"token": Secret("hunter2")}, settings=settings))


def sink(url: str) -> Sink:
    return make("phone", plugin(url=url), Messages())


def test_every_name_that_the_page_lists_can_be_imported() -> None:
    found = 0
    for line in re.findall(r"^\| (`notbefore\.[^|]+) \|", PAGE, re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", line)
        module, _, name = first.rpartition(".")
        if name[0].islower() and name not in {"parse", "diff"}:
            assert importlib.import_module(first)
            continue
        for one in (name, *others):
            assert hasattr(importlib.import_module(module), one), one
            found += 1
    assert found > 10


def test_the_example_of_the_page_prints_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON[0], "python-api.md", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out == "Reboot of this VM announced: at a time not given\n"


@pytest.mark.usefixtures("installed")
def test_the_sink_of_the_page_keeps_the_contract() -> None:
    with HttpPeer() as peer:
        check_accepts(lambda: sink(peer.url))
        assert [json.loads(one.body)["title"] for one in peer.requests] == [
            f"notbefore: {kind}" for kind in ("announced", "started", "finished")
        ]
        assert peer.requests[0].headers["x-gotify-key"] == "hunter2"
        check_marks_exercises(lambda: sink(peer.url), lambda: peer.requests[-1].body.decode())  # noqa: PLW0108 - of the request that comes then
        exercise = json.loads(peer.requests[-1].body)
        assert exercise["title"] == "[EXERCISE] notbefore: announced"
        assert exercise["message"].startswith("[EXERCISE] Reboot")
        peer.default = Say(403, body=b"no")
        check_refuses(lambda: sink(peer.url), permanent=True, secrets=["hunter2"])
        peer.default = Say(503)
        check_refuses(lambda: sink(peer.url), permanent=False, secrets=["hunter2"])
    check_refuses(lambda: sink("http://127.0.0.1:9"), permanent=False, secrets=["hunter2"])


class Bad(Sink):
    """A sink that breaks the contract in the way that its settings say."""

    def __init__(self, how: object) -> None:
        self.how = how

    def send(self, _message: Message) -> Receipt:
        if isinstance(self.how, Exception):
            raise self.how
        return self.how  # type: ignore[return-value]  # that is what is wrong with it

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", [None, True])
def test_the_contract_notices_a_sink_that_returns_no_receipt(how: object) -> None:
    with pytest.raises(AssertionError, match="return a Receipt"):
        check_accepts(lambda: Bad(how))


def test_the_contract_notices_a_sink_whose_exercises_look_real() -> None:
    with pytest.raises(AssertionError, match="that it is an exercise"):
        check_marks_exercises(lambda: Bad(Receipt()), lambda: "Reboot of this VM announced")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Receipt(), "has to raise SendError"),
        (SendError("busy"), "permanent has to be True"),
        (SendError("the token hunter2 is wrong", permanent=True), "shows a secret"),
    ],
)
def test_the_contract_notices_a_refusal_that_is_not_said_well(how: object, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_refuses(lambda: Bad(how), permanent=True, secrets=["hunter2"])


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_made_is_said_by_check_config_without_the_secret() -> None:
    with pytest.raises(ConfigError, match=r"no installed package has a sink 'gotfy' \(known: gotify\)"):
        try_out("phone", SinkConfig(plugin=Plugin(use="gotfy")), Messages())
    with pytest.raises(ConfigError, match="gotify: it cannot be made: KeyError: 'url'"):
        try_out("phone", plugin(), Messages())


def delivery() -> GivenDelivery:
    one = messages()[0]
    return GivenDelivery(one.delivery_id, one.event_key, "it", one.kind, one.severity, one.line)


@pytest.mark.parametrize(
    ("error", "permanent"),
    [(AttributeError("no x"), True), (TypeError("no y"), True), (NameError("z"), True), (OSError("down"), False)],
)
def test_a_bug_of_a_sink_is_dead_at_once_and_loud(
    error: Exception, permanent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[SendResult] = []
    worker = Worker("it", lambda: Bad(error), lambda _name, one: results.append(one), str)
    worker.give([delivery()])
    eventually(lambda: results)
    (result,) = results
    assert result.outcome == ("refused" if permanent else "failed")
    assert ("a bug in the sink" in result.error) is permanent
    assert any(record.exc_info for record in caplog.records), "with its traceback"


@pytest.mark.usefixtures("installed")
def test_an_agent_notifies_through_the_sink_of_the_page(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(package), os.environ.get("PYTHONPATH", ""))))
    text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
    with HttpPeer() as peer, Simulator((ME,)) as imds:
        imds.set_document(body())
        values = yaml.safe_load(text)
        values["sinks"]["phone"]["plugin"]["settings"]["url"] = peer.url
        values["sinks"]["phone"]["plugin"]["secrets"]["token"] = {"file": "token"}
        (tmp_path / "token").write_text("hunter2\n", encoding="utf-8")
        config = tmp_path / "notbefore.yml"
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        assert load(config, {}, {}).sinks["phone"].kind == "plugin"
        with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
            agent.ready()
            imds.set_document(body(item("E-1", NotBefore=FUTURE), incarnation=2))
            eventually(lambda: peer.requests)
            assert "Freeze of this VM announced" in json.loads(peer.requests[0].body)["message"]
            assert peer.requests[0].headers["x-gotify-key"] == "hunter2"
