"""``notbefore outbox --url`` and ``/api/v1/outbox`` show the outbox over TLS, with a password."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import bcrypt
import pytest
import requests
import trustme
import yaml

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, eventually, notbefore, write_config
from support.azure import FUTURE, body, item
from support.json_output import parsed_output
from support.peers import Answer, HttpPeer

PASSWORD = "correct horse"
SECRET = "canary-8d2f61"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with certificates, the password and the file of the web server."""
    directory = tmp_path_factory.mktemp("outbox")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    server = authority.issue_cert("localhost")
    server.cert_chain_pems[0].write_to_path(directory / "server.pem")
    server.private_key_pem.write_to_path(directory / "server.key")
    (directory / "password").write_text(PASSWORD, encoding="utf-8")
    password_hash = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    web_config = {
        "tls_server_config": {"cert_file": "server.pem", "key_file": "server.key"},
        "basic_auth_users": {"reader": password_hash},
    }
    (directory / "web.yml").write_text(yaml.safe_dump(web_config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def agent(directory: Path) -> Iterator[RunningAgent]:
    """An agent with two dead letters, of the sinks `hook` and `other`."""
    with Simulator() as imds, HttpPeer() as hook:
        hook.default = Answer(400, body=f"no such channel: {SECRET}".encode())
        settings = {"url": f"{hook.url}/{SECRET}", "allow_private": True}
        config = {
            "server": {"web_config_file": str(directory / "web.yml")},
            "sinks": {"hook": {"webhook": settings}, "other": {"webhook": dict(settings)}},
        }
        state = directory / "state"
        with RunningAgent(
            imds.endpoint, state, write_config(state, config)
        ).without_waiting() as agent:
            imds.set_document(body(item("e", NotBefore=FUTURE)))
            agent.wait_until_listening()
            eventually(lambda: dead_letters(agent) == 2)
            yield agent


def dead_letters(agent: RunningAgent) -> int:
    """Return how many dead letters the agent lists at its socket."""
    listed = notbefore("outbox", "list", "--json", "--state-dir", str(agent.state))
    assert listed.returncode == 0, listed.stderr
    states = [delivery["state"] for delivery in parsed_output("outbox list", listed.stdout)]
    return states.count("dead")


def ask(agent: RunningAgent, directory: Path, query: str) -> requests.Response:
    return requests.get(
        f"https://localhost:{agent.port}/api/v1/outbox{query}",
        auth=("reader", PASSWORD),
        verify=str(directory / "ca.pem"),
        timeout=PATIENCE,
    )


def deliveries(agent: RunningAgent, directory: Path, query: str = "") -> list[dict[str, Any]]:
    response = ask(agent, directory, query)
    assert response.status_code == 200, response.text
    rows: list[dict[str, Any]] = response.json()["deliveries"]
    return rows


def address(agent: RunningAgent, directory: Path) -> tuple[str, ...]:
    """Return the options for the agent's address, its certificate and the password."""
    url = ("--url", f"https://localhost:{agent.port}", "--ca-file", str(directory / "ca.pem"))
    return (*url, "--user", "reader", "--password-file", str(directory / "password"))


def without_age(table: str) -> list[list[str]]:
    """Return the cells of each row without the sixth, because the age grows."""
    rows = [line.split() for line in table.splitlines()]
    return [row[:5] + row[6:] for row in rows]


def without_times(shown: str) -> list[str]:
    """Return the lines without the three times, which are rounded to milliseconds."""
    times = ("created", "due", "expires")
    return [line for line in shown.splitlines() if not line.strip(' "').startswith(times)]


def test_list_with_url_prints_the_same_as_with_the_socket(
    agent: RunningAgent, directory: Path
) -> None:
    by_socket = notbefore("outbox", "list", "--state-dir", str(agent.state))

    by_url = notbefore("outbox", "list", *address(agent, directory))

    assert by_url.returncode == 0, by_url.stderr
    assert without_age(by_url.stdout) == without_age(by_socket.stdout)
    assert by_url.stdout.count("no such channel") == 2


def test_list_with_url_chooses_a_sink(agent: RunningAgent, directory: Path) -> None:
    listed = notbefore("outbox", "list", "--sink", "other", "--json", *address(agent, directory))

    (delivery,) = parsed_output("outbox list", listed.stdout)
    assert delivery["sink"] == "other"


def test_list_with_url_refuses_an_unknown_sink(agent: RunningAgent, directory: Path) -> None:
    refused = notbefore("outbox", "list", "--sink", "none", *address(agent, directory))

    assert refused.returncode == 1
    assert "the outbox has no delivery for 'none'" in refused.stderr


def test_show_with_url_prints_the_same_as_with_the_socket(
    agent: RunningAgent, directory: Path
) -> None:
    first, second = [delivery["delivery_id"] for delivery in deliveries(agent, directory)]
    prefixes = (first[:6], first, second[:6])  # a delivery that is named twice is printed once
    by_socket = notbefore("outbox", "show", *prefixes, "--state-dir", str(agent.state))

    by_url = notbefore("outbox", "show", *prefixes, *address(agent, directory))

    assert by_url.returncode == 0, by_url.stderr
    assert without_times(by_url.stdout) == without_times(by_socket.stdout)
    assert by_url.stdout.count('"record"') == 2


def test_show_with_url_refuses_an_unknown_id(agent: RunningAgent, directory: Path) -> None:
    refused = notbefore("outbox", "show", "0" * 32, *address(agent, directory))

    assert refused.returncode == 1
    assert f"No delivery id starts with '{'0' * 32}'" in refused.stderr


def test_list_with_url_requires_the_password(agent: RunningAgent, directory: Path) -> None:
    without_user = address(agent, directory)[:4]

    refused = notbefore("outbox", "list", *without_user)

    assert refused.returncode == 1
    assert "requires a user and a password" in refused.stderr


@pytest.mark.parametrize("action", ["retry", "drop"])
def test_changing_actions_refuse_url(agent: RunningAgent, directory: Path, action: str) -> None:
    refused = notbefore("outbox", action, "--all", *address(agent, directory))

    assert refused.returncode == 2
    assert f"Run `notbefore outbox {action}` on the agent's VM" in refused.stderr
    assert len(deliveries(agent, directory)) == 2


def test_outbox_api_leaves_out_records_and_secrets(agent: RunningAgent, directory: Path) -> None:
    response = ask(agent, directory, "")

    assert response.headers["Content-Type"] == "application/json; charset=utf-8"
    assert SECRET not in response.text
    for delivery in response.json()["deliveries"]:
        assert delivery["state"] == "dead"
        assert delivery["listed"] is True
        assert "400: no such channel" in delivery["error"]
        assert "record" not in delivery


def test_outbox_api_returns_the_record_of_one_delivery(
    agent: RunningAgent, directory: Path
) -> None:
    delivery_id = deliveries(agent, directory, "?sink=hook")[0]["delivery_id"]

    (delivery,) = deliveries(agent, directory, f"?id={delivery_id[:8]}")

    assert delivery["delivery_id"] == delivery_id
    assert delivery["record"]["azure.scheduled_event.change"] == "announced"
    assert SECRET not in json.dumps(delivery)


def test_outbox_api_requires_the_password(agent: RunningAgent, directory: Path) -> None:
    url = f"https://localhost:{agent.port}/api/v1/outbox"

    response = requests.get(url, verify=str(directory / "ca.pem"), timeout=PATIENCE)

    assert response.status_code == 401
    assert "announced" not in response.text


@pytest.mark.parametrize("query", ["?id=", "?id=x%00", f"?id={'0' * 33}", "?all=1"])
def test_outbox_api_refuses_a_wrong_query(agent: RunningAgent, directory: Path, query: str) -> None:
    response = ask(agent, directory, query)

    assert response.status_code == 400
    assert "expected" in response.json()["error"]


def test_outbox_api_refuses_an_unknown_sink(agent: RunningAgent, directory: Path) -> None:
    response = ask(agent, directory, f"?sink={quote('a/b?')}")

    assert response.status_code == 400
    assert "the configuration has no such sink" in response.json()["error"]


def test_outbox_api_changes_nothing(agent: RunningAgent, directory: Path) -> None:
    response = requests.post(
        f"https://localhost:{agent.port}/api/v1/outbox?id=0",
        auth=("reader", PASSWORD),
        verify=str(directory / "ca.pem"),
        timeout=PATIENCE,
    )

    assert response.status_code == 405
