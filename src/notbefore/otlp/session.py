"""``Session``: the ``requests.Session`` that OpenTelemetry's HTTP exporter sends through.

With a plain session the exporter takes a redirect for success, does not read what the receiver rejected, reads an
answer of any size, waits anew for each byte of it, and takes headers and certificates from the environment, whatever
address it is given. This one sends with the HTTP client of the sinks, and keeps what came of it.
"""

import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import requests

from notbefore.config.sinks import OtlpConnection
from notbefore.errors import SendError
from notbefore.otlp.answer import MAX_ANSWER, ContentError, Redact, cause_of

CONTENT_STATUSES: Final = (400, 413, 422)  # what these refuse is what was sent, and not who sends it
KEPT_HEADERS: Final = ("content-type", "content-encoding")  # of those that the exporter gives


class HttpAnswer(Protocol):
    """What the receiver answered."""

    @property
    def status(self) -> int:
        """The status, whatever it is."""

    @property
    def body(self) -> bytes:
        """The body, cut where it is too long."""

    def check(self) -> None:
        """Raise ``SendError``, with its ``retry_after``, unless the status is 2xx."""


class HttpClient(Protocol):
    """``delivery.http.Http``: it follows no redirect, and bounds an answer in size and the whole exchange in time."""

    def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpAnswer:
        """Send within ``timeout`` seconds; raises ``SendError`` where there is no answer."""

    def close(self) -> None:
        """Close the connections."""


class Session(requests.Session):
    """The connection to one receiver."""

    def __init__(self, connection: OtlpConnection, http: HttpClient, redact: Redact) -> None:
        super().__init__()
        self._answer: bytes | Exception | None = None  # None: nothing was sent
        self._connection = connection
        self._http = http
        self._redact = redact
        self._deadline = 0.0

    def begin(self, seconds: float) -> None:
        """The next request may take so long, its answer included."""
        self._answer, self._deadline = None, time.monotonic() + seconds

    def result(self) -> bytes:
        """The body of the answer to the last request; raises why there is none that accepts it."""
        answer, self._answer = self._answer, None
        if isinstance(answer, bytes):
            return answer
        try:
            raise answer or SendError("OpenTelemetry's exporter could not encode it, and sent nothing")
        finally:
            del answer  # it refers to this frame, and with it to what was sent

    def request(self, method: Any, url: Any, *_: Any, data: Any = None, headers: Any = None, **__: Any) -> Any:
        """Send what the exporter has encoded. It drops an exception, and does not try again after one of ours."""
        try:
            self._answer = self._exchange(str(url), data, dict(headers))
        except Exception as error:
            self._answer = error
            raise
        response = requests.Response()
        response.status_code, response.request = 200, requests.Request(method, url).prepare()
        return response

    def _exchange(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        own = {name: secret.reveal() for name, secret in self._connection.headers.items()}  # a file may have changed
        own |= {name: value for name, value in headers.items() if name.lower() in KEPT_HEADERS}
        answer = self._http.post(url, body, own, max(0.001, self._deadline - time.monotonic()))
        text = cause_of(str(answer.status), answer.body, self._redact)
        if answer.status in CONTENT_STATUSES:
            raise ContentError(text, permanent=True)
        try:
            answer.check()
        except SendError as error:
            raise SendError(text, permanent=error.permanent, retry_after=error.retry_after) from None
        if len(answer.body) >= MAX_ANSWER:  # the count of what was rejected may be in the rest
            raise SendError(f"the answer has more than {MAX_ANSWER} bytes")
        return answer.body

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
