"""The installed agent delivers each notification in order, whatever dies or hangs."""

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import RunningAgent, becomes, eventually, notbefore
from support.azure import ME, STARTED, body, item, listed
from support.json_output import parsed_output
from support.peers import Answer, HttpPeer
from support.state_file import read_records

STARTED_EVENT = item("e", **STARTED)


class Place:
    """A state directory and the configuration next to it."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.config = directory / "notbefore.yaml"

    def write(self, sinks: dict[str, Any], routes: Any = (), **sections: Any) -> str:
        values = {"sinks": sinks, "routes": list(routes), **sections}
        self.config.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(self.config)

    def outbox(self, *words: str) -> str:
        """Run `notbefore outbox`, and return its output."""
        done = notbefore("outbox", *words, "--state-dir", str(self.state))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def drill(self, config: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `notbefore drill`."""
        return notbefore("drill", config, "--state-dir", str(self.state), *words)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def webhook(url: str, **settings: Any) -> dict[str, Any]:
    # a busy receiver gets each delivery once: no attempt ends before its answer
    return {"webhook": {"url": url, "allow_private": True, "timeout": "60s", **settings}}


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

        imds.set_document(body(STARTED_EVENT, incarnation=2))
        eventually(lambda: hook.kinds == ["announced", "started"])

        imds.set_document(body(STARTED_EVENT, item("f", **STARTED), incarnation=3))
        eventually(lambda: len(hook.requests) == 3)

        imds.set_document(body(incarnation=4))
        eventually(lambda: agent.count("delivered") == 5)

        assert hook.kinds == ["announced", "started", "started", "finished", "finished"]
        assert len(set(ids(hook))) == 5
        assert rows(agent, "pending") == 0
        assert agent.metric('notbefore_courier_starts_total{reason="due"}') == 1
        assert agent.metric('notbefore_delivery_latency_seconds_count{sink="hook"}') == 5
        oldest = 'notbefore_outbox_oldest_pending_seconds{severity="info",sink="hook"}'
        assert agent.metric(oldest) is None


