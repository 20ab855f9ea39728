"""Commands ask an agent that requires TLS, a client certificate and a password."""

from collections.abc import Callable, Iterator
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
RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with certificates, keys, the password and the file of the web server."""
    directory = tmp_path_factory.mktemp("access")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    certificates = {
        "server": authority.issue_cert("localhost", "127.0.0.1"),
        "client": authority.issue_cert("prometheus"),
    }
    for name, certificate in certificates.items():
        certificate.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        certificate.private_key_pem.write_to_path(directory / f"{name}.key")
    (directory / "password").write_text(PASSWORD + "\n", encoding="utf-8")
    tls = {
        "cert_file": "server.pem",
        "key_file": "server.key",
        "client_ca_file": "ca.pem",
        "client_auth_type": "RequireAndVerifyClientCert",
    }
    users = {"prometheus": bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(8)).decode()}
    web_config = {"tls_server_config": tls, "basic_auth_users": users}
    (directory / "web.yml").write_text(yaml.safe_dump(web_config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def agent(directory: Path) -> Iterator[RunningAgent]:
    """An agent that lists an event. Its configuration names its address for commands."""
    config = directory / "agent.yml"
    config.write_text("server: {web_config_file: web.yml}\n", encoding="utf-8")
    with (
        Simulator() as imds,
        RunningAgent(imds.endpoint, directory / "state", str(config)).without_waiting() as running,
    ):
        imds.set_document(body(item(NotBefore=FUTURE)))
        running.wait_for_changes("announced")  # by now it has read its configuration
        listen = f"server: {{web_config_file: web.yml, listen: '127.0.0.1:{running.port}'}}\n"
        config.write_text(listen, encoding="utf-8")
        yield running


@pytest.fixture(scope="module")
def config(agent: RunningAgent, directory: Path) -> str:
    """The configuration of the running agent."""
    assert agent.port
    return str(directory / "agent.yml")


@pytest.fixture(scope="module")
def login(directory: Path) -> tuple[str, ...]:
    """The options for the user and the password."""
    return ("--user", "prometheus", "--password-file", str(directory / "password"))


@pytest.fixture(scope="module")
def certificate(directory: Path) -> tuple[str, ...]:
    """The options for the client certificate."""
    return (
        *("--cert-file", str(directory / "client.pem")),
        *("--key-file", str(directory / "client.key")),
    )


def test_commands_find_the_agent_by_its_configuration(
    config: str, login: tuple[str, ...], certificate: tuple[str, ...]
) -> None:
    # health needs no password; a late poll is not ready for a moment
    eventually(lambda: notbefore("health", config, *certificate, "--ready").stdout == "ok\n")
    assert ID in notbefore("events", config, *login, *certificate).stdout
    assert "announced" in notbefore("history", config, *login, *certificate).stdout


def test_commands_ask_the_agent_at_a_url(
    agent: RunningAgent, directory: Path, login: tuple[str, ...], certificate: tuple[str, ...]
) -> None:
    url = ("--url", f"https://localhost:{agent.port}", "--ca-file", str(directory / "ca.pem"))

    assert ID in notbefore("events", *url, *login, *certificate).stdout


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], log_as_before: None) -> RunCommand:  # noqa: ARG001 - commands set up the log
    """Run a command in this process; return its exit code, its output and its errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_events_command_names_the_missing_option(
    run_command: RunCommand, config: str, login: tuple[str, ...], certificate: tuple[str, ...]
) -> None:
    without_login = run_command("events", config, *certificate)
    without_certificate = run_command("events", config, *login)

    assert without_login[:2] == (1, "")
    assert "requires a user and a password: check --user" in without_login[2]
    assert without_certificate[:2] == (1, "")
    assert "--cert-file needed?" in without_certificate[2]


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (("--url", "https://ADDRESS"), 1, "and is --ca-file"),
        (("--url", "http://ADDRESS"), 1, "does --url name its address"),
        (("--url", "https://ADDRESS", "--user", "x"), 2, "belong together"),
        (
            ("--url", "https://ADDRESS", "--ca-file", "none.pem"),
            2,
            "expected the file of a certificate",
        ),
        (("--url", "localhost"), 2, "expected http://HOST:PORT"),
    ],
)
def test_events_command_with_a_wrong_url_names_the_remedy(
    agent: RunningAgent, run_command: RunCommand, words: tuple[str, ...], code: int, remedy: str
) -> None:
    address = f"localhost:{agent.port}"
    words = tuple(word.replace("ADDRESS", address) for word in words)

    exit_code, output, error = run_command("events", *words)

    assert exit_code == code
    assert output == ""
    assert remedy in error


def config_with_certificate(config: str, directory: Path, certificate: str) -> str:
    """Write the configuration with another certificate of the server; return its path."""
    web_config = yaml.safe_load((directory / "web.yml").read_text(encoding="utf-8"))
    web_config["tls_server_config"] |= {"cert_file": certificate, "key_file": "client.key"}
    (directory / "other-web.yml").write_text(yaml.safe_dump(web_config), encoding="utf-8")
    text = Path(config).read_text(encoding="utf-8").replace("web.yml", "other-web.yml")
    other = directory / "other.yml"
    other.write_text(text, encoding="utf-8")
    return str(other)


def test_health_refuses_another_certificate_than_the_configured(
    run_command: RunCommand, config: str, directory: Path, certificate: tuple[str, ...]
) -> None:
    other = config_with_certificate(config, directory, "client.pem")

    _, _, error = run_command("health", other, *certificate)

    assert "is it this agent" in error


def test_health_names_a_file_that_is_no_certificate(
    run_command: RunCommand, config: str, directory: Path, certificate: tuple[str, ...]
) -> None:
    (directory / "binary").write_bytes(b"\x30\x82\xff")
    other = config_with_certificate(config, directory, "binary")

    code, _, error = run_command("health", other, *certificate)

    assert code == 2
    assert "binary: cannot read a certificate" in error
