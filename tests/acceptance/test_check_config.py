"""``check-config --connect``: each kind of receiver is asked, and none is sent anything that somebody would see."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.commands.main import main
from support.agent import free_port, notbefore
from support.peers import HttpPeer, MailPeer, Say

NO_TEXT = Say(400, body=b"no_text")


Ask = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str], log_as_before: None) -> Ask:  # noqa: ARG001 - the command sets up the log
    """Ask a sink; returns the exit code, and the only sink in what ``--json`` prints."""

    def ask(sink: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "notbefore.yaml"
        path.write_text(yaml.safe_dump({"sinks": {"it": sink}}), encoding="utf-8")
        path.chmod(0o600)
        code = main(["check-config", str(path), "--connect", "--json", "--imds", "http://127.0.0.1:9"])
        out, error = capsys.readouterr()
        said = json.loads(out)
        assert (error, said["error"], said["notes"]) == ("", None, [])
        assert all("a secret stands in the file itself" in one for one in said["warnings"])
        assert said["ok"] == (code == 0)
        (one,) = said["sinks"]
        return code, one

    return ask


def test_a_slack_webhook_refuses_a_message_without_text_if_it_is_in_use(hook: HttpPeer, asked: Ask) -> None:
    hook.answers.extend([NO_TEXT, Say(404, body=b"no_service"), Say(body=b"<html>"), Say(400, body=b"what?")])
    assert asked({"slack": {"url": hook.url}}) == (
        0,
        {"sink": "it", "kind": "slack", "accepts": True, "reason": ""},
    )
    assert json.loads(hook.requests[0].body) == {"text": ""}
    code, said = asked({"slack": {"url": hook.url}})
    assert (code, said["accepts"], said["reason"]) == (1, False, "404: no_service")
    code, said = asked({"slack": {"url": hook.url}})
    assert (code, said["reason"]) == (1, "this is not an answer of Slack: 200: <html>")
    code, said = asked({"slack": {"url": hook.url}})
    assert (code, said["accepts"]) == (0, None), "a service that only understands what Slack does"


def test_slack_says_whose_a_token_is(hook: HttpPeer, asked: Ask) -> None:
    bot = {"slack": {"token": "xoxb-1-secret", "channel": "C1", "api": hook.url}}
    hook.answers.append(Say(body=b'{"ok":true,"user":"notbefore","team":"Ops"}'))
    code, said = asked(bot)
    assert (code, said["accepts"]) == (0, True)
    assert said["reason"].startswith("the token of notbefore of Ops; ")
    assert (hook.requests[0].path, hook.requests[0].headers["authorization"]) == ("/auth.test", "Bearer xoxb-1-secret")
    hook.answers.append(Say(body=b'{"ok":false,"error":"invalid_auth"}'))
    assert asked(bot)[1]["reason"] == "Slack says invalid_auth"


def test_a_mail_server_is_asked_up_to_its_recipients(tmp_path: Path, asked: Ask) -> None:
    with MailPeer(tmp_path) as server:
        mail = {"host": "127.0.0.1", "port": server.port, "tls": "none", "from": "vm@example.org"}
        assert asked({"email": {**mail, "to": ["ops@example.org"]}})[0] == 0
        server.refuse["gone@example.org"] = "550 no such user"
        code, said = asked({"email": {**mail, "to": ["ops@example.org", "gone@example.org"]}})
        assert (code, said["accepts"]) == (1, False)
        assert said["reason"] == "refused: gone@example.org: 550 no such user"
        code, said = asked({"email": {**mail, "tls": "starttls", "to": ["ops@example.org"]}})
        assert (code, "STARTTLS" in said["reason"]) == (1, True)
        assert server.mails == []


def test_of_a_webhook_it_is_known_only_that_it_answers(hook: HttpPeer, asked: Ask) -> None:
    hook.answers.append(Say(405))
    code, said = asked({"webhook": {"url": hook.url + "/hook", "allow_private": True, "headers": {"K": "v"}}})
    assert (code, said["accepts"]) == (0, None)
    assert said["reason"].startswith("it answers (405 to HEAD)")
    (request,) = hook.requests
    assert (request.method, request.path, request.headers["k"]) == ("HEAD", "/hook", "v")
    silent = {"webhook": {"url": f"http://127.0.0.1:{free_port()}", "allow_private": True}}
    code, said = asked(silent)
    assert (code, said["accepts"], "refused" in said["reason"]) == (1, False, True)


def test_what_can_only_be_sent_something_names_its_drill(tmp_path: Path, asked: Ask) -> None:
    code, said = asked({"command": {"command": ["/bin/true"]}})
    assert (code, said["accepts"]) == (0, None)
    assert f"`notbefore drill {tmp_path / 'notbefore.yaml'} --sink it`" in said["reason"]


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
