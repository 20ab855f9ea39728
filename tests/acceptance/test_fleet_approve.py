"""``notbefore fleet approve`` asks a simulated Azure Resource Manager.

The token comes through azure-identity. The simulated service accepts a request only if path,
version and token are right.
"""

import json
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from support.agent import eventually, notbefore
from support.event_grid import encoded, message, resource_id
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import HttpPeer

TOKEN = "token-of-the-identity"
VERSION = "2023-10-01-preview"
PATH = (
    "/subscriptions/sub/resourcegroups/rg/providers/Microsoft.Compute/virtualMachineScaleSets/web"
    "/providers/Microsoft.Maintenance/scheduledevents/EVENT-1/acknowledge"
)


class ResourceManager:
    """Azure Resource Manager, and an identity endpoint like that of App Service."""

    def __init__(self) -> None:
        self.status = 200  # of the answer to a valid request
        self.acknowledged: list[str] = []  # the paths of all requests for an acknowledgement
        self.scopes: list[str] = []  # of the tokens
        manager = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                manager.scopes += query["resource"]
                expires = int(datetime.now(UTC).timestamp()) + 3600
                self.reply(200, {"access_token": TOKEN, "expires_on": str(expires)})

            def do_POST(self) -> None:
                url = urlsplit(self.path)
                manager.acknowledged.append(url.path)
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    self.reply(401, {"error": {"code": "InvalidAuthenticationToken"}})
                elif parse_qs(url.query) != {"api-version": [VERSION]}:
                    self.reply(400, {"error": {"code": "InvalidApiVersionParameter"}})
                elif url.path != PATH:
                    self.reply(404, {"error": {"code": "ResourceNotFound"}})
                else:
                    self.reply(manager.status, {"value": "acknowledged"})

            def reply(self, status: int, value: dict[str, Any]) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[ResourceManager]:
    with ResourceManager() as running:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{running.url}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "secret-of-the-endpoint")
        yield running


class Surroundings(NamedTuple):
    """The hub, the receiver and the Azure of an instance."""

    hub: Hub
    hook: HttpPeer
    manager: ResourceManager
    directory: Path

    def start_fleet(self, *words: str, enabled: bool = True) -> RunningFleet:
        """Start an instance with these options."""
        path = write_fleet_config(self.directory, self.hub, self.hook.url)
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        values["fleet"]["approval"] = {"enabled": enabled, "endpoint": self.manager.url}
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return RunningFleet(path, self.directory / "state", *words)


@pytest.fixture
def around(hub: Hub, hook: HttpPeer, manager: ResourceManager, tmp_path: Path) -> Surroundings:
    return Surroundings(hub, hook, manager, tmp_path)


def announcement(**properties: Any) -> bytes:
    """Return Azure's message that EVENT-1 is scheduled."""
    now = datetime.now(UTC)
    not_before = now + timedelta(seconds=900)
    return encoded(message("Scheduled", at=now, not_before=not_before, **properties))


