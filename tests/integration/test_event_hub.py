"""The Event Hub sink against an AMQP server: it sends each change, keyed and in order, and quotes
the reason of each failure.
"""

import json
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

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
from support.agent import PATIENCE, eventually
from support.azure import ID, STARTED
from support.hub import Hub, Stored
from support.messages import message, outcomes, sink_of, with_record_fields
from support.peers import Answer, HttpPeer

# a connection that the SDK forgets is found at the end of the test that opened it
pytestmark = pytest.mark.usefixtures("collected")

GROUP = "s-1/rg-1/westno"  # subscription, resource group and scale set of the VM that reports


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path) as running_hub:
        yield running_hub


def config(hub: Hub, connection_string: str = "", **fields: Any) -> SinkConfig:
    secret = Secret(connection_string or hub.connection_string())
    fields.setdefault("timeout", Duration("60s"))
    return SinkConfig(event_hub=EventHub(connection_string=secret, **fields))


def sent(settings: SinkConfig, *messages: Message) -> list[Receipt | SendError]:
    return outcomes(sink_of(settings), *messages)


def failure(settings: SinkConfig) -> SendError:
    (outcome,) = sent(settings)
    assert isinstance(outcome, SendError)
    return outcome


def read(stored: Stored) -> Any:
    """Read an event with the official SDK of CloudEvents."""
    attributes = {"content-type": stored.content_type}
    return from_amqp_event(AMQPMessage(attributes, dict(stored.properties), stored.body))


def test_changes_arrive_as_cloud_events_keyed_by_their_vms_group(hub: Hub) -> None:
    announced = message()
    started = message({}, STARTED)
    other = message({"EventId": "X-1"})

    assert sent(config(hub), announced, other, started) == [Receipt()] * 3

    stored_announced, stored_other, stored_started = hub.stored
    assert {stored_announced.key, stored_other.key, stored_started.key} == {GROUP}
    assert stored_announced.partition == stored_started.partition
    event = read(stored_announced)
    assert event.get_id() == announced.record.change_id
    assert event.get_type() == "notbefore.scheduled_event.announced.v1"
    assert event.get_subject() == ID
    assert event.get_source() == announced.record.resource_id
    assert event.get_data().items() >= json.loads(announced.record.line()).items()
    assert read(stored_started).get_type() == "notbefore.scheduled_event.started.v1"


def test_interrupted_message_is_not_repeated_by_the_sdk(hub: Hub) -> None:
    with closing(sink_of(config(hub))) as sink:
        large = with_record_fields(message(), body="x" * 200_000)  # several frames
        # The SDK sends a batch twice, whatever its settings are. A third attempt would succeed.
        hub.order("cut:2")

        with pytest.raises(SendError) as raised:
            sink.send(large)
        assert not raised.value.permanent
        assert hub.stored == []

        assert sink.send(large) == Receipt()

    (stored,) = hub.stored
    assert read(stored).get_subject() == ID


def test_oversized_message_is_refused_for_good_and_the_next_arrives(
    tmp_path: Path,
) -> None:
    with Hub(tmp_path, "--max-message", "9000") as small:
        huge = with_record_fields(message(), body="x" * 9_000)
        later = message({"EventId": "later"})

        refused, arrived = sent(config(small), huge, later)

        assert isinstance(refused, SendError)
        assert refused.permanent
        assert arrived == Receipt()
        (stored,) = small.stored
        assert stored.envelope["subject"] == "later"


@pytest.mark.parametrize(
    ("order", "reason", "timeout"),
    [
        ("reject:amqp:not-found", "NotFound", "60s"),
        ("refuse:401", "Status code: 401", "60s"),
        ("noack", "did not answer in time", "3s"),
        ("freeze", "did not answer in time", "3s"),
    ],
)
def test_refusal_of_the_hub_is_quoted_and_temporary(
    hub: Hub, order: str, reason: str, timeout: str
) -> None:
    hub.order(order)

    error = failure(config(hub, timeout=Duration(timeout)))

    assert reason in str(error)
    assert not error.permanent