def test_missed_deliveries_are_sent_in_order_after_a_kill(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(503)
    config = place.write({"hook": webhook(hook.url, expire_on_end=False)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        imds.set_document(listed("e"))
        eventually(lambda: len(hook.requests) >= 1)

        imds.set_document(body(STARTED_EVENT, incarnation=2))
        # a kill loses whatever is not on the disk yet
        eventually(lambda: len(read_records(place.state)) == 2)
        agent.stop(signal.SIGKILL)
    failed = len(hook.requests)

    assert set(hook.kinds) == {"announced"}

    hook.default = Answer()
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        eventually(lambda: agent.count("delivered") == 2)

    assert hook.kinds[-2:] == ["announced", "started"]
    assert len(set(ids(hook)[: failed + 1])) == 1, "the id is the same after the restart"


# ---- dead letters


def test_refused_delivery_is_dead_and_holds_nothing_back(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(400, body=b"invalid token")
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()
        imds.set_document(listed("e"))

        eventually(lambda: rows(agent, "dead") == 1)
        eventually(
            lambda: "refused `announced` of event e for good (400: invalid token)" in agent.log
        )
        (delivery_id,) = ids(hook)
        assert "invalid token" in place.outbox("list")
        assert json.loads(place.outbox("show", delivery_id[:6]))["state"] == "dead"

        imds.set_document(body(STARTED_EVENT, incarnation=2))
        eventually(lambda: rows(agent, "dead") == 2)


def test_dead_letters_can_be_sent_again_or_dropped(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(400)
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()
        imds.set_document(listed("e", "f"))
        eventually(lambda: rows(agent, "dead") == 2)
        hook.default = Answer()

        retried = place.outbox("retry", ids(hook)[0])
        eventually(lambda: agent.count("delivered") == 1)
        dropped = place.outbox("drop", "--all")
        eventually(lambda: agent.count("dropped") == 1)

        assert retried.startswith("1 will be sent again")
        assert dropped == "1 dropped.\n"
        assert place.outbox("list") == "The outbox is empty.\n"
        assert agent.count("accepted") == 2


# ---- drills


def test_drill_names_a_missing_agent_and_an_unknown_sink(hook: HttpPeer, place: Place) -> None:
    config = place.write({"hook": webhook(hook.url), "other": webhook(hook.url)})

    without_agent = place.drill(config)
    unknown_sink = place.drill(config, "--sink", "x")

    assert "no agent listens" in without_agent.stderr
    assert "there is no sink 'x' (known: hook, other)" in unknown_sink.stderr


def test_drill_plays_an_exercise_about_the_vm_of_the_agent(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()
        done = place.drill(config, "--sink", "hook", "--scenario", "preempt")

    assert done.returncode == 0, done.stderr + done.stdout
    assert "No route" not in done.stdout, done.stderr + done.stdout
    assert hook.kinds == ["announced", "started", "finished"]
    record = json.loads(hook.requests[0].body)
    assert record["azure.scheduled_event.exercise"] is True
    assert record["azure.scheduled_event.type"] == "Preempt"
    assert record["host.name"] == ME


def test_drill_reports_which_sinks_were_reached(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    with HttpPeer() as refusing, HttpPeer() as chat:
        refusing.default = Answer(400)
        slack = {"slack": {"url": chat.url}}
        config = place.write(
            {"hook": webhook(hook.url), "bad": webhook(refusing.url), "chat": slack}
        )
        with RunningAgent(imds.endpoint, place.state, config) as agent:
            agent.wait_until_listening()
            done = place.drill(config, "--json")
            eventually(lambda: place.outbox("list") == "The outbox is empty.\n")

    (report,) = parsed_output("drill", done.stdout)
    results = {(row["sink"], row["result"], row["error"]) for row in report["results"]}
    assert report["reached"] == ["chat", "hook"]
    assert report["not_reached"] == ["bad"]
    assert report["still_open"] == []
    assert results == {
        ("bad", "refused", "400: ok"),
        ("chat", "delivered", ""),
        ("hook", "delivered", ""),
    }
    assert agent.records == [], "an exercise is no change of an event"


def test_killed_drill_expires_its_deliveries(imds: Simulator, hook: HttpPeer, place: Place) -> None:
    hook.default = Answer(503)
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        words = ("drill", config, "--state-dir", str(place.state), "--wait", "15s")
        agent.wait_until_listening()
        with subprocess.Popen([agent.python, "-m", "notbefore", *words]) as drill:
            eventually(lambda: agent.count("accepted") == 3)
            drill.kill()

        eventually(lambda: agent.count("expired") == 3)

    assert drill.returncode == -signal.SIGKILL


def test_drill_claims_no_result_when_a_reload_renames_its_sink(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    hook.default = Answer(503)
    config = place.write({"hook": webhook(hook.url)})
    with RunningAgent(imds.endpoint, place.state, config) as agent, ThreadPoolExecutor() as pool:
        agent.wait_until_listening()
        drill = pool.submit(place.drill, config, "--wait", "5m")
        eventually(lambda: agent.count("accepted") == 3)

        place.write({"renamed": webhook(hook.url)})
        agent.process.send_signal(signal.SIGHUP)
        eventually(lambda: "configuration reloaded" in agent.log)
        hook.default = Answer()

        assert "it is not known who was reached" in drill.result().stderr


def test_drill_leaves_no_attempts_when_its_time_is_over(
    imds: Simulator, hook: HttpPeer, place: Place
) -> None:
    config = place.write({"hook": webhook(hook.url, timeout="15s")})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()
        start_courier(imds, agent, "hook")
        hook.default = Answer(how="hang")

        done = place.drill(config, "--wait", "5s")
        attempts = len(hook.requests)

        assert done.returncode == 1
        eventually(lambda: place.outbox("list") == "The outbox is empty.\n")
        assert len(hook.requests) == attempts
        assert "its attempt did not end in time" in done.stdout


def start_courier(imds: Simulator, agent: RunningAgent, sink: str) -> None:
    """Deliver an event, so that the drill that follows does not wait for the courier's start."""
    imds.set_document(listed("e"))
    eventually(lambda: agent.count("delivered", sink) == 1)


@pytest.fixture
def pager() -> Iterator[PagerDuty]:
    with PagerDuty() as running:
        yield running


def pagerduty_sink(pager: PagerDuty, **settings: Any) -> dict[str, Any]:
    url = f"{pager.url}/v2/enqueue"
    return {"pagerduty": {"routing_key": ROUTING_KEY, "url": url, **settings}}


def test_drill_opens_and_closes_an_incident(
    imds: Simulator, pager: PagerDuty, place: Place
) -> None:
    config = place.write({"pager": pagerduty_sink(pager)})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()

        done = place.drill(config)

    assert done.returncode == 0
    assert pager.effects == ["opened", "added", "resolved"]
    assert pager.faults == []


def test_drill_closes_its_incident_when_no_route_does(
    imds: Simulator, pager: PagerDuty, place: Place
) -> None:
    routes = [{"match": {"change": "announced"}, "sinks": ["pager"]}]
    config = place.write({"pager": pagerduty_sink(pager)}, routes)
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()

        done = place.drill(config)

    assert done.returncode == 0
    assert pager.effects == ["opened", "resolved"]
    assert "No route sends the end of an event to pager. A sink" in done.stdout
    assert "no other VM sends the end there" in done.stdout


def test_real_incident_is_closed_without_a_route_as_the_drill_says(
    imds: Simulator, pager: PagerDuty, place: Place
) -> None:
    routes = [{"match": {"change": "announced"}, "sinks": ["pager"]}]
    config = place.write({"pager": pagerduty_sink(pager)}, routes)
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()
        done = place.drill(config)

        imds.set_document(listed("e"))
        becomes(lambda: pager.effects, ["opened", "resolved", "opened"])
        imds.set_document(listed())
        becomes(lambda: pager.effects, ["opened", "resolved", "opened", "resolved"])

    promise = "A sink that has accepted a message of an event gets its end all the same"
    assert promise in done.stdout


def test_drill_names_the_sink_whose_incident_stays_open(
    imds: Simulator, pager: PagerDuty, place: Place
) -> None:
    config = place.write({"pager": pagerduty_sink(pager)})
    pager.answers.extend([pager.default, Answer(400), Answer(400)])
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()

        done = place.drill(config)

    assert done.returncode == 1
    assert pager.effects == ["opened"]
    assert "STILL OPEN: pager. Close the alert of EXERCISE-" in done.stdout


def test_drill_counts_an_incident_as_open_when_its_attempt_hangs(
    imds: Simulator, pager: PagerDuty, place: Place
) -> None:
    config = place.write({"pager": pagerduty_sink(pager, timeout="15s")})
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()
        start_courier(imds, agent, "pager")
        pager.default = Answer(how="hang")

        done = place.drill(config, "--wait", "5s")

    assert done.returncode == 1
    assert "STILL OPEN: pager. Close the alert of EXERCISE-" in done.stdout


def test_drill_that_no_route_matches_fails(imds: Simulator, pager: PagerDuty, place: Place) -> None:
    routes = [{"match": {"change": "updated"}, "sinks": ["pager"]}]
    config = place.write({"pager": pagerduty_sink(pager)}, routes)
    with RunningAgent(imds.endpoint, place.state, config) as agent:
        agent.wait_until_listening()

        done = place.drill(config)

    assert done.returncode == 1
    assert "No route matches this event" in done.stdout
