"""A sink of another package that breaks its contract fails its deliveries, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from notbefore.core.message import Message
from notbefore.courier.plugins import MAX_THREAD, ForeignSink
from notbefore.courier.sink import Receipt, Sink
from notbefore.errors import ConfigError, NotBeforeError, SendError
from support.messages import message

REBOOT = {"EventType": "Reboot"}


class Answering(Sink):
    """A sink that calls a function of the test, which returns a receipt or raises an error."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self.messages: list[Message] = []

    def send(self, message: Message) -> Receipt:
        self.messages.append(message)
        receipt: Receipt = self._answer()
        return receipt


def raising(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def send_error(**fields: Any) -> SendError:
    return SendError("the receiver refused", **fields)


@pytest.mark.parametrize(
    ("returned", "mistake"),
    [
        (None, "None instead of a Receipt"),
        ("ok", "'ok' instead of a Receipt"),
        (Receipt(thread=5), "a Receipt with the thread 5"),  # type: ignore[arg-type]
        (Receipt(repeat="1m"), "a Receipt with the repeat '1m'"),  # type: ignore[arg-type]
        (Receipt(thread="x" * (MAX_THREAD + 1)), "a Receipt with a thread of more than 4000"),
    ],
    ids=["None", "text", "number as thread", "text as pause", "long thread"],
)
def test_wrong_receipt_is_not_sent_again(returned: Any, mistake: str) -> None:
    sink = ForeignSink("gotify", Answering(lambda: returned))

    with pytest.raises(SendError) as refusal:
        sink.send(message(REBOOT))

    assert f"the sink gotify returned {mistake}" in str(refusal.value)
    assert refusal.value.permanent


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (send_error(thread=5), "raised a SendError with the thread 5: the receiver refused"),
        (send_error(retry_after="soon"), "with the retry_after 'soon': the receiver refused"),
        (SystemExit(3), "raised SystemExit: 3"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
        (OSError("no route"), "report it to the author of its package: it raised OSError: no"),
    ],
    ids=["wrong thread", "wrong pause", "exit", "interrupt", "other error"],
)
def test_wrong_error_fails_the_attempt(error: BaseException, mistake: str) -> None:
    sink = ForeignSink("gotify", Answering(raising(error)))

    with pytest.raises(SendError) as failure:
        sink.send(message(REBOOT))

    assert mistake in str(failure.value)
    assert not failure.value.permanent


class UnprintableError(Exception):
    """An error whose text has a bug."""

    def __str__(self) -> str:
        raise TypeError("a bug in the text")


def test_error_without_a_usable_text_is_named_by_its_type() -> None:
    sink = ForeignSink("gotify", Answering(raising(UnprintableError())))

    with pytest.raises(SendError, match=r"it raised .*UnprintableError: <exception str"):
        sink.send(message(REBOOT))


class Unclosable(Sink):
    """A sink whose ``close`` has a bug."""

    def close(self) -> None:
        raise TypeError("a bug")


def test_sink_that_cannot_be_closed_is_reported_to_its_author(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ForeignSink("gotify", Unclosable()).close()

    (line,) = caplog.records
    advice = "the sink gotify is faulty, report it to the author of its package"
    assert line.getMessage() == f"{advice}: it cannot be closed"
    assert "TypeError: a bug" in caplog.text


@pytest.mark.parametrize(
    "error",
    [send_error(retry_after=5.0), ConfigError("the secret's file is missing")],
    ids=["SendError", "ConfigError"],
)
def test_right_error_passes_unchanged(error: NotBeforeError) -> None:
    sink = ForeignSink("gotify", Answering(raising(error)))

    with pytest.raises(NotBeforeError) as failure:
        sink.send(message(REBOOT))

    assert failure.value is error


def test_right_receipt_passes_unchanged() -> None:
    receipt = Receipt(thread="t", repeat=60)

    sink = ForeignSink("gotify", Answering(lambda: receipt))

    assert sink.send(message(REBOOT)) is receipt
