"""The files that a configuration names: their kind and their permissions."""

import os
import signal
from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore
from support.azure import ME

KEYS = {
    "sinks.a.slack.url_file": "sinks: {a: {slack: {url_file: FILE}}}",
    "sinks.a.webhook.headers.X": (
        "sinks: {a: {webhook: {url: 'https://x.example', headers: {X: {file: FILE}}}}}"
    ),
    "sinks.a.webhook.ca_file": "sinks: {a: {webhook: {url: 'https://x.example', ca_file: FILE}}}",
    "sinks.a.webhook.cert_file": (
        "sinks: {a: {webhook: {url: 'https://x.example', cert_file: FILE}}}"
    ),
    "otlp.ca_file": "otlp: {endpoint: 'https://x.example', ca_file: FILE}",
    "server.web_config_file": "server: {web_config_file: FILE}",
}


@pytest.mark.parametrize("key", KEYS)
def test_fifo_is_refused_at_once(key: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    config = tmp_path / "notbefore.yml"
    config.write_text(KEYS[key].replace("FILE", str(fifo)), encoding="utf-8")

    result = notbefore("check-config", config)

    assert result.returncode == 2
    assert "it is not a regular file" in result.stderr


def test_configuration_that_is_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "notbefore.yml"
    os.mkfifo(fifo)

    result = notbefore("run", fifo, "--state-dir", tmp_path / "state")

    assert result.returncode == 2
    assert f"{fifo} cannot be read: it is not a regular file" in result.stderr


@pytest.mark.parametrize("key", ["cert_file", "key_file", "client_ca_file"])
def test_certificate_of_the_listener_that_is_a_fifo_is_refused(key: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    empty = tmp_path / "empty"
    empty.write_text("", encoding="utf-8")
    files = {"cert_file": empty, "key_file": empty, "client_ca_file": empty, key: fifo}
    lines = "".join(f"  {name}: {file}\n" for name, file in files.items())
    web_config = tmp_path / "web.yml"
    web_config.write_text(
        f"tls_server_config:\n{lines}  client_auth_type: RequireAndVerifyClientCert\n",
        encoding="utf-8",
    )
    config = tmp_path / "notbefore.yml"
    config.write_text(f"server: {{web_config_file: {web_config}}}", encoding="utf-8")

    result = notbefore("check-config", config)

    assert result.returncode == 2
    assert f"tls_server_config.{key}: {fifo}: " in result.stderr


def test_reload_refuses_a_secret_that_has_become_a_fifo(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("https://hooks.slack.example/services/a", encoding="utf-8")
    values = {"sinks": {"a": {"slack": {"url_file": str(secret)}}}}
    with (
        Simulator((ME,)) as imds,
        RunningAgent(imds.endpoint, tmp_path / "state", values) as agent,
    ):
        secret.unlink()
        os.mkfifo(secret)

        agent.process.send_signal(signal.SIGHUP)

        eventually(lambda: "it is not a regular file" in agent.log)
        assert agent.answers("/healthz")
        assert agent.stop() == 0


def test_warning_names_each_file_that_every_user_may_write(tmp_path: Path) -> None:
    contents = {
        "url": "https://x.example/hook",
        "header": "x",
        "program": "#!/bin/sh\n",
        "web.yml": "",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        (tmp_path / name).chmod(0o777)
    config = tmp_path / "notbefore.yml"
    config.write_text(
        f"""
server: {{web_config_file: {tmp_path}/web.yml}}
sinks:
  a: {{webhook: {{url_file: {tmp_path}/url, headers: {{X: {{file: {tmp_path}/header}}}}}}}}
  b: {{command: {{command: [{tmp_path}/program]}}}}
""",
        encoding="utf-8",
    )
    config.chmod(0o600)

    result = notbefore("check-config", config)

    assert result.returncode == 0
    for name in contents:
        assert f"{tmp_path / name} can be written by every user" in result.stderr
