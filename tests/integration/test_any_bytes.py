"""What must hold for any bytes that come from outside: those of a kept corpus, and what chance
makes of them.
"""

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
from notbefore.imds.answer import MAX_ANSWER
from notbefore.imds.client import ImdsClient
from notbefore.imds.identity import fetch_vm
from notbefore.web.access import load_web_config
from notbefore.wording.records import record_of
from support.azure import item, now

CORPUS: Final = Path(__file__).parents[1] / "corpus"
CHUNK: Final = 64 * 1024  # bytes that a socket holds until somebody reads


def document(data: bytes) -> None:
    """A document is read or refused, within its bounds, and each record of it is one line."""
    try:
        found = parse(data)
    except DocumentError as error:
        assert error.reason in get_args(DocumentReason)
        return
    assert len(data) <= MAX_BYTES
    assert len(found.events) <= MAX_EVENTS
    assert len({event.key for event in found.events}) == len(found.events)
    for event in found.events:
        assert 0 < len(event.event_id) <= MAX_ID
        assert len(event.resources) <= MAX_RESOURCES
        assert event.not_before is None or event.not_before.tzinfo is UTC
        assert event.duration is None or event.duration >= 0
    for change in diff(Tracked(), found, now(0)).changes:
        line = record_of(change, None).line().decode()
        assert len(line.splitlines()) == 1
        assert not any(map(_rearranges, line.rstrip("\n")))


def _rearranges(character: str) -> bool:
    """A control character, a line end, or a mark that changes the direction of text."""
    turning = unicodedata.bidirectional(character) in (
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    )
    return turning or unicodedata.category(character) in ("Cc", "Zl", "Zp")


@contextmanager
def _saying(data: bytes) -> Iterator[ImdsClient]:
    """A client whose peer says ``data`` and hangs up."""
    ours, peer = socket.socketpair()  # the peer stays open: else the request could not be sent
    with peer, mock.patch.object(socket, "create_connection", return_value=ours):
        peer.sendall(data[:CHUNK])
        peer.shutdown(socket.SHUT_WR)
        with closing(ImdsClient("http://127.0.0.1:9")) as client, suppress(ImdsError):
            yield client
    ours.close()


def imds(data: bytes) -> None:
    """An HTTP answer is a body within its bound, or an ``ImdsError``; so is who the VM is."""
    with _saying(data) as client:
        answer = client.get("/metadata/scheduledevents", timeout=2.0)
        assert len(answer.body) <= MAX_ANSWER
    with _saying(data) as client:
        assert fetch_vm(client).name


def config(data: bytes) -> None:
    """A configuration is taken, or is refused with a line for each mistake."""
    _in_file(data, lambda path: load(path, {}, {}, sending=False))


def web_config(data: bytes) -> None:
    """As ``config``, for the file of the listener."""
    _in_file(data, load_web_config)


def _in_file(data: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:  # noqa: S108 - memory
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
    """Inputs that once reached new code."""
    kept = sorted((CORPUS / target).iterdir())
    assert kept
    return kept


@pytest.mark.parametrize("target", TARGETS)
def test_what_must_hold_for_any_bytes_holds_for_the_corpus(target: str) -> None:
    for path in corpus(target):
        try:
            TARGETS[target](path.read_bytes())
        except Exception as error:
            error.add_note(str(path))
            raise


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
def test_and_for_what_chance_makes_of_it(target: str, data: st.DataObject) -> None:
    begin, end = (data.draw(st.sampled_from(corpus(target))).read_bytes() for _ in range(2))
    cut, resume = data.draw(st.integers(0, len(begin))), data.draw(st.integers(0, len(end)))
    TARGETS[target](begin[:cut] + data.draw(st.binary(max_size=8)) + end[resume:])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
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
def test_and_for_a_document_that_is_nearly_right(near: dict[str, Any]) -> None:
    try:
        encoded = msgspec.json.encode(near)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError):
        return  # lone surrogates cannot even be sent
    document(encoded)
