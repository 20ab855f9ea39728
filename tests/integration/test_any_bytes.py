"""Readers of input from outside accept or refuse any bytes: a kept corpus and random mixtures."""

import socket
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC
from pathlib import Path
from typing import Any, Final, get_args
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.config.load import load
from notbefore.core.document import MAX_BYTES, MAX_EVENTS, MAX_ID, MAX_RESOURCES, parse
from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Tracked
from notbefore.errors import ConfigError, DocumentError, DocumentReason, ImdsError
from notbefore.imds.answer import MAX_RECEIVED
from notbefore.imds.client import ImdsClient
from notbefore.imds.identity import fetch_vm
from notbefore.web.access import load_web_config
from notbefore.wording.records import record_of
from support.azure import item, observation

CORPUS: Final = Path(__file__).parents[1] / "corpus"
CHUNK: Final = 64 * 1024  # bytes that a socket holds until somebody reads


def document(data: bytes) -> None:
    """Read a document; check its bounds, and that each of its records is one line."""
    try:
        parsed = parse(data)
    except DocumentError as error:
        assert error.reason in get_args(DocumentReason)
        return
    assert len(data) <= MAX_BYTES
    assert len(parsed.events) <= MAX_EVENTS
    assert len({event.key for event in parsed.events}) == len(parsed.events)
    for event in parsed.events:
        assert 0 < len(event.event_id) <= MAX_ID
        assert len(event.resources) <= MAX_RESOURCES
        assert event.not_before is None or event.not_before.tzinfo is UTC
        assert event.duration is None or event.duration >= 0
    for change in diff(Tracked(), parsed, observation(0)).changes:
        line = record_of(change, None).line().decode()
        assert len(line.splitlines()) == 1
        assert not any(_rearranges_text(character) for character in line.rstrip("\n"))


CONTROLS: Final = ("Cc", "Zl", "Zp")  # control characters and line ends
DIRECTION_MARKS: Final = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def _rearranges_text(character: str) -> bool:
    if unicodedata.bidirectional(character) in DIRECTION_MARKS:
        return True
    return unicodedata.category(character) in CONTROLS


@contextmanager
def _client_that_receives(data: bytes) -> Iterator[ImdsClient]:
    """Make a client whose peer sends ``data`` and no more."""
    ours, peer = socket.socketpair()  # the peer stays open: else the request could not be sent
    with peer, mock.patch.object(socket, "create_connection", return_value=ours):
        peer.sendall(data[:CHUNK])
        peer.shutdown(socket.SHUT_WR)
        with closing(ImdsClient("http://127.0.0.1:9")) as client, suppress(ImdsError):
            yield client
    ours.close()


def imds(data: bytes) -> None:
    """Read an HTTP answer as events and as the VM; only an ``ImdsError`` may be raised."""
    with _client_that_receives(data) as client:
        answer = client.get("/metadata/scheduledevents", timeout=2.0)
        assert len(answer.body) <= MAX_RECEIVED
    with _client_that_receives(data) as client:
        assert fetch_vm(client).name


def config(data: bytes) -> None:
    """Read a configuration; a refusal has a printable line for each mistake."""
    _read_as_file(data, _load_config)


def _load_config(path: Path) -> None:
    load(path, {}, {}, sending=False)


def web_config(data: bytes) -> None:
    """Read a web configuration; a refusal has a printable line for each mistake."""
    _read_as_file(data, load_web_config)


def _memory_directory() -> str | None:
    """Return a directory in memory, if there is one: hundreds of files are written."""
    directory = "/dev/shm"  # noqa: S108 - the file's name is random
    if Path(directory).is_dir():
        return directory
    return None


def _read_as_file(data: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.NamedTemporaryFile(dir=_memory_directory()) as file:
        file.write(data)
        file.flush()
        try:
            read(Path(file.name))
        except ConfigError as error:
            assert all(line and line.isprintable() for line in str(error).split("\n"))


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "document": document,
    "imds": imds,
    "config": config,
    "web_config": web_config,
}


def corpus(target: str) -> list[Path]:
    """Return the kept inputs: each of them once reached new code."""
    paths = sorted((CORPUS / target).iterdir())
    assert paths
    return paths


@pytest.mark.parametrize("target", TARGETS)
def test_reader_accepts_or_refuses_each_input_of_the_corpus(target: str) -> None:
    for path in corpus(target):
        try:
            TARGETS[target](path.read_bytes())
        except Exception as error:
            error.add_note(str(path))
            raise


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
def test_reader_accepts_or_refuses_random_mixtures_of_the_corpus(
    target: str, data: st.DataObject
) -> None:
    inputs = st.sampled_from(corpus(target))
    begin = data.draw(inputs).read_bytes()
    end = data.draw(inputs).read_bytes()
    cut = data.draw(st.integers(0, len(begin)))
    resume = data.draw(st.integers(0, len(end)))
    inserted = data.draw(st.binary(max_size=8))

    TARGETS[target](begin[:cut] + inserted + end[resume:])


def lists_and_objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(values, max_size=4)
    objects = st.dictionaries(st.text(max_size=8), values, max_size=4)
    return lists | objects


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
anything = st.recursive(scalars, lists_and_objects, max_leaves=12)
near_item = st.fixed_dictionaries(
    {}, optional={name: anything | st.just(value) for name, value in item().items()}
)
near_document = st.fixed_dictionaries(
    {},
    optional={
        "DocumentIncarnation": anything | st.integers(),
        "Events": anything | st.lists(near_item | anything, max_size=5),
    },
)


@given(near_document)
def test_document_reader_accepts_or_refuses_nearly_valid_documents(near: dict[str, Any]) -> None:
    try:
        encoded = msgspec.json.encode(near)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError):
        return  # lone surrogates cannot even be sent

    document(encoded)
