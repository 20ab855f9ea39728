"""Templates work in a real agent, in ``check-config``, and as docs/templates.md shows them."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore, write_config
from support.azure import listed
from support.peers import HttpPeer

PAGE: Final = (Path(__file__).parents[2] / "docs" / "templates.md").read_text(encoding="utf-8")
EXAMPLES: Final = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
# squares a number again and again: its last steps are single operations of hours
SQUARES: Final = (
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
)
LOG_LINE: Final = (
    "sink hook: body: the template makes no valid JSON (JSON is malformed: invalid character"
    " (byte 9)): the built-in text is sent instead"
)


def webhook(url: str, body: str, **settings: Any) -> dict[str, Any]:
    """Return a sink whose attempt may also wait for the rendering of several templates."""
    fixed = {"url": url, "allow_private": True, "timeout": "60s"}
    return {"webhook": {**fixed, "body": body, **settings}}


def test_webhook_gets_the_body_of_its_template(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    names = '{{ record["azure.scheduled_event.resources"] | tojson }}'
    body = f'{{"text": {{{{ title | tojson }}}}, "vms": {names}}}'
    headers = {"content-type": "application/vnd.example+json", "X-Team": "web"}
    config = {
        "sinks": {"hook": webhook(hook.url, body, headers=headers)},
        "messages": {"title": "Mind: {{ title }}"},
    }

    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        imds.set_document(listed("e"))
        eventually(lambda: agent.count("delivered"))
        failures = agent.metric('notbefore_delivery_template_failures_total{sink="hook"}')

    (request,) = hook.requests
    sent = json.loads(request.body)
    assert sent["text"].startswith("Mind: Freeze of WestNO_0 in ")
    assert sent["vms"] == ["WestNO_0"]
    assert request.headers["content-type"] == "application/vnd.example+json"
    assert request.headers["x-team"] == "web"
    assert request.headers["x-notbefore-delivery-id"]
    assert failures == 0


def test_failing_template_sends_the_built_in_text_and_is_counted(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    plain_text = {"Content-Type": "text/plain"}
    config = {
        "sinks": {
            "hook": webhook(hook.url, '{"text": {{ title }}}'),
            "slow": webhook(hook.url, slow, headers=plain_text),
        }
    }

    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        imds.set_document(listed("e"))
        for sink in ("hook", "slow"):
            failures = f'notbefore_delivery_template_failures_total{{sink="{sink}"}}'
            eventually(lambda: agent.count("delivered", sink) == 1)
            eventually(lambda: agent.metric(failures) == 1)

    assert LOG_LINE in agent.log
    # on a busy machine, the courier stops waiting before the template has worked for a second
    assert "sink slow: body: the template fails" in agent.log
    for request in hook.requests:
        assert json.loads(request.body)["azure.scheduled_event.id"] == "e"
        assert request.headers["content-type"] == "application/json"


def courier_starts(reason: str) -> str:
    """Return the series that counts the starts of couriers for this reason."""
    return f'notbefore_courier_starts_total{{reason="{reason}"}}'


@pytest.mark.parametrize("bomb", [SQUARES, "{{ '%1000000000d' | format(1) }}"])
def test_template_that_needs_too_much_delays_no_other_sink(
    bomb: str, imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    with HttpPeer() as other:
        config = {"sinks": {"bomb": webhook(hook.url, bomb), "other": webhook(other.url, "{}")}}
        with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
            imds.set_document(listed("e"))
            eventually(lambda: agent.count("delivered", "other") == 1)
            eventually(lambda: agent.count("delivered", "bomb") == 1)

            imds.set_document(listed("f"))  # ends the first event
            eventually(lambda: agent.count("delivered", "other") == 3)
            eventually(lambda: agent.count("delivered", "bomb") == 3)
            starts = [agent.metric(courier_starts(reason)) for reason in ("crashed", "hung")]

    assert "sink bomb: body: the template fails" in agent.log
    assert starts == [0, 0], "the courier survives its templates"
    assert [json.loads(request.body) for request in other.requests] == [{}] * 3
    for request in hook.requests:
        assert json.loads(request.body)["azure.scheduled_event.id"] in ("e", "f")


def test_check_config_names_each_failing_template(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "sinks": {
            "chat": {"slack": {"url": "https://hooks.slack.com/services/a/b/c"}},
            "hook": webhook("https://x.example", '{"text": {{ title }}}'),
        },
        "messages": {"title": "{{ titel }}", "body": '{{ record["host.nam"] }}'},
    }
    config = write_config(tmp_path / "state", values)

    first = notbefore("check-config", config)
    values["messages"]["title"] = "{{ title }}"
    second = notbefore("check-config", write_config(tmp_path / "state", values))

    undefined = "messages.body: the template fails (UndefinedError: there is no 'host.nam'"
    assert first.returncode == 2
    assert "messages.title: the template uses titel" in first.stderr
    assert second.returncode == 2
    assert undefined in second.stderr
    assert "sinks.hook.webhook.body: the template makes no valid JSON" in second.stderr
    assert "in the message `announced` about a Freeze" in second.stderr


def test_agent_refuses_a_template_of_wrong_syntax(tmp_path: Path) -> None:
    config = write_config(tmp_path / "state", {"messages": {"body": "{% for %}"}})

    run = notbefore("run", config, "--state-dir", tmp_path / "state")

    assert run.returncode == 2
    assert "messages.body: line 1 of the template" in run.stderr


def test_render_shows_each_kind_of_event(tmp_path: Path) -> None:
    values = {
        "sinks": {
            "chat": {"slack": {"url": "https://hooks.slack.com/services/a/b/c"}},
            "am": {"alertmanager": {"urls": ["http://am-0:9093"]}},
            "drain": {"command": {"command": ["/bin/true"]}},
        },
        "messages": {"title": "<{{ title }}>"},
    }
    config = write_config(tmp_path / "state", values)

    rendered = notbefore("check-config", config, "--render", "--json")

    samples = [json.loads(line) for line in rendered.stdout.splitlines()]
    by_sink: dict[str, set[tuple[str, str]]] = {}
    for sample in samples:
        by_sink.setdefault(sample["sink"], set()).add((sample["event_type"], sample["change"]))
    assert set(by_sink) == {"chat", "am", "drain"}
    steps = {"announced", "reminder", "approved", "updated", "started", "finished", "canceled"}
    assert {change for kind, change in by_sink["chat"] if kind == "Reboot"} == steps
    assert {change for kind, change in by_sink["am"] if kind == "Reboot"} == steps - {"approved"}
    assert {kind for kind, _ in by_sink["chat"]} == {
        "Freeze",
        "Reboot",
        "Redeploy",
        "Preempt",
        "Terminate",
        "SpotRebalanceRecommendation",
    }
    assert all(sample["title"].startswith("<") for sample in samples if sample["sink"] == "chat")
    assert all(sample["title"] is None for sample in samples if sample["sink"] == "drain")


def test_render_refuses_an_unknown_sink(tmp_path: Path) -> None:
    chat = {"slack": {"url": "https://hooks.slack.com/services/a/b/c"}}
    config = write_config(tmp_path / "state", {"sinks": {"chat": chat}})

    unknown = notbefore("check-config", config, "--render", "nobody")

    assert unknown.returncode == 2
    assert "there is no sink 'nobody' (known: chat)" in unknown.stderr


# ---- docs/templates.md


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The directory of a configuration, with the secrets that the examples of the page name."""
    addresses = {
        "slack-url": "https://hooks.slack.com/services/a/b/c",
        "tickets-token": "t0ken",
        "phone-url": "https://phone.example.org/me",
    }
    for name, secret in addresses.items():
        (tmp_path / name).write_text(secret, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES)
