"""The agent behind TLS and a password: asked by its own commands, and refused without either."""

from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
import trustme
import yaml

from notbefore.commands.main import main
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore
from support.azure import FUTURE, ID, body, item

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all that is needed; `agent.yml` is filled in by `agent`."""
    at = tmp_path_factory.mktemp("access")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(at / "ca.pem")
    server = authority.issue_cert("localhost", "127.0.0.1")
    client = authority.issue_cert("prometheus")
    for name, issued in (("server", server), ("client", client)):
        issued.cert_chain_pems[0].write_to_path(at / f"{name}.pem")
        issued.private_key_pem.write_to_path(at / f"{name}.key")
    (at / "password").write_text(PASSWORD + "\n", encoding="utf-8")
    tls = {
        "cert_file": "server.pem",
        "key_file": "server.key",
        "client_ca_file": "ca.pem",
        "client_auth_type": "RequireAndVerifyClientCert",
    }
    users = {"prometheus": bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(8)).decode()}
    (at / "web.yml").write_text(
        yaml.safe_dump({"tls_server_config": tls, "basic_auth_users": users}), encoding="utf-8"
    )
    return at


@pytest.fixture(scope="module")
def agent(place: Path) -> Iterator[RunningAgent]:
    (place / "agent.yml").write_text("server: {web_config_file: web.yml}\n", encoding="utf-8")
    words = (place / "state", str(place / "agent.yml"))
    with Simulator() as imds, RunningAgent(imds.endpoint, *words).without_waiting() as running:
        imds.set_document(body(item(NotBefore=FUTURE)))
        listen = f"server: {{web_config_file: web.yml, listen: '127.0.0.1:{running.port}'}}\n"
        running.wait_for_changes("announced")  # it has read its own by then
        (place / "agent.yml").write_text(listen, encoding="utf-8")  # so that the commands find it
        yield running


def words(place: Path) -> tuple[str, ...]:
    login = ("--user", "prometheus", "--password-file", str(place / "password"))
    return (
        *login,
        "--cert-file",
        str(place / "client.pem"),
        "--key-file",
        str(place / "client.key"),
    )


def test_commands_find_the_agent_by_its_configuration(agent: RunningAgent, place: Path) -> None:
    config = str(place / "agent.yml")
    login = words(place)

    eventually(lambda: notbefore("health", config, *login[4:], "--ready").stdout == "ok\n")
    assert ID in notbefore("events", config, *login).stdout
    assert "announced" in notbefore("history", config, *login).stdout

    by_url = ("--url", f"https://localhost:{agent.port}", "--ca-file", str(place / "ca.pem"))
    assert ID in notbefore("events", *by_url, *login).stdout


@pytest.mark.usefixtures("log_as_before")
def test_events_command_names_the_missing_option(
    agent: RunningAgent, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer_to(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        return code, *capsys.readouterr()

    config = str(place / "agent.yml")
    login = words(place)
    url = f"https://localhost:{agent.port}"
    for given, code, expected in (
        ((config, *login[4:]), 1, "requires a user and a password: check --user"),
        ((config, *login[:4]), 1, "--cert-file needed?"),
        (("--url", url, *login), 1, "and is --ca-file"),
        (("--url", url.replace("https", "http")), 1, "does --url name its address"),
        (("--url", url, "--user", "x"), 2, "belong together"),
        (("--url", url, "--ca-file", str(place / "none")), 2, "expected the file of a certificate"),
        (("--url", "localhost"), 2, "expected http://HOST:PORT"),
    ):
        answer = answer_to("events", *given)
        assert answer[:2] == (code, "")
        assert expected in answer[2]
    other = place / "other.yml"
    other.write_text(
        (place / "agent.yml").read_text().replace("web.yml", "other-web.yml"), encoding="utf-8"
    )
    pinned = (
        (place / "web.yml")
        .read_text()
        .replace("server.pem", "client.pem")
        .replace("server.key", "client.key")
    )
    (place / "other-web.yml").write_text(pinned, encoding="utf-8")

    assert "is it this agent" in answer_to("health", str(other), *login)[2]

    (place / "other-web.yml").write_text(pinned.replace("client.pem", "binary"), encoding="utf-8")
    (place / "binary").write_bytes(b"\x30\x82\xff")
    code, _, stderr = answer_to("health", str(other), *login)

    assert code == 2
    assert "binary: cannot read a certificate" in stderr
