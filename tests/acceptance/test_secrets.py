"""No secret is printed anywhere, however sinks fail, even at the log level DEBUG."""

import http.server
import itertools
import json
import os
import re
import sys
from base64 import b64encode
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get, notbefore
from support.azure import FUTURE, ME, body, item
from support.hub import Hub
from support.peers import Answer, HttpPeer, MailPeer

CANARY = "cAnArY"
OTEL_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
HTTP_FAILURES = {
    "throttled": Answer(429, (("Retry-After", "1"),)),
    "redirect": Answer(302, (("Location", "http://127.0.0.1:9/elsewhere"),)),
    "cut": Answer(how="cut"),
    "hang": Answer(how="hang"),
}
# the beginning of Alertmanager's Basic authentication
ENCODED = b64encode(f"oper:{CANARY}".encode())[:12]


class Echo(HttpPeer):
    """Refuses each request, and repeats it, or the beginning of its headers, in the refusal."""

    most = 3_000  # bytes

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:  # noqa: ARG002 - it has answers of its own
        text = f"{handler.path} {handler.headers} {self.request(handler).body!r}".encode()
        super().answer(handler, Answer(400, body=text[: self.most]))


class FailingSinks:
    """Sinks that all fail, each in another way, each with another secret."""

    def __init__(self, directory: Path) -> None:
        self.sinks: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self._directory = directory
        self._numbers = itertools.count()

    def secret(self) -> str:
        """Return a secret that no other sink has."""
        return f"{CANARY}{next(self._numbers):03}".ljust(32, "x")

    def setting(self, key: str, value: str) -> dict[str, str]:
        """Return a setting with a secret inline, in a file or in the environment, by turns."""
        number = next(self._numbers)
        if number % 3 == 0:
            return {key: value}
        if number % 3 == 1:
            path = self._directory / f"secret-{number}"
            path.write_text(value, encoding="utf-8")
            return {f"{key}_file": str(path)}
        self.environment[f"SECRET_{number}"] = value
        return {f"{key}_env": f"SECRET_{number}"}

    def add(self, name: str, kind: str, settings: dict[str, Any]) -> None:
        self.sinks[name] = {kind: {"timeout": "1s", **settings}}

    def http(self, way: str, url: str) -> None:
        """Add a sink of each kind that uses HTTP, all with this receiver."""
        host = url.partition("://")[2]
        hook = self.setting("url", f"{url}/{self.secret()}?key={self.secret()}")
        signed = {
            **self.setting("secret", self.secret()),
            "headers": {"Authorization": f"Bearer {self.secret()}"},
        }
        self.add(f"webhook-{way}", "webhook", {**hook, **signed, "allow_private": True})
        self.add(
            f"slack-{way}", "slack", self.setting("url", f"{url}/services/T0/B0/{self.secret()}")
        )
        bot = self.setting("token", f"xoxb-{self.secret()}")
        self.add(f"bot-{way}", "slack", {**bot, "channel": "#x", "api_url": f"{url}/api"})
        address = f"json://me:{self.secret()}@{host}/{self.secret()}/?+X-Key={self.secret()}"
        self.add(f"apprise-{way}", "apprise", self.setting("url", address))
        user = {"username": "oper", **self.setting("password", self.secret())}
        self.add(f"am-{way}", "alertmanager", {"urls": [url], **user})
        pager = {**self.setting("routing_key", self.secret()), "url": f"{url}/v2/enqueue"}
        self.add(f"pager-{way}", "pagerduty", pager)
        node = {**self.setting("token", self.secret()), "node_name": "aks-1", "url": url}
        self.add(f"node-{way}", "kubernetes", node)
        self.add(f"otlp-{way}", "otlp_logs", {"endpoint": url, "headers": self.headers()})

    def headers(self) -> dict[str, Any]:
        name = f"SECRET_{next(self._numbers)}"
        self.environment[name] = self.secret()
        return {"Api-Key": self.secret(), "X-Key": {"env": name}}

    def mail(self, way: str, port: int, tls: str) -> None:
        login = {"user": "me", **self.setting("password", self.secret())}
        who = {"from": "vm@example.org", "to": ["ops@example.org"]}
        self.add(
            f"mail-{way}", "email", {"host": "localhost", "port": port, "tls": tls, **login, **who}
        )

    def hub(self, way: str, *words: str) -> None:
        key = f"SharedAccessKeyName=root;SharedAccessKey={self.secret()};EntityPath=changes"
        connection = self.setting("connection_string", ";".join((words[0], key, *words[1:])))
        self.add(f"hub-{way}", "event_hub", {**connection, "timeout": "5s"})