def approve(fleet: RunningFleet, event_id: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `notbefore fleet approve` once the instance listens to commands."""
    fleet.wait_until_listening()
    return notbefore("fleet", "approve", event_id, "--state-dir", str(fleet.state), *words)


def bodies(hook: HttpPeer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in hook.requests]


def test_approval_is_sent_once_and_recorded(around: Surroundings) -> None:
    with around.start_fleet("--allow-approval") as fleet:
        send(around.hub, [announcement(Resources=["web_0", "web_1"])])
        eventually(lambda: len(around.hook.requests) == 1)

        unconfirmed = approve(fleet, "event-1")
        done = approve(fleet, "event-1", "--yes", "--reason", "drained")
        eventually(lambda: len(around.hook.requests) == 2)
        assert fleet.stop() == 0

    assert unconfirmed.returncode != 0
    assert "all 2 VMs: web_0, web_1" in unconfirmed.stdout
    assert "use --yes" in unconfirmed.stderr
    assert done.returncode == 0
    assert done.stdout.endswith("approved\n")
    assert around.manager.acknowledged == [PATH]
    assert around.manager.scopes == ["https://management.azure.com"]
    record = bodies(around.hook)[-1]
    assert record["azure.scheduled_event.change"] == "approved"
    assert record["azure.scheduled_event.approval.by"]
    assert record["azure.scheduled_event.approval.rule"] == "operator"
    assert record["azure.scheduled_event.approval.reason"] == "drained"
    assert "approves the Reboot EVENT-1" in fleet.log
    assert TOKEN not in fleet.log


@pytest.mark.parametrize(
    ("status", "expected"),
    [(404, "look again"), (409, "look again"), (403, "Azure answered 403"), (500, "answered 500")],
)
def test_failed_approval_quotes_azure(status: int, expected: str, around: Surroundings) -> None:
    around.manager.status = status
    with around.start_fleet("--allow-approval") as fleet:
        send(around.hub, [announcement()])
        eventually(lambda: len(around.hook.requests) == 1)

        done = approve(fleet, "EVENT-1", "--yes")
        eventually(lambda: len(around.hook.requests) == 2)
        assert fleet.stop() == 0

    assert done.returncode == 1
    assert expected in done.stdout
    assert bodies(around.hook)[-1]["azure.scheduled_event.change"] == "approval_failed"
    assert len(around.manager.acknowledged) == 1


def test_approval_uses_the_scale_set_that_vms_report_without_azure(around: Surroundings) -> None:
    with around.start_fleet("--allow-approval") as fleet:
        send(around.hub, [report(vm("web_0"), "announced")])
        eventually(lambda: len(around.hook.requests) == 1)

        done = approve(fleet, "EVENT-1", "--yes")
        assert fleet.stop() == 0

    assert done.returncode == 0
    assert around.manager.acknowledged == [PATH]


def test_event_that_may_not_be_approved_is_not_sent(around: Surroundings) -> None:
    now = datetime.now(UTC)
    odd_resource = resource_id(name="web?x=1", event_id="odd")
    odd = message("Scheduled", "odd", at=now, not_before=now, resource=odd_resource)
    started = message("Started", "started", at=now)
    unnamed = message("Scheduled", "unnamed", at=now, not_before=now, Resources=[])
    advice = message("Scheduled", "advice", at=now, EventType="SpotRebalanceRecommendation")
    with around.start_fleet("--allow-approval") as fleet:
        send(around.hub, [encoded(started, odd, unnamed, advice)])
        eventually(lambda: len(around.hook.requests) == 4)

        refusals = {
            event_id: approve(fleet, event_id, "--yes").stderr
            for event_id in ("started", "odd", "unnamed", "advice", "wave-1", "unknown")
        }
        assert fleet.stop() == 0

    assert "it is Started" in refusals["started"]
    assert "no name of Azure's" in refusals["odd"]
    assert "--without-resources" in refusals["unnamed"]
    assert "recommendation" in refusals["advice"]
    assert "one by one" in refusals["wave-1"]
    assert "no event unknown is open" in refusals["unknown"]
    assert around.manager.acknowledged == []


@pytest.mark.parametrize(
    ("enabled", "words", "expected"),
    [
        (False, ("--allow-approval",), "`fleet.approval.enabled` is not true"),
        (True, (), "without --allow-approval"),
    ],
)
def test_approval_needs_both_switches(
    enabled: bool, words: tuple[str, ...], expected: str, around: Surroundings
) -> None:
    with around.start_fleet(*words, enabled=enabled) as fleet:
        send(around.hub, [announcement()])
        eventually(lambda: len(around.hook.requests) == 1)

        done = approve(fleet, "EVENT-1", "--yes")
        assert fleet.stop() == 0

    assert done.returncode != 0
    assert expected in done.stderr
    assert around.manager.acknowledged == []
    assert around.manager.scopes == []
