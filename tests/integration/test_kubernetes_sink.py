"""The sink ``kubernetes``: Events on the node, and one condition while an event is listed."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from integration.test_kubernetes import Objects, rendered
from notbefore.config.secret import Secret
from notbefore.config.sinks import Kubernetes as Settings
from notbefore.config.sinks import Messages, SinkConfig
from notbefore.core.document import MAX_DESCRIPTION, MAX_ID, MAX_NAME, MAX_RESOURCES, MAX_WORD
from notbefore.core.duration import Duration
from notbefore.core.message import Message, Templated
from notbefore.core.text import rfc3339
from notbefore.courier.sinks import make
from notbefore.courier.sinks.kubernetes import HEARTBEAT, MAX_LISTED_EVENTS
from notbefore.errors import ConfigError, SendError
from notbefore.simulator.server import Simulator
from peers.kubernetes import NODE, READY, VERSIONS, Kubernetes, status
from support.agent import RunningAgent, eventually
from support.azure import ID, ME, PEER, STARTED, at, body, listed
from support.messages import message, sent
from support.peers import Answer

REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}
HINTS = {  # status of a refusal -> what the error says about it
    401: "the API server does not accept the token of the service account",
    403: "the service account needs `create` of events",
    404: "is this the name of the node",
}
REFUSALS = {  # status -> whether the error is permanent, and whether it needs a correction by hand
    401: (False, True),
    403: (False, True),
    404: (False, True),
    409: (False, False),
    415: (True, False),
    422: (True, False),
    429: (False, False),
    500: (False, False),
    503: (False, False),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    with Kubernetes(tmp_path) as server:
        yield server
        assert not server.faults


def config_of(cluster: Kubernetes, node_name: str = NODE, timeout: str = "60s") -> SinkConfig:
    settings = Settings(
        node_name=node_name,
        url=cluster.url,
        token=Secret(str(cluster.token_file), "file"),
        ca_file=str(cluster.ca_file),
        timeout=Duration(timeout),
    )
    return SinkConfig(kubernetes=settings)


def test_event_is_found_by_kubectl_describe_node(cluster: Kubernetes) -> None:
    sent(config_of(cluster), message(REBOOT))

    (event,) = cluster.described
    assert event["type"] == "Warning"
    assert event["reason"] == "RebootAnnounced"
    assert event["source"] == {"component": "notbefore", "host": NODE}
    assert event["message"] == (
        "Reboot of this VM announced: not before 2026-03-01T12:15:00.000Z. Move or stop"
        " applications that must not be killed. The VM comes back by itself."
        f" EventId: {ID}"
    )


def test_event_has_the_text_of_a_template(cluster: Kubernetes) -> None:
    templated = Templated(title="Reboot!", body="Call\nthe team")

    sent(config_of(cluster), message(REBOOT, templated=templated))

    (event,) = cluster.described
    assert event["message"] == f"Reboot!: Call the team EventId: {ID}"


def test_condition_lasts_from_announcement_to_end(cluster: Kubernetes) -> None:
    announced = message(REBOOT)
    started = message(REBOOT, REBOOT | STARTED)
    finished = message(REBOOT, REBOOT | STARTED, None)

    (receipt,) = sent(config_of(cluster), announced)

    first = cluster.condition
    assert first is not None
    assert first["status"] == "True"
    assert first["reason"] == "RebootScheduled"
    assert "Reboot of this VM announced: not before 2026-03-01T12:15:00.000Z" in first["message"]
    assert first["lastTransitionTime"] == first["lastHeartbeatTime"]
    assert receipt.repeat == HEARTBEAT

    (receipt,) = sent(config_of(cluster), started)

    second = cluster.condition
    assert second is not None
    assert second["reason"] == "RebootStarted"
    assert second["lastTransitionTime"] == first["lastTransitionTime"]
    assert second["lastHeartbeatTime"] > first["lastHeartbeatTime"]
    assert receipt.thread is not None

    (receipt,) = sent(config_of(cluster), finished)

    assert cluster.node["status"]["conditions"] == [READY]
    assert receipt.repeat is None
    assert [event["reason"] for event in cluster.described] == [
        "RebootAnnounced",
        "RebootStarted",
        "RebootFinished",
    ]


@pytest.mark.parametrize(
    "last_look",
    [
        pytest.param(None, id="canceled"),
        pytest.param(REBOOT | {"Resources": [PEER]}, id="no longer affected"),
    ],
)
def test_condition_ends_without_a_start(last_look: Any, cluster: Kubernetes) -> None:
    sent(config_of(cluster), message(REBOOT), message(REBOOT, last_look))

    assert cluster.condition is None


def test_condition_stays_until_last_event_ends(cluster: Kubernetes) -> None:
    freeze: dict[str, Any] = {"EventId": "F | (1)"}

    sent(config_of(cluster), message(REBOOT))
    sent(config_of(cluster), message(freeze, freeze | STARTED))

    both = cluster.condition
    assert both is not None
    assert both["reason"] == "RebootScheduled,FreezeStarted"
    assert ID in both["message"]

    sent(config_of(cluster), message(REBOOT, None))

    freeze_alone = cluster.condition
    assert freeze_alone is not None
    assert freeze_alone["reason"] == "FreezeStarted"
    assert ID not in freeze_alone["message"]
    assert freeze_alone["lastTransitionTime"] == both["lastTransitionTime"]

    sent(config_of(cluster), message(freeze, freeze | STARTED, None))

    assert cluster.condition is None


def test_late_end_leaves_later_event_in_condition(cluster: Kubernetes) -> None:
    later = REBOOT | {"EventId": "later"}

    sent(config_of(cluster), message(REBOOT), message(later), message(REBOOT, None))

    assert cluster.condition is not None
    assert "(later)" in cluster.condition["message"]


@pytest.mark.parametrize(
    "announced",
    [
        pytest.param(message(REBOOT, exercise=True), id="exercise"),
        pytest.param(message({"Resources": [PEER]}), id="event of another VM"),
    ],
)
def test_exercise_and_event_of_other_vm_set_no_condition(
    announced: Message, cluster: Kubernetes
) -> None:
    sent(config_of(cluster), announced)

    assert cluster.condition is None
    assert len(cluster.described) == 1


def test_late_result_of_approval_sets_no_condition(cluster: Kubernetes) -> None:
    approved = message(REBOOT, kind="approved", delivery_id="another")

    *_, receipt = sent(config_of(cluster), message(REBOOT), message(REBOOT, None), approved)

    assert cluster.condition is None
    assert cluster.described[-1]["reason"] == "RebootApproved"
    assert receipt.repeat is None


def test_approval_keeps_condition_up_to_date(cluster: Kubernetes) -> None:
    approved = message(REBOOT, kind="approved", delivery_id="another", now=at(400))

    _, receipt = sent(config_of(cluster), message(REBOOT), approved)

    # the outbox now repeats this message in place of the announcement
    assert receipt.repeat == HEARTBEAT
    assert cluster.condition is not None
    assert cluster.condition["lastHeartbeatTime"] == rfc3339(at(400))


def test_second_attempt_makes_no_second_event(cluster: Kubernetes) -> None:
    sent(config_of(cluster), message(REBOOT), message(REBOOT))

    assert len(cluster.described) == 1


def test_nodes_have_events_of_their_own(cluster: Kubernetes) -> None:
    sent(config_of(cluster), message(REBOOT))
    cluster.node["metadata"]["name"] = "other"
    sent(config_of(cluster, node_name="other"), message(REBOOT))

    assert len(cluster.events) == 2


def test_condition_is_bounded(cluster: Kubernetes) -> None:
    messages = [message(REBOOT | {"EventId": f"event-{number}"}) for number in range(60)]

    sent(config_of(cluster), *messages)

    assert cluster.condition is not None
    assert cluster.condition["message"].count("Reboot of this VM") == MAX_LISTED_EVENTS
    assert "event-59" in cluster.condition["message"]


def test_longest_event_is_within_limits(cluster: Kubernetes) -> None:
    names = [f"{number:04}".ljust(MAX_NAME, "x") for number in range(MAX_RESOURCES - 1)]
    longest = {
        "EventId": "| (" + "\u0130" * (MAX_ID - 3),
        "EventType": "\U0001f525" * MAX_WORD,
        "EventSource": "\U0001f525" * MAX_WORD,
        "Description": "\U0001f525" * MAX_DESCRIPTION,
        "Resources": [*names, ME],
    }

    sent(config_of(cluster), message(longest), message(longest, None))

    assert cluster.condition is None
    assert len(cluster.described) == 2


def test_rotated_token_is_read_again(cluster: Kubernetes) -> None:
    with closing(make("node", config_of(cluster), Messages())) as sink:
        sink.send(message(REBOOT))
        cluster.rotate("eyJhbGciOiJSUzI1NiJ9.bmV4dA.bmV4dA")
        sink.send(message(REBOOT, REBOOT | STARTED))

    assert len(cluster.described) == 2


@pytest.mark.parametrize("code", REFUSALS)
def test_refusal_names_its_cause_and_its_remedy(code: int, cluster: Kubernetes) -> None:
    cluster.default = status(code, 'nodes "x" has a problem')

    with pytest.raises(SendError) as raised:
        sent(config_of(cluster), message(REBOOT))

    permanent, by_hand = REFUSALS[code]
    text = str(raised.value)
    assert text.startswith(f'cannot patch the status of the node {NODE}: {code}: nodes "x" has a')
    assert HINTS.get(code, "") in text
    assert raised.value.permanent is permanent
    assert raised.value.by_hand is by_hand


def test_throttled_request_waits_for_the_retry_after(cluster: Kubernetes) -> None:
    cluster.default = Answer(429, (("Retry-After", "17"),), b"Too many requests")

    with pytest.raises(SendError) as raised:
        sent(config_of(cluster), message(REBOOT))

    assert raised.value.retry_after == 17


OTHER_ANSWERS = [
    b"<html><body>Sign in</body></html>",
    b"{}",
    b"[]",
    b"",
    b'{"kind": "Node", "status": null}',
    b'{"kind": "Node", "status": {"conditions": [1]}}',
    b'{"kind": "Node", "status": {"conditions": [{"type": "AzureScheduledEvent", "message": 5}]}}',
]


@pytest.mark.parametrize("answer", OTHER_ANSWERS)
def test_success_of_other_server_is_refused(answer: bytes, cluster: Kubernetes) -> None:
    cluster.default = Answer(200, body=answer)

    with pytest.raises(SendError):
        sent(config_of(cluster), message(REBOOT))


def test_missing_permission_is_named(tmp_path: Path) -> None:
    with Kubernetes(tmp_path, rules=()) as cluster, pytest.raises(SendError) as raised:
        sent(config_of(cluster), message(REBOOT))

    assert 'cannot patch resource "nodes/status" at the cluster scope' in str(raised.value)


def test_wrong_node_name_is_named(cluster: Kubernetes) -> None:
    with pytest.raises(SendError, match='nodes "other" not found '):
        sent(config_of(cluster, node_name="other"), message(REBOOT))


def test_certificate_of_other_ca_is_refused(cluster: Kubernetes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with Kubernetes(other) as stranger:
        cluster.ca_file.write_bytes(stranger.ca_file.read_bytes())

    with pytest.raises(SendError, match="certificate verify failed"):
        sent(config_of(cluster), message(REBOOT))

    assert not cluster.requests


def test_slow_api_server_ends_the_attempt(cluster: Kubernetes) -> None:
    cluster.default = Answer(how="drip")

    # a third for each request, and a quarter of that for the TLS handshake
    with pytest.raises(SendError, match="no complete answer within 5 s") as raised:
        sent(config_of(cluster, timeout="15s"), message(REBOOT))

    assert not raised.value.permanent


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"NODE_NAME": NODE}, "KUBERNETES_SERVICE_HOST"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, "NODE_NAME"),
    ],
)
def test_variable_that_is_missing_outside_a_pod_is_named(
    variables: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=missing):
        make("node", SinkConfig(kubernetes=Settings()), Messages())


VALUES: dict[str, Any] = {"config": {"sinks": {"node": {"kubernetes": {}}}}}
RBAC = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


def test_chart_grants_nothing_without_the_sink() -> None:
    objects = rendered({})

    kinds = {kind for kind, _ in objects}
    pod = objects["DaemonSet", "notbefore"]["spec"]["template"]["spec"]
    assert kinds.isdisjoint(RBAC)
    assert pod["automountServiceAccountToken"] is False
    assert "env" not in pod["containers"][0]


def test_chart_grants_what_the_sink_uses_and_no_more() -> None:
    objects = rendered(VALUES, name="other", namespace="elsewhere")

    for kind in RBAC:
        validate(by_kind(objects, kind))
    account = {"kind": "ServiceAccount", "name": "other", "namespace": "elsewhere"}
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        assert by_kind(objects, kind)["subjects"] == [account]
    assert by_kind(objects, "ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}
    ]
    role = by_kind(objects, "Role")
    assert role["metadata"]["namespace"] == "default"
    assert role["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]


def by_kind(objects: Objects, kind: str) -> Any:
    """Return the only object of a kind."""
    (manifest,) = (manifest for (its_kind, _), manifest in objects.items() if its_kind == kind)
    return manifest


def validate(manifest: Any) -> None:
    """Check an object against the schemas of the oldest and the newest version."""
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.long
def test_agent_in_a_pod_of_the_chart_reaches_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration, the variable and the rules are the chart's; only the paths differ."""
    objects = rendered(VALUES)
    pod = objects["DaemonSet", "notbefore"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    (variable,) = pod["containers"][0]["env"]
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    rules = list(by_kind(objects, "ClusterRole")["rules"])
    for rule in by_kind(objects, "Role")["rules"]:
        rules.append(rule | {"namespace": "default"})
    config = yaml.safe_load(objects["ConfigMap", "notbefore"]["data"]["notbefore.yml"])

    with Kubernetes(tmp_path, rules) as cluster, Simulator() as imds:
        config["sinks"]["node"]["kubernetes"] = {
            "token_file": str(cluster.token_file),
            "ca_file": str(cluster.ca_file),
        }
        monkeypatch.setenv(variable["name"], NODE)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
        imds.set_document(listed("e"))
        with RunningAgent(imds.endpoint, tmp_path / "state", config):
            eventually(lambda: cluster.condition is not None)

            imds.set_document(body(incarnation=2))
            eventually(lambda: len(cluster.described) == 2)
            eventually(lambda: cluster.condition is None)

    assert not cluster.faults