def failing_sinks(directory: Path, stack: ExitStack) -> FailingSinks:
    """Start the receivers, and return the sinks that fail to send to them."""
    sinks = FailingSinks(directory)
    authority = trustme.CA()  # no sink trusts it
    for way, answer in HTTP_FAILURES.items():
        peer = stack.enter_context(HttpPeer())
        peer.default = answer
        sinks.http(way, peer.url)
    for most in (3_000, 200):
        echo = stack.enter_context(Echo())
        echo.most = most
        sinks.http(f"echo-{most}", echo.url)
    sinks.http("refused", "http://127.0.0.1:9")
    untrusted = stack.enter_context(HttpPeer(authority))
    hook = sinks.setting("url", f"{untrusted.url}/{sinks.secret()}")
    sinks.add("webhook-untrusted", "webhook", {**hook, "allow_private": True})
    # a name for 127.0.0.1 that only the guard at the connection resolves
    sinks.add(
        "webhook-private", "webhook", sinks.setting("url", f"http://0x7f000001:1/{sinks.secret()}")
    )
    sinks.add(
        "slack-nowhere",
        "slack",
        sinks.setting("url", f"https://no.such.host.invalid/{sinks.secret()}"),
    )
    asks = stack.enter_context(MailPeer(tls="starttls", password="right", authority=authority))
    plain = stack.enter_context(MailPeer())
    sinks.http("nonsense", f"http://127.0.0.1:{plain.port}")  # it speaks SMTP
    sinks.mail("untrusted", asks.port, "starttls")
    sinks.mail("no-auth", plain.port, "none")
    sinks.mail("no-starttls", plain.port, "starttls")
    sinks.mail("no-tls", plain.port, "tls")
    sinks.mail("refused", 9, "none")
    sinks.mail("nonsense", int(echo.url.rpartition(":")[2]), "none")  # it speaks HTTP
    hub = stack.enter_context(Hub(directory))
    sinks.hub("wrong-key", f"Endpoint=sb://127.0.0.1:{hub.port}", "UseDevelopmentEmulator=true")
    sinks.hub("refused", "Endpoint=sb://127.0.0.1:9", "UseDevelopmentEmulator=true")
    sinks.hub("nonsense", f"Endpoint=sb://127.0.0.1:{plain.port}", "UseDevelopmentEmulator=true")
    sinks.hub("no-tls", f"Endpoint=sb://127.0.0.1:{hub.port}")
    environ = directory / "environ"
    script = (
        f"import os, sys; open({str(environ)!r}, 'w').write(repr(os.environ));"
        " sys.exit(repr(os.environ))"
    )
    sinks.add("command", "command", {"command": [sys.executable, "-c", script]})
    return sinks


def leaky_receiver(sinks: FailingSinks, echo: HttpPeer) -> dict[str, Any]:
    """Let a receiver of OTLP repeat its secrets in a refusal; return the settings for it."""
    headers = sinks.headers()
    in_environment = sinks.environment[headers["X-Key"]["env"]]
    secrets = (headers["Api-Key"], in_environment, os.environ[OTEL_HEADERS])
    echo.default = Answer(400, body=" ".join(secrets).encode())
    return {"endpoint": echo.url, "headers": headers, "interval": "1s"}


