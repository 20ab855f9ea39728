"""The canary: in many ways to fail, at log level DEBUG, no secret is printed anywhere."""

import http.server
import itertools
import json
import os
import re
import sys
from base64 import b64encode
from contextlib import ExitStack
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


# how the Basic authentication of Alertmanager begins
ENCODED = b64encode(f"oper:{CANARY}".encode())[:12]


class Echo(HttpPeer):
    """It refuses each request, and says what it was: all of it, or cut somewhere within the
    headers.
    """

    most = 3_000  # bytes

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:  # noqa: ARG002 - it has answers of its own
        said = f"{handler.path} {handler.headers} {self.request(handler).body!r}".encode()
        super().answer(handler, Answer(400, body=said[: self.most]))


class Zoo:
    """Sinks that all fail, each in its own way, each with a secret of its own."""

    def __init__(self, directory: Path) -> None:
        self.sinks: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self._directory = directory
        self._numbers = itertools.count()

    def secret(self) -> str:
        return f"{CANARY}{next(self._numbers):03}".ljust(32, "x")

    def found(self, key: str, value: str) -> dict[str, str]:
        """The secret inline, in a file or in the environment, by turns."""
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
        """Every kind of sink that speaks HTTP, against one receiver."""
        host = url.partition("://")[2]
        hook = self.found("url", f"{url}/{self.secret()}?key={self.secret()}")
        signed = {
            **self.found("secret", self.secret()),
            "headers": {"Authorization": f"Bearer {self.secret()}"},
        }
        self.add(f"webhook-{way}", "webhook", {**hook, **signed, "allow_private": True})
        self.add(
            f"slack-{way}", "slack", self.found("url", f"{url}/services/T0/B0/{self.secret()}")
        )
        bot = self.found("token", f"xoxb-{self.secret()}")
        self.add(f"bot-{way}", "slack", {**bot, "channel": "#x", "api_url": f"{url}/api"})
        address = f"json://me:{self.secret()}@{host}/{self.secret()}/?+X-Key={self.secret()}"
        self.add(f"apprise-{way}", "apprise", self.found("url", address))
        user = {"username": "oper", **self.found("password", self.secret())}
        self.add(f"am-{way}", "alertmanager", {"urls": [url], **user})
        pager = {**self.found("routing_key", self.secret()), "url": f"{url}/v2/enqueue"}
        self.add(f"pager-{way}", "pagerduty", pager)
        node = {**self.found("token", self.secret()), "node_name": "aks-1", "url": url}
        self.add(f"node-{way}", "kubernetes", node)
        self.add(f"otlp-{way}", "otlp_logs", {"endpoint": url, "headers": self.headers()})

    def headers(self) -> dict[str, Any]:
        name = f"SECRET_{next(self._numbers)}"
        self.environment[name] = self.secret()
        return {"Api-Key": self.secret(), "X-Key": {"env": name}}

    def mail(self, way: str, port: int, tls: str) -> None:
        login = {"user": "me", **self.found("password", self.secret())}
        who = {"from": "vm@example.org", "to": ["ops@example.org"]}
        self.add(
            f"mail-{way}", "email", {"host": "localhost", "port": port, "tls": tls, **login, **who}
        )

    def hub(self, way: str, *words: str) -> None:
        key = f"SharedAccessKeyName=root;SharedAccessKey={self.secret()};EntityPath=changes"
        found = self.found("connection_string", ";".join((words[0], key, *words[1:])))
        self.add(f"hub-{way}", "event_hub", {**found, "timeout": "5s"})


def zoo_of(directory: Path, stack: ExitStack) -> Zoo:
    zoo = Zoo(directory)
    authority = trustme.CA()  # nobody trusts it
    for way, answer in HTTP_FAILURES.items():
        peer = stack.enter_context(HttpPeer())
        peer.default = answer
        zoo.http(way, peer.url)
    for most in (3_000, 200):
        echo = stack.enter_context(Echo())
        echo.most = most
        zoo.http(f"echo-{most}", echo.url)
    zoo.http("refused", "http://127.0.0.1:9")
    untrusted = stack.enter_context(HttpPeer(authority))
    hook = zoo.found("url", f"{untrusted.url}/{zoo.secret()}")
    zoo.add("webhook-untrusted", "webhook", {**hook, "allow_private": True})
    # a name for 127.0.0.1 that only the guard at the connection resolves
    zoo.add("webhook-private", "webhook", zoo.found("url", f"http://0x7f000001:1/{zoo.secret()}"))
    zoo.add(
        "slack-nowhere", "slack", zoo.found("url", f"https://no.such.host.invalid/{zoo.secret()}")
    )
    asks = stack.enter_context(MailPeer(tls="starttls", password="right", authority=authority))
    plain = stack.enter_context(MailPeer())
    zoo.http("nonsense", f"http://127.0.0.1:{plain.port}")  # it speaks SMTP
    zoo.mail("untrusted", asks.port, "starttls")
    zoo.mail("no-auth", plain.port, "none")
    zoo.mail("no-starttls", plain.port, "starttls")
    zoo.mail("no-tls", plain.port, "tls")
    zoo.mail("refused", 9, "none")
    zoo.mail("nonsense", int(echo.url.rpartition(":")[2]), "none")  # it speaks HTTP
    hub = stack.enter_context(Hub(directory))
    zoo.hub("wrong-key", f"Endpoint=sb://127.0.0.1:{hub.port}", "UseDevelopmentEmulator=true")
    zoo.hub("refused", "Endpoint=sb://127.0.0.1:9", "UseDevelopmentEmulator=true")
    zoo.hub("nonsense", f"Endpoint=sb://127.0.0.1:{plain.port}", "UseDevelopmentEmulator=true")
    zoo.hub("no-tls", f"Endpoint=sb://127.0.0.1:{hub.port}")
    environ = directory / "environ"
    script = (
        f"import os, sys; open({str(environ)!r}, 'w').write(repr(os.environ));"
        " sys.exit(repr(os.environ))"
    )
    zoo.add("command", "command", {"command": [sys.executable, "-c", script]})
    return zoo


