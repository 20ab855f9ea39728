"""``Consumer`` against the tests' Event Hub: no failure loses a record."""

import asyncio
import importlib.metadata
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.eventhub.aio import EventHubProducerClient
from azure.eventhub.amqp import AmqpAnnotatedMessage

from notbefore.config.load import load
from notbefore.config.model import Config
from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub
from notbefore.errors import NotBeforeError
from notbefore.fleet import consumer as consumer_module
from notbefore.fleet import snapshot_store as snapshot_store_module
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.history import History
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.instance_state import InstanceState, state_of
from notbefore.fleet.keeper import Parts
from notbefore.fleet.notification import Notification
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.sdk import READ_IN, namespace_of
from notbefore.fleet.snapshot import Position
from notbefore.fleet.snapshot_store import FileSnapshots, LostPartitionError
from support.agent import eventually
from support.fleet_instance import send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub

# a connection that the SDK forgets is found at the end of the test that opened it
pytestmark = pytest.mark.usefixtures("collected")

A = vm("web_0")
B = vm("data_0", scale_set="data")  # its records are in the other partition


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path, partitions=2) as running_hub:
        yield running_hub


class Failing(FleetOutbox):
    """Fails on the event ``refused``."""

    refused = ""

    def commit(self, partition: str, notification: Notification) -> bytes:
        if notification.change.event.event_id == self.refused:
            raise KeyError("an unforeseen error")
        return super().commit(partition, notification)


def kept_tags(client: Any) -> int:
    """Return how many delivery tags the SDK keeps now."""
    count = 0
    for processor in client._event_processors.values():
        for reader in processor._consumers.values():
            count += len(reader._handler._link._received_delivery_tags)
    return count


def parts_of(
    config: Config, directory: Path, snapshots: FileSnapshots, written: list[bytes], refused: str
) -> Parts:
    """Make the parts of a consumer that appends its records to ``written``."""
    clock = HubClock()
    outbox = Failing(config.routing, lambda: None, clock.now)
    outbox.refused = refused
    return Parts(
        snapshots=snapshots,
        outbox=outbox,
        clock=clock,
        history=History(directory),
        write_record=written.append,
    )


@contextmanager
def consuming(
    directory: Path,
    hub: Hub,
    *,
    refused: str = "",
    snapshots: FileSnapshots | None = None,
    **fleet: Any,
) -> Iterator[tuple[Consumer, list[bytes]]]:
    """Run a consumer in a thread; yield it and the records of its notifications."""
    config = load(write_fleet_config(directory, hub, "http://127.0.0.1:9/", **fleet), {}, {})
    assert config.fleet
    snapshots = snapshots or FileSnapshots(directory / "partitions")
    written: list[bytes] = []
    consumer = Consumer(config.fleet, parts_of(config, directory, snapshots, written, refused))
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield consumer, written
    finally:
        consumer.stop()
        thread.join(60)


@contextmanager
def hanging(consumer: Consumer) -> Iterator[None]:
    """Let the thread of a consumer hang within the ``with``."""
    released = threading.Event()
    loop = consumer._loop
    assert loop is not None
    loop.call_soon_threadsafe(released.wait, 60)
    try:
        yield
    finally:
        released.set()