def wait_for_failures(agent: RunningAgent, sinks: set[str]) -> None:
    """Wait until each of these sinks has failed once."""
    failure = re.compile(
        r'notbefore_deliveries_total{result="(?:failed|dead)",sink="([^"]+)"} [1-9]'
    )

    def have_all_failed() -> bool:
        metrics = get(agent.port, "/metrics")[1].decode()
        return sinks <= set(failure.findall(metrics))

    eventually(have_all_failed, patience=480)


def of_the_courier(agent: RunningAgent, file: str) -> bytes:
    """Read a file of the courier's in ``/proc``.

    The agent may replace the courier at any time, because some of these sinks hang.
    """

    def content() -> bytes:
        with suppress(OSError):
            return Path(f"/proc/{agent.courier()}/{file}").read_bytes()
        return b""

    return eventually(content)


def texts_of_running(agent: RunningAgent, config: Path) -> dict[str, bytes]:
    """Return all that a running agent, its courier and a drill show."""
    words = ("--wait", "0s", "--state-dir", str(agent.state))
    drill = notbefore("drill", str(config), *words, timeout=300)
    return {
        "environment of the courier": of_the_courier(agent, "environ"),
        "words of the courier": of_the_courier(agent, "cmdline"),
        "words of the agent": Path(f"/proc/{agent.process.pid}/cmdline").read_bytes(),
        "metrics": get(agent.port, "/metrics")[1],
        "history": get(agent.port, "/api/v1/history")[1],
        "drill": repr(drill).encode(),
    }


def texts_of_stopped(agent: RunningAgent, config: Path) -> dict[str, bytes]:
    """Return the output and the files of a stopped agent, and the output of commands."""
    check = notbefore("check-config", str(config))
    outbox = notbefore("outbox", "list", "--json", "--state-dir", str(agent.state))
    files = {file.name: file.read_bytes() for file in agent.state.iterdir()}
    return {
        "log": agent.log.encode(),
        "records": json.dumps(agent.records).encode(),
        "check-config": repr(check).encode(),
        "outbox": repr(outbox).encode(),
        "environment of the command": (config.parent / "environ").read_bytes(),
        **files,
    }


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("part", range(2))  # each sink is a thread, which takes time to start
def test_secrets_are_never_printed_when_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    with ExitStack() as stack:
        failing = failing_sinks(tmp_path, stack)
        command = failing.sinks.pop("command")
        assert len(failing.sinks) >= 60
        sinks = dict(list(failing.sinks.items())[part::2]) | {"command": command}

        echo = stack.enter_context(HttpPeer())
        monkeypatch.setenv(OTEL_HEADERS, f"tenant={failing.secret()}")
        ping_url = failing.setting("ping_url", f"http://127.0.0.1:9/{failing.secret()}")
        values = {
            "sinks": sinks,
            "otlp": leaky_receiver(failing, echo),
            "heartbeat": {"every": "10s", **ping_url},
            "log": {"level": "debug"},
        }
        config = tmp_path / "notbefore.yaml"
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        # a variable that the configuration does not name is no secret of the agent
        for name in re.findall(r"\bSECRET_\d+\b", config.read_text(encoding="utf-8")):
            monkeypatch.setenv(name, failing.environment[name])

        simulator = stack.enter_context(Simulator((ME,)))
        with RunningAgent(simulator.endpoint, tmp_path / "state", str(config)) as agent:
            simulator.set_document(body(item(NotBefore=FUTURE)))
            wait_for_failures(agent, set(sinks))
            eventually(lambda: "heartbeat: ping_url was not reached" in agent.log)
            eventually(lambda: {request.path for request in echo.requests} == {"/v1/metrics"})
            agent.wait_until_listening()
            texts = texts_of_running(agent, config)

    texts |= texts_of_stopped(agent, config)
    assert b"urllib3" in texts["log"], "the libraries log at the level DEBUG"
    for name, text in texts.items():
        assert CANARY.encode() not in text, name
        assert ENCODED not in text, name
