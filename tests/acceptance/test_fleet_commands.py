"""``notbefore fleet drill`` and ``notbefore fleet outbox`` ask a running instance."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.agent import eventually, notbefore
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import Answer, HttpPeer

WEB = vm("web_0")


def records(hook: HttpPeer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in hook.requests]


def routed_by(path: Path, match: dict[str, Any]) -> Path:
    """Route only matching records to the sink; return the path of the configuration."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["routes"] = [{"match": match, "sinks": ["hook"]}]
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def outbox(fleet: RunningFleet, action: str, *words: str) -> str:
    """Return the output of `notbefore fleet outbox`."""
    fleet.wait_until_listening()
    done = notbefore("fleet", "outbox", action, "--state-dir", str(fleet.state), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def drill(fleet: RunningFleet, config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `notbefore fleet drill` once the instance listens to commands."""
    fleet.wait_until_listening()
    return notbefore("fleet", "drill", str(config), "--state-dir", str(fleet.state), *words)


# ---- drills


def test_drill_reaches_the_sinks_of_a_running_instance(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    with RunningFleet(config, tmp_path / "state") as fleet:
        done = drill(fleet, config)

        assert done.returncode == 0, done.stderr
        assert "Reached: hook." in done.stdout
        changes = [record["azure.scheduled_event.change"] for record in records(hook)]
        assert changes == ["announced", "started", "finished"]
        first, _, last = records(hook)
        assert first["body"].startswith("[EXERCISE] Reboot of exercise announced")
        assert first["azure.scheduled_event.fleet.vms"] == 1
        assert last["azure.scheduled_event.fleet.events_over"] == 1
        assert fleet.json("/api/v1/fleet/events")["waves"] == []
        assert outbox(fleet, "list") == "The outbox is empty.\n"


def test_drill_names_the_sink_that_refuses(hub: Hub, hook: HttpPeer, tmp_path: Path) -> None:
    hook.default = Answer(400)
    config = write_fleet_config(tmp_path, hub, hook.url)
    with RunningFleet(config, tmp_path / "state") as fleet:
        done = drill(fleet, config, "--json", "--scenario", "preempt")

        assert done.returncode == 1
        result = json.loads(done.stdout)
        assert result["not_reached"] == ["hook"]
        assert {row["result"] for row in result["results"]} == {"refused"}
        assert outbox(fleet, "list") == "The outbox is empty.\n"


@pytest.mark.parametrize(
    ("match", "place", "reached"),
    [
        ({"scale_set": "web"}, ["scale_set=web"], True),
        ({"scale_set": "web"}, ["scale_set=data"], False),
        ({"scale_set": "web"}, ["region=westeurope"], False),
        ({"scale_set": "web"}, [], True),  # an unknown place matches every route
        ({"tags": {"team": "shop"}}, ["tag=Team=shop", "vm=web_0"], True),
    ],
)
def test_drill_happens_at_the_place_that_routes_match(
    hub: Hub,
    hook: HttpPeer,
    tmp_path: Path,
    match: dict[str, Any],
    place: list[str],
    *,
    reached: bool,
) -> None:
    config = routed_by(write_fleet_config(tmp_path, hub, hook.url), match)
    with RunningFleet(config, tmp_path / "state") as fleet:
        words: list[str] = []
        for matcher in place:
            words += ["--match", matcher]

        done = drill(fleet, config, *words)

        assert (done.returncode == 0) == reached, done
        assert bool(records(hook)) == reached
        if not reached:
            assert "No route matches this event" in done.stdout


# ---- dead letters


def test_dead_letters_of_a_fleet_are_sent_again(hub: Hub, hook: HttpPeer, tmp_path: Path) -> None:
    hook.default = Answer(400)
    config = write_fleet_config(tmp_path, hub, hook.url)
    dead = 'notbefore_outbox_deliveries{sink="hook",state="dead"}'
    with RunningFleet(config, tmp_path / "state") as fleet:
        send(hub, [report(WEB, "announced", resources=[WEB.name])])
        eventually(lambda: fleet.metric(dead) == 1)
        table = outbox(fleet, "list")
        delivery_id = table.splitlines()[1].split()[0]
        hook.default = Answer(200)

        retried = outbox(fleet, "retry", "--all")

        assert "dead" in table
        assert "400" in table
        assert retried == "1 will be sent again now.\n"
        eventually(lambda: fleet.count("delivered") == 1)
        assert fleet.metric(dead) == 0
        assert [request.status for request in hook.requests] == [400, 200]
        assert f"`notbefore fleet outbox retry {delivery_id}`" in fleet.log
        assert fleet.stop() == 0

    with RunningFleet(config, tmp_path / "state") as successor:
        eventually(lambda: successor.metric("notbefore_fleet_partitions") == 4)
        assert outbox(successor, "list") == "The outbox is empty.\n"


def test_dropped_dead_letter_is_not_in_the_next_snapshot(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    hook.default = Answer(400)
    config = write_fleet_config(tmp_path, hub, hook.url)
    dead = 'notbefore_outbox_deliveries{sink="hook",state="dead"}'
    with RunningFleet(config, tmp_path / "state") as fleet:
        send(hub, [report(WEB, "announced", resources=[WEB.name])])
        eventually(lambda: fleet.metric(dead) == 1)
        (line,) = outbox(fleet, "list", "--json").splitlines()
        delivery = json.loads(line)

        dropped = outbox(fleet, "drop", delivery["delivery_id"][:8])

        assert delivery["listed"]
        assert dropped == "1 dropped.\n"
        assert fleet.stop() == 0

    with RunningFleet(config, tmp_path / "state") as successor:
        eventually(lambda: successor.metric("notbefore_fleet_partitions") == 4)
        assert outbox(successor, "list") == "The outbox is empty.\n"


# ---- mistakes


@pytest.mark.parametrize(
    ("command", "words", "code", "mistake"),
    [
        (("fleet", "outbox", "list"), ("--state-dir", "STATE"), 1, "no instance of"),
        (("fleet", "drill"), ("CONFIG", "--state-dir", "STATE"), 1, "no instance of"),
        (("fleet", "outbox", "retry"), ("--state-dir", "STATE"), 2, "expected ids"),
        (("fleet", "outbox", "list"), ("--url", "http://127.0.0.1:1"), 2, "unrecognized"),
        (("fleet", "drill"), (), 2, "expected CONFIG"),
        (("fleet", "drill"), ("CONFIG", "--match", "event_type=Reboot"), 2, "--scenario"),
        (("fleet", "drill"), ("CONFIG", "--match", "planet=mars"), 2, "there is no 'planet'"),
        (("fleet", "drill"), ("AGENT",), 2, "no section `fleet`"),
    ],
)
def test_wrong_command_is_refused_with_its_mistake(
    tmp_path: Path,
    command: tuple[str, ...],
    words: tuple[str, ...],
    code: int,
    mistake: str,
) -> None:
    agent = tmp_path / "agent.yml"
    agent.write_text("log: {level: info}", encoding="utf-8")
    fleet = tmp_path / "fleet.yml"
    fleet.write_text("fleet: {hub: {namespace: a.servicebus.windows.net, hub: b}}", "utf-8")
    paths = {"STATE": str(tmp_path), "CONFIG": str(fleet), "AGENT": str(agent)}

    done = notbefore(*command, *[paths.get(word, word) for word in words])

    assert done.returncode == code, done
    assert mistake in done.stderr


def test_instance_refuses_requests_that_only_agents_answer(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        fleet.wait_until_listening()

        done = notbefore("history", "--state-dir", str(fleet.state))

        assert done.returncode == 1
        assert "only an agent has that" in done.stderr
