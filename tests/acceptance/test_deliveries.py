"""Notifications from the installed agent through its courier: nothing lost, in order, whatever dies
or hangs.
"""

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import RunningAgent, eventually, notbefore
from support.azure import ME, STARTED, body, item, listed
from support.json_output import parsed_output
from support.peers import Answer, HttpPeer
from support.state_file import read_records

BEGUN = item("e", **STARTED)


class Place:
    """A state directory and a configuration beside it."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.config = directory / "notbefore.yaml"

    def write(self, sinks: dict[str, Any], routes: Any = (), **sections: Any) -> str:
        values = {"sinks": sinks, "routes": list(routes), **sections}
        self.config.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(self.config)

    def outbox(self, *words: str) -> str:
        done = notbefore("outbox", *words, "--state-dir", str(self.state))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def drill(self, config: str, *words: str) -> subprocess.CompletedProcess[str]:
        return notbefore("drill", config, "--state-dir", str(self.state), *words)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def webhook(url: str, **settings: Any) -> dict[str, Any]:
    return {"webhook": {"url": url, "allow_private": True, **settings}}


def ids(hook: HttpPeer) -> list[str]:
    return [request.headers["x-notbefore-delivery-id"] for request in hook.requests]


def rows(agent: RunningAgent, state: str, sink: str = "hook") -> float:
    return agent.metric(f'notbefore_outbox_deliveries{{sink="{sink}",state="{state}"}}') or 0.0


def test_changes_reach_the_sink_once_and_in_order(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        assert agent.metric("notbefore_courier_running") == 0
        assert agent.count("accepted") == 0

        imds.set_document(listed("e"))
        eventually(lambda: hook.kinds == ["announced"])
        assert agent.metric("notbefore_courier_running") == 1

        imds.set_document(body(BEGUN))
        imds.set_document(body(BEGUN, item("f", **STARTED), incarnation=3))

        eventually(lambda: len(hook.requests) == 3)

        imds.set_document(body(incarnation=4))

        eventually(lambda: agent.count("delivered") == 5)
        assert hook.kinds == ["announced", "started", "started", "finished", "finished"]
        assert len(set(ids(hook))) == 5
        assert rows(agent, "pending") == 0
        assert agent.metric('notbefore_courier_starts_total{reason="due"}') == 1
        assert agent.metric('notbefore_delivery_latency_seconds_count{sink="hook"}') == 5
        assert (
            agent.metric('notbefore_outbox_oldest_pending_seconds{severity="info",sink="hook"}')
            is None
        )


def test_missed_deliveries_are_sent_in_order_after_a_kill_and_a_restart(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(503)
    config = place.write({"hook": webhook(hook.url, expire_on_end=False)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        imds.set_document(listed("e"))
        eventually(lambda: len(hook.requests) >= 1)

        imds.set_document(body(BEGUN, incarnation=2))
        # what is not on the disk yet is lost
        eventually(lambda: len(read_records(place.state)) == 2)

        agent.stop(signal.SIGKILL)

    failed = len(hook.requests)

    assert set(hook.kinds) == {"announced"}

    hook.default = Answer()
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        eventually(lambda: agent.count("delivered") == 2)
        assert hook.kinds[-2:] == ["announced", "started"]
        assert len(set(ids(hook)[: failed + 1])) == 1  # the same id, before and after


def test_refused_delivery_is_kept_and_can_be_sent_again(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(400, body=b"invalid token")
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        imds.set_document(listed("e"))

        eventually(lambda: rows(agent, "dead") == 1)
        assert len(hook.requests) == 1
        eventually(
            lambda: "refused `announced` of event e for good (400: invalid token)" in agent.log
        )
        assert "invalid token" in place.outbox("list")

        ((delivery_id),) = set(ids(hook))
        assert json.loads(place.outbox("show", delivery_id[:6]))["state"] == "dead"

        imds.set_document(body(BEGUN, incarnation=2))
        eventually(lambda: rows(agent, "dead") == 2)  # it holds nothing back

        hook.default = Answer()

        assert place.outbox("retry", delivery_id[:6]).startswith("1 will be sent again")
        eventually(lambda: agent.count("delivered") == 1)
        assert place.outbox("drop", "--all") == "1 dropped.\n"
        eventually(lambda: agent.count("dropped") == 1)
        assert place.outbox("list") == "The outbox is empty.\n"
        assert agent.count("accepted") == agent.count("delivered") + agent.count("dropped") == 2


def test_drill_reports_which_sinks_were_reached(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    with HttpPeer() as refusing, HttpPeer() as chat:
        refusing.default = Answer(400)
        slack = {"slack": {"url": chat.url}}
        config = place.write(
            {"hook": webhook(hook.url), "bad": webhook(refusing.url), "chat": slack}
        )

        assert "no agent listens" in place.drill(config).stderr
        assert (
            "there is no sink 'x' (known: bad, chat, hook)"
            in place.drill(config, "--sink", "x").stderr
        )

        with RunningAgent(imds.endpoint, place.state, config) as agent:
            agent.wait_until_listening()
            done = place.drill(config, "--sink", "hook", "--scenario", "preempt")

            assert done.returncode == 0, done.stderr + done.stdout
            assert "No route" not in done.stdout, done.stderr + done.stdout
            assert hook.kinds == ["announced", "started", "finished"]

            told = {
                "azure.scheduled_event.exercise": True,
                "azure.scheduled_event.type": "Preempt",
                "host.name": ME,
            }
            # the name as the agent knows it
            assert json.loads(hook.requests[0].body).items() >= told.items()

            (report,) = parsed_output("drill", place.drill(config, "--json").stdout)

            assert report["reached"] == ["chat", "hook"]
            assert report["not_reached"] == ["bad"]
            assert report["still_open"] == []

            results = {(row["sink"], row["result"], row["error"]) for row in report["results"]}
            assert results == {
                ("bad", "refused", "400: ok"),
                ("chat", "delivered", ""),
                ("hook", "delivered", ""),
            }
            assert agent.records == []
        assert place.outbox("list") == "The outbox is empty.\n"


def test_killed_drill_expires_its_deliveries(imds: Simulator, hook: HttpPeer, place: Place) -> None:
    hook.default = Answer(503)
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        command = [
            agent.python,
            "-m",
            "notbefore",
            "drill",
            config,
            "--state-dir",
            str(place.state),
            "--wait",
            "8s",
        ]
        agent.wait_until_listening()
        with subprocess.Popen(command) as killed:
            eventually(lambda: agent.count("accepted") == 3)

            killed.kill()

        eventually(lambda: agent.count("expired") == 3)


def test_drill_claims_no_result_when_a_reload_renames_its_sink(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(503)
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent, ThreadPoolExecutor() as pool:
        agent.wait_until_listening()
        drill = pool.submit(place.drill, config, "--wait", "8s")
        eventually(lambda: agent.count("accepted") == 3)

        place.write({"renamed": webhook(hook.url)})
        agent.process.send_signal(signal.SIGHUP)

        assert "it is not known who was reached" in drill.result().stderr


def test_drill_leaves_no_attempts_when_its_time_is_over(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(how="hang")
    config = place.write({"hook": webhook(hook.url, timeout="3500ms")})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()

        done = place.drill(config, "--wait", "1s")
        attempts = len(hook.requests)

        assert done.returncode == 1
        eventually(lambda: place.outbox("list") == "The outbox is empty.\n")
        assert len(hook.requests) == attempts
        assert "its attempt did not end in time" in done.stdout


def pager(found: PagerDuty) -> dict[str, Any]:
    return {"pagerduty": {"routing_key": ROUTING_KEY, "url": f"{found.url}/v2/enqueue"}}


def test_incident_is_closed_as_the_drill_says_when_no_route_sends_the_end(
    imds: Simulator, place: Place
) -> None:
    routes = [{"match": {"change": "announced"}, "sinks": ["pager"]}]
    with PagerDuty() as pagerduty:
        config = place.write({"pager": pager(pagerduty)}, routes)
        with RunningAgent(imds.endpoint, place.state, config) as agent:
            agent.wait_until_listening()
            drill = place.drill(config)
            imds.set_document(listed("e"))
            eventually(lambda: pagerduty.effects[2:] == ["opened"])
            imds.set_document(listed())
            eventually(lambda: pagerduty.effects[2:] == ["opened", "resolved"])

    assert pagerduty.effects[:2] == ["opened", "resolved"]
    assert (
        "A sink that has accepted a message of an event gets its end all the same" in drill.stdout
    )


def test_drill_closes_its_incident_or_reports_it_as_open(imds: Simulator, place: Place) -> None:
    with PagerDuty() as found:
        config = place.write({"pager": pager(found)})
        with RunningAgent(imds.endpoint, place.state, config) as agent:
            agent.wait_until_listening()
            done = place.drill(config)

            assert done.returncode == 0
            assert found.effects == ["opened", "added", "resolved"]
            assert found.faults == []

            # with which the agent need not run
            routes = [{"match": {"change": "announced"}, "sinks": ["pager"]}]
            done = place.drill(place.write({"pager": pager(found)}, routes))

            assert done.returncode == 0
            assert found.effects[-2:] == ["opened", "resolved"]
            assert "No route sends the end of an event to pager. A sink" in done.stdout
            assert "no other VM sends the end there" in done.stdout

            for answers, wait in (
                ([found.default, Answer(400), Answer(400)], "30s"),
                ([Answer(how="hang")], "8s"),
            ):
                found.answers.extend(answers)
                done = place.drill(config, "--wait", wait)
                assert done.returncode == 1
                assert "STILL OPEN: pager. Close the alert of EXERCISE-" in done.stdout
            routes = [{"match": {"change": "updated"}, "sinks": ["pager"]}]
            done = place.drill(place.write({"pager": pager(found)}, routes))

            assert done.returncode == 1
            assert "No route matches this event" in done.stdout