def test_documented_template_renders(example: str, secrets: Path) -> None:
    values = yaml.safe_load(example)
    values.setdefault("sinks", {"chat": {"slack": {"url_file": "slack-url"}}})
    config = secrets / "notbefore.yml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")

    shown = notbefore("check-config", config, "--render")

    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("---") > 30


def test_documented_output_is_that_of_the_first_example(secrets: Path) -> None:
    (secrets / "notbefore.yml").write_text(EXAMPLES[0], encoding="utf-8")
    ((command, output),) = re.findall(r"```console\n\$ notbefore (.*?)\n(.*?)```", PAGE, re.DOTALL)
    first_part, last_part = output.split("...\n")

    words = command.replace("notbefore.yml", str(secrets / "notbefore.yml")).split()
    shown = notbefore(*words).stdout

    assert shown.startswith(first_part)
    assert shown[: shown.index("--- chat", 1)].strip().endswith(last_part.strip())


def test_documented_json_body_has_the_fields_of_its_receiver(secrets: Path) -> None:
    tickets = next(example for example in EXAMPLES if "tickets" in example)
    (secrets / "notbefore.yml").write_text(tickets, encoding="utf-8")

    shown = notbefore("check-config", secrets / "notbefore.yml", "--render", "tickets", "--json")

    first = json.loads(json.loads(shown.stdout.splitlines()[0])["body"])
    assert first["summary"] == "Freeze of web_0 in 15 min"
    assert first["priority"] == 3
    assert first["host"] == "web_0"
