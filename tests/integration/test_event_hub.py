"""The Event Hub sink against an AMQP peer: every change, keyed and in order.

Every failure in its own words.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from cloudevents.core.bindings.amqp import AMQPMessage, from_amqp_event
from msgspec.structs import replace

from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub, SinkConfig
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.courier.sink import Receipt
from notbefore.errors import SendError
from support.azure import ID, STARTED
from support.hub import Hub, Stored
from support.messages import message, outcomes, recording, sink_of
from support.peers import HttpPeer, Say

# an attempt that is cut off in the middle leaves the SDK's socket to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]

GROUP = "s-1/rg-1/westno"  # subscription, resource group and scale set of the VM that reports


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path) as found:
        yield found


def config(hub: Hub, text: str = "", **fields: Any) -> SinkConfig:
    secret = Secret(text or hub.connection_string())
    return SinkConfig(
        event_hub=EventHub(connection_string=secret, **{"timeout": Duration("60s"), **fields})
    )


def sent(settings: SinkConfig, *messages: Message) -> list[Receipt | SendError]:
    return outcomes(sink_of(settings), *messages)


def failure(settings: SinkConfig) -> SendError:
    (outcome,) = sent(settings)
    assert isinstance(outcome, SendError)
    return outcome


def read(stored: Stored) -> Any:
    """As the official SDK reads it."""
    attributes = {"content-type": stored.content_type}
    return from_amqp_event(AMQPMessage(attributes, dict(stored.properties), stored.body))


def test_changes_arrive_as_cloud_events_keyed_by_the_group_of_their_vm(hub: Hub) -> None:
    one, two, other = message(), message({}, STARTED), message({"EventId": "X-1"})
    assert sent(config(hub), one, other, two) == [Receipt()] * 3
    first, stranger, second = hub.stored
    assert {first.key, second.key, stranger.key} == {GROUP}
    assert first.partition == second.partition
    event = read(first)
    assert event.get_id() == one.record.change_id
    assert event.get_type() == "notbefore.scheduled_event.announced.v1"
    assert event.get_subject() == ID
    assert event.get_source() == one.record.resource_id
    assert event.get_data().items() >= json.loads(one.record.line()).items()
    assert read(second).get_type() == "notbefore.scheduled_event.started.v1"


def test_what_is_cut_off_in_the_middle_is_sent_again_by_the_outbox_alone(hub: Hub) -> None:
    with closing(sink_of(config(hub))) as sink:
        large = recording(message(), body="x" * 200_000)  # several frames
        hub.order(
            "cut:2"
            # the SDK sends a batch twice, whatever its settings are; a third attempt would have
            # success
        )
        with pytest.raises(SendError) as raised:
            sink.send(large)
        assert not raised.value.permanent
        assert hub.stored == []
        assert sink.send(large) == Receipt()
    assert [read(one).get_subject() for one in hub.stored] == [ID]


def test_what_is_too_large_for_the_hub_is_refused_for_good_and_stops_nothing(
    tmp_path: Path,
) -> None:
    with Hub(tmp_path, "--max-message", "9000") as small:
        huge, later = recording(message(), body="x" * 9_000), message({"EventId": "later"})
        refused, arrived = sent(config(small), huge, later)
        assert (isinstance(refused, SendError) and refused.permanent, arrived) == (True, Receipt())
        assert [one.envelope["subject"] for one in small.stored] == ["later"]


REFUSALS = {
    "reject:amqp:not-found": "NotFound",
    "refuse:401": "Status code: 401",
    "noack": "did not answer in time",
    "freeze": "did not answer in time",
}


def test_each_refusal_is_told_in_the_hub_s_own_words_and_may_pass(hub: Hub) -> None:
    for order, said in REFUSALS.items():
        hub.order(order)
        error = failure(config(hub, timeout=Duration("3s" if said.endswith("time") else "60s")))
        assert (said in str(error), error.permanent) == (True, False), order
        hub.order("calm")


def test_tls_is_checked(tmp_path: Path) -> None:
    authority = trustme.CA()
    names = {"127.0.0.1": "", "wrong.example.org": "certificate"}
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, said in names.items():
        certificate = tmp_path / "server.pem"
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(certificate)
        with Hub(tmp_path, "--cert", str(certificate)) as secured:
            text = secured.connection_string().replace(
                f"127.0.0.1:{secured.port}", "right.servicebus.windows.net"
            )
            text = text.removesuffix(";UseDevelopmentEmulator=true")
            options = {
                "endpoint": f"sb://127.0.0.1:{secured.port}",
                "ca_file": str(tmp_path / "ca.pem"),
            }
            (outcome,) = sent(config(secured, text, **options))
            if said:
                assert isinstance(outcome, SendError)
                assert said in str(outcome)
                assert not outcome.permanent
            else:
                assert outcome == Receipt()


def test_the_vm_s_identity_is_enough_and_through_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "s.pem"
    )
    with HttpPeer() as imds, Hub(tmp_path, "--cert", str(tmp_path / "s.pem")) as hub:
        token = {
            "access_token": "a.b.c",
            "expires_in": "3600",
            "resource": "https://eventhubs.azure.net/",
        }
        imds.default = Say(200, (("Content-Type", "application/json"),), json.dumps(token).encode())
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", imds.url)
        where: Any = {"endpoint": f"sb://127.0.0.1:{hub.port}", "ca_file": str(tmp_path / "ca.pem")}
        settings = EventHub(namespace="fleet.servicebus.windows.net", hub="changes", **where)
        assert sent(SinkConfig(event_hub=settings)) == [Receipt()]
        monkeypatch.delenv("AZURE_POD_IDENTITY_AUTHORITY_HOST")
        monkeypatch.setenv("no_proxy", "localhost")
        monkeypatch.setenv("http_proxy", imds.url)  # it would answer as well
        for auth in ("managed_identity", "default"):
            failure(SinkConfig(event_hub=replace(settings, auth=auth, timeout=Duration("2s"))))
        assert len(hub.stored) == len(imds.requests) == 1