@contextmanager
def hub_with_certificate(directory: Path, name: str) -> Iterator[Hub]:
    """Start a hub with a certificate for ``name``; its authority's is in ``ca.pem``."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    certificate = directory / "server.pem"
    authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(certificate)
    with Hub(directory, "--cert", str(certificate)) as hub:
        yield hub


def config_with_tls(hub: Hub, directory: Path) -> SinkConfig:
    connection_string = hub.connection_string().removesuffix(";UseDevelopmentEmulator=true")
    return config(
        hub,
        connection_string.replace(f"127.0.0.1:{hub.port}", "right.servicebus.windows.net"),
        endpoint=f"sb://127.0.0.1:{hub.port}",
        ca_file=str(directory / "ca.pem"),
    )


def test_sink_sends_over_tls_when_the_certificate_is_right(tmp_path: Path) -> None:
    with hub_with_certificate(tmp_path, "127.0.0.1") as hub:
        (outcome,) = sent(config_with_tls(hub, tmp_path))

    assert outcome == Receipt()


def test_certificate_of_another_name_is_a_temporary_failure(tmp_path: Path) -> None:
    with hub_with_certificate(tmp_path, "wrong.example.org") as hub:
        error = failure(config_with_tls(hub, tmp_path))

    assert "certificate" in str(error)
    assert not error.permanent


@pytest.fixture
def imds_with_token() -> Iterator[HttpPeer]:
    token = {
        "access_token": "a.b.c",
        "expires_in": "3600",
        "resource": "https://eventhubs.azure.net/",
    }
    headers = (("Content-Type", "application/json"),)
    with HttpPeer() as imds:
        imds.default = Answer(200, headers, json.dumps(token).encode())
        yield imds


def settings_with_identity(hub: Hub, directory: Path) -> EventHub:
    return EventHub(
        namespace="fleet.servicebus.windows.net",
        hub="changes",
        endpoint=f"sb://127.0.0.1:{hub.port}",
        ca_file=str(directory / "ca.pem"),
    )


def test_sink_authenticates_with_the_identity_of_the_vm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imds_with_token: HttpPeer
) -> None:
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", imds_with_token.url)
    with hub_with_certificate(tmp_path, "127.0.0.1") as hub:
        settings = replace(settings_with_identity(hub, tmp_path), timeout=Duration("60s"))

        assert sent(SinkConfig(event_hub=settings)) == [Receipt()]

        assert len(hub.stored) == 1
        assert len(imds_with_token.requests) == 1


@pytest.mark.parametrize("auth", ["managed_identity", "default"])
def test_sink_asks_no_proxy_for_the_identity_of_the_vm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    imds_with_token: HttpPeer,
    auth: Literal["managed_identity", "default"],
) -> None:
    monkeypatch.setenv("no_proxy", "localhost")
    monkeypatch.setenv("http_proxy", imds_with_token.url)  # this proxy would answer with a token
    with hub_with_certificate(tmp_path, "127.0.0.1") as hub:
        settings = replace(settings_with_identity(hub, tmp_path), auth=auth, timeout=Duration("2s"))

        failure(SinkConfig(event_hub=settings))

        assert not hub.stored
        assert not imds_with_token.requests


def test_connection_that_never_answers_is_closed_after_the_attempt(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with (
        listening() as listener,
        ThreadPoolExecutor() as server,
        closing(sink_of(silent_hub(listener, tmp_path / "ca.pem"))) as sink,
    ):
        accepted = server.submit(accept, listener, context)

        def attempt() -> bool:
            with pytest.raises(SendError, match="did not answer in time"):
                sink.send(message())
            return accepted.done()

        eventually(attempt)  # on a busy machine, an attempt may end before it has a connection

        with accepted.result() as connection:
            connection.settimeout(PATIENCE)
            with suppress(ConnectionResetError, ssl.SSLEOFError):
                while connection.recv(4096):
                    continue


def silent_hub(listener: socket.socket, authority: Path) -> SinkConfig:
    port = listener.getsockname()[1]
    text = f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=me;SharedAccessKey=eHl6"
    settings = EventHub(
        connection_string=Secret(f"{text};EntityPath=changes"),
        endpoint=f"sb://127.0.0.1:{port}",
        ca_file=str(authority),
        timeout=Duration("1500ms"),
    )
    return SinkConfig(event_hub=settings)


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        yield listener


def accept(listener: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Accept the first connection whose client stays until the end of the handshake."""
    while True:
        connection, _ = listener.accept()
        with suppress(OSError):
            return context.wrap_socket(connection, server_side=True)
        connection.close()