def test_partition_of_a_corrupt_snapshot_is_read_again(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with consuming(tmp_path, hub) as (_, written):
        send(hub, [report(sender, "announced", sender.name) for sender in (A, B)])
        eventually(lambda: len(written) == 2, patience=60)
    snapshot = min((tmp_path / "partitions").glob("[0-9]"))
    body = bytearray(snapshot.read_bytes())
    body[20] ^= 0xFF
    snapshot.write_bytes(body)

    with consuming(tmp_path, hub, rebalance="1s") as (consumer, written):
        send(hub, [report(sender, "started", sender.name) for sender in (A, B)])
        eventually(lambda: _count(written, b'.started"') == 2, patience=60)
        assert consumer.keeper.figures.errors["fold"] == 0

    assert snapshot.with_name(f"{snapshot.name}.unreadable").exists()
    assert "its snapshot cannot be read" in caplog.text


def _count(records: list[bytes], text: bytes) -> int:
    """Return how many records contain the text."""
    return sum(text in record for record in records)


def test_end_is_reported_when_its_first_reader_was_killed(hub: Hub, tmp_path: Path) -> None:
    with consuming(tmp_path, hub) as _:
        eventually(lambda: len(list((tmp_path / "partitions").glob("?"))) == 2, patience=60)
    # as a kill leaves it
    snapshots = {path: path.read_bytes() for path in (tmp_path / "partitions").glob("?")}
    send(hub, [report(A, kind) for kind in ("announced", "started", "finished")])
    for path, body in snapshots.items():
        path.write_bytes(body)

    with consuming(tmp_path, hub) as (_, written):
        eventually(lambda: len(written) == 3, patience=60)


def test_waiting_records_are_read_before_the_clock_ends_an_event(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with consuming(tmp_path, hub) as (_, written):
        send(hub, [report(A, "announced")])
        eventually(lambda: len(written) == 1, patience=60)
    send(hub, [report(A, kind) for kind in ("started", "finished")])
    monkeypatch.setattr(consumer_module, "WAIT", 0.01)  # shorter than a connection takes
    # the instance has read nothing for two hours
    monkeypatch.setattr(HubClock, "now", lambda _: time.time() + 7200)

    with consuming(tmp_path, hub) as (_, written):
        eventually(lambda: len(written) == 2, patience=60)

    assert _count(written, b"as_far_as_known") == 0


def test_failing_notification_does_not_delay_the_others(hub: Hub, tmp_path: Path) -> None:
    with consuming(tmp_path, hub, refused="E1") as (consumer, written):
        send(hub, [report(A, "announced", event) for event in ("E0", "E1", "E2")])

        eventually(lambda: _count(written, b"E2"), patience=60)
        assert consumer.keeper.figures.errors == {"fold": 1}


class Losing(FileSnapshots):
    """Loses each partition to another instance while ``lost`` is set."""

    lost = False

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        if self.lost:
            raise LostPartitionError(partition)
        await super().write(partition, body, position)

    async def take(self, partition: str) -> bytes:
        if self.lost:
            raise LostPartitionError(partition)
        return await super().take(partition)


def test_lost_partition_sends_nothing_until_reacquired(hub: Hub, tmp_path: Path) -> None:
    snapshots = Losing(tmp_path / "partitions")
    with consuming(tmp_path, hub, snapshots=snapshots, rebalance="1s", takeover="2s") as (
        consumer,
        written,
    ):
        send(hub, [report(A, "announced", "E0")])
        eventually(lambda: len(written) == 1 and len(consumer.keeper.folds) == 2, patience=60)
        (partition,) = [
            fold.name for fold in consumer.keeper.folds if fold.state.position.sequence >= 0
        ]

        snapshots.lost = True
        send(hub, [report(A, "announced", "E1")])
        eventually(lambda: partition not in consumer.keeper.partitions, patience=60)
        send(hub, [report(A, "announced", "E2")])
        assert _count(written, b"E2") == 0

        snapshots.lost = False
        eventually(lambda: _count(written, b"E2"), patience=60)


def test_snapshots_are_written_at_the_end_when_the_hub_is_away(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    snapshot = tmp_path / "partitions" / "0"

    def refuse_connection(*_: object) -> None:
        loops.append(asyncio.get_running_loop())
        raise ConnectionRefusedError

    monkeypatch.setattr(consumer_module, "make_consumer", refuse_connection)
    with consuming(tmp_path, hub) as (consumer, _):
        eventually(lambda: loops, patience=60)
        asyncio.run_coroutine_threadsafe(consumer.keeper.take("0"), loops[0]).result(60)
        snapshot.unlink()

    assert snapshot.exists()


def test_messages_without_octets_are_counted_as_unreadable(hub: Hub, tmp_path: Path) -> None:
    messages = [
        AmqpAnnotatedMessage(value_body={"a": [1]}),
        AmqpAnnotatedMessage(value_body="text"),
        AmqpAnnotatedMessage(sequence_body=[[1, 2], [3]]),
    ]

    async def send_messages() -> None:
        async with EventHubProducerClient.from_connection_string(hub.connection_string()) as client:
            for message in messages:
                await client.send_event(message, partition_key="sub/rg/web")

    with consuming(tmp_path, hub) as (consumer, written):
        asyncio.run(send_messages())
        send(hub, [report(A, "announced")])

        eventually(lambda: written, patience=60)
        eventually(lambda: consumer.keeper.figures.poison.total() == len(messages), patience=60)


def test_sdk_keeps_no_delivery_tags_of_records_that_were_read(hub: Hub, tmp_path: Path) -> None:
    # after an update of the SDK, see that this test still fails without ``forget_tags``
    assert importlib.metadata.version("azure-eventhub") == READ_IN
    with consuming(tmp_path, hub) as (consumer, _):
        # then the SDK has opened the links of both partitions
        eventually(lambda: len(consumer.keeper.folds) == 2, patience=60)

        send(hub, [report(A, "announced")] * 500)
        eventually(lambda: consumer.keeper.figures.records.total() == 500, patience=60)

        # a kept tag takes some 100 bytes for the life of the instance
        eventually(lambda: kept_tags(consumer.client) == 0, patience=60)


def test_lag_of_an_added_partition_is_known(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "CHECK_EVERY", 0.5)
    with consuming(tmp_path, hub) as (consumer, _):
        eventually(lambda: len(consumer.keeper.folds) == 2, patience=60)

        hub.order("resize:3")

        eventually(lambda: consumer.lag.keys() == {"0", "1", "2"}, patience=60)


class NamedSnapshots(FileSnapshots):
    """Records by which names the SDK asks for the owners of partitions."""

    names: tuple[str, ...] = ()

    async def list_ownership(self, *names: str, **options: Any) -> Any:
        self.names = names
        return await super().list_ownership(*names, **options)


def test_namespace_is_that_of_the_sdk(hub: Hub, tmp_path: Path) -> None:
    snapshots = NamedSnapshots(tmp_path / "partitions")
    with consuming(tmp_path, hub, snapshots=snapshots) as (consumer, _):
        eventually(lambda: snapshots.names, patience=60)

        namespace, event_hub, group = snapshots.names
        assert namespace == namespace_of(consumer._config.hub)
        assert f"{namespace}/{event_hub}/{group}/".lower() == snapshots._prefix


@pytest.mark.parametrize("key", ["Endpoint", "endpoint"])
def test_namespace_is_read_from_a_connection_string(key: str) -> None:
    text = f"{key}=sb://fleet.example.net/;SharedAccessKeyName=a;SharedAccessKey=Yg==;EntityPath=c"

    settings = EventHub(connection_string=Secret(text))

    assert namespace_of(settings) == "fleet.example.net"


def test_namespace_is_the_configured_one() -> None:
    settings = EventHub(namespace="fleet.servicebus.windows.net", hub="changes")

    assert namespace_of(settings) == "fleet.servicebus.windows.net"


def test_state_is_made_by_the_thread_that_changes_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with consuming(tmp_path, hub) as (consumer, written):
        send(hub, [report(A, "announced")])
        eventually(lambda: len(written) == 1, patience=60)
        threads: set[str] = set()

        def noted(*arguments: Any) -> InstanceState:
            threads.add(threading.current_thread().name)
            return state_of(*arguments)

        monkeypatch.setattr(consumer_module, "state_of", noted)
        eventually(lambda: len(consumer.state_with_others().waves) == 1, patience=60)
        eventually(lambda: threads, patience=60)

        assert threading.current_thread().name not in threads


def test_last_state_is_shown_when_the_thread_of_the_consumer_hangs(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "STATE_SECONDS", 0.1)
    monkeypatch.setattr(consumer_module, "OTHERS_SECONDS", 0.1)
    with consuming(tmp_path, hub) as (consumer, written):
        send(hub, [report(A, "announced")])
        eventually(lambda: written and len(consumer.state().waves) == 1, patience=60)
        with hanging(consumer):
            state = consumer.state_with_others()

        assert len(state.waves) == 1


def test_open_events_are_unknown_when_the_consumer_hangs(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "STATE_SECONDS", 0.1)
    with consuming(tmp_path, hub) as (consumer, written):
        send(hub, [report(A, "announced")])
        eventually(lambda: len(written) == 1, patience=60)

        with hanging(consumer), pytest.raises(NotBeforeError, match="try again"):
            consumer.open_events("event-1")


def test_events_that_move_to_an_added_partition_end_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "CHECK_EVERY", 0.5)
    monkeypatch.setattr(snapshot_store_module, "READ_OTHERS_EVERY", 0.2)
    vms = [vm(f"set{number}_0", f"set{number}") for number in range(8)]
    with consuming(tmp_path, hub) as (consumer, written):
        send(hub, [report(sender, "announced", f"E-{sender.name}") for sender in vms])
        eventually(lambda: len(written) == len(vms), patience=60)

        hub.order("resize:5")
        eventually(lambda: len(consumer.keeper.folds) == 5, patience=60)
        for kind in ("started", "finished"):
            send(hub, [report(sender, kind, f"E-{sender.name}") for sender in vms])
        eventually(lambda: len(written) == 3 * len(vms), patience=60)
        # no partition has an event any more that it could end a second time
        eventually(lambda: not any(fold.events.open for fold in consumer.keeper.folds), patience=60)

        added = [fold for fold in consumer.keeper.folds if int(fold.name) >= 2]
        assert any(fold.state.position.sequence >= 0 for fold in added)
    changes = [json.loads(line)["azure.scheduled_event.change"] for line in written]
    assert Counter(changes) == {"announced": 8, "started": 8, "finished": 8}


def test_unknown_offset_is_replaced_by_the_start_of_the_window(hub: Hub, tmp_path: Path) -> None:
    with consuming(tmp_path, hub) as (_, written):
        send(hub, [report(A, "announced", f"E{number}") for number in range(5)])
        eventually(lambda: len(written) == 5, patience=60)
    hub.kill()
    # as after a failover to a namespace that has only the first two records
    stored = tmp_path / "hub.changes"
    lines = stored.read_bytes().splitlines(keepends=True)
    stored.write_bytes(b"".join(lines[:2]))
    hub.start()

    with consuming(tmp_path, hub, rebalance="1s") as (_, written):
        send(hub, [report(A, "started", "E4")])

        eventually(lambda: _count(written, b'.started"'), patience=60)
        assert len(written) == 1


def test_first_notification_after_a_quiet_time_is_due_at_once(hub: Hub, tmp_path: Path) -> None:
    send(hub, [report(A, "announced", "OLD")])
    hub.kill()
    an_hour_ago = round((time.time() - 3600) * 1000)
    stored = tmp_path / "hub.changes"
    log = stored.read_text("utf-8")
    stored.write_text(re.sub(r'"t":\d+', f'"t":{an_hour_ago}', log), "utf-8")
    hub.start()
    senders = (A, vm("web_1"))
    with consuming(tmp_path, hub) as (consumer, written):
        eventually(lambda: len(written) == 1 and len(consumer.keeper.folds) == 2, patience=60)

        # both records are in one batch
        send(hub, [report(sender, "announced", "NEW", resources=[A.name]) for sender in senders])

        eventually(lambda: len(written) == 2, patience=60)
        assert len(consumer._parts.outbox.exchange([], {"hook": 2})) == 2


def test_second_reader_without_checkpoints_is_named(hub: Hub, tmp_path: Path) -> None:
    with (
        consuming(tmp_path, hub) as (first, _),
        consuming(tmp_path, hub, snapshots=FileSnapshots(tmp_path)) as (second, _),
    ):
        for consumer in (first, second):
            eventually(partial(_names_another_reader, consumer), patience=60)


def _names_another_reader(consumer: Consumer) -> bool:
    return "another reader uses" in consumer.keeper.hub_trouble


def test_missing_consumer_group_is_named(tmp_path: Path) -> None:
    with Hub(tmp_path, "--group", "other") as hub, consuming(tmp_path, hub) as (consumer, _):
        eventually(lambda: "ConsumerGroups/$Default" in consumer.keeper.hub_trouble, patience=60)