@pytest.mark.timeout(600)
@pytest.mark.long
# each sink is a thread of the courier, which has to begin
@pytest.mark.parametrize("part", range(2))
def test_secrets_are_never_printed_when_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    with ExitStack() as stack:
        zoo = zoo_of(tmp_path, stack)

        command = {"command": zoo.sinks.pop("command")}

        assert len(zoo.sinks) >= 60

        zoo.sinks = dict(list(zoo.sinks.items())[part::2]) | command
        config = tmp_path / "notbefore.yaml"
        echo = stack.enter_context(HttpPeer())
        monkeypatch.setenv(OTEL_HEADERS, f"tenant={zoo.secret()}")
        headers = zoo.headers()
        otlp = {"endpoint": echo.url, "headers": headers, "interval": "1s"}
        repeated = (
            headers["Api-Key"],
            zoo.environment[headers["X-Key"]["env"]],
            os.environ[OTEL_HEADERS],
        )
        echo.default = Answer(400, body=" ".join(repeated).encode())  # it says what it should not
        heartbeat = {"every": "10s", **zoo.found("ping_url", f"http://127.0.0.1:9/{zoo.secret()}")}
        values = {
            "sinks": zoo.sinks,
            "otlp": otlp,
            "heartbeat": heartbeat,
            "log": {"level": "debug"},
        }
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        named = set(re.findall(r"\bSECRET_\d+\b", config.read_text(encoding="utf-8")))
        for (
            name
        ) in named:  # what the configuration does not name is no secret that it could know of
            monkeypatch.setenv(name, zoo.environment[name])
        simulator = stack.enter_context(Simulator((ME,)))
        printed: dict[str, Any] = {}
        with RunningAgent(simulator.endpoint, tmp_path / "state", str(config)) as agent:
            simulator.set_document(body(item(NotBefore=FUTURE)))

            def left() -> set[str]:
                said = get(agent.port, "/metrics")[1].decode()
                failed = (
                    r'notbefore_deliveries_total{result="(?:failed|dead)",sink="([^"]+)"} [1-9]'
                )
                return zoo.sinks.keys() - set(re.findall(failed, said))

            eventually(lambda: not left(), patience=480)
            eventually(lambda: "heartbeat: ping_url was not reached" in agent.log)
            eventually(lambda: {request.path for request in echo.requests} == {"/v1/metrics"})

            courier = Path("/proc") / str(agent.courier())
            printed["courier"] = (courier / "environ").read_bytes() + (
                courier / "cmdline"
            ).read_bytes()
            printed["agent"] = Path(f"/proc/{agent.process.pid}/cmdline").read_bytes()
            printed["metrics"] = get(agent.port, "/metrics")[1]
            printed["history"] = get(agent.port, "/api/v1/history")[1]
            state = str(tmp_path / "state")
            printed["drill"] = repr(
                notbefore("drill", str(config), "--wait", "0s", "--state-dir", state, timeout=300)
            )
            agent.process.terminate()
        printed["log"] = agent.log
        printed["records"] = json.dumps(agent.records)
    printed["check"] = repr(notbefore("check-config", str(config)))
    printed["outbox"] = repr(
        notbefore("outbox", "list", "--json", "--state-dir", str(tmp_path / "state"))
    )
    printed["command"] = (tmp_path / "environ").read_text(encoding="utf-8")

    for file in (tmp_path / "state").iterdir():
        printed[file.name] = file.read_bytes()

    assert "urllib3" in printed["log"]  # the libraries were as talkative as they can be

    for where, text in printed.items():
        found = text if isinstance(text, bytes) else str(text).encode()
        assert CANARY.encode() not in found, where
        assert ENCODED not in found, where
