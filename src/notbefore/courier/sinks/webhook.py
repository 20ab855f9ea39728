"""POST of the record as JSON, or of the text of a template; signed if a secret is configured.

``X-Notbefore-Delivery-Id`` is the same from every VM that sends the delivery, and for each attempt.
``Idempotency-Key``, the header of the IETF's draft, has the same value.

``X-Notbefore-Signature: t=<Unix seconds>,v1=<hex>``: HMAC-SHA256, keyed with the secret, over
``<t>.`` and the body.
"""

import hashlib
import hmac
import time
from typing import Any

from notbefore.config.sinks import JSON_TYPE, Messages, Webhook
from notbefore.core.message import Message
from notbefore.core.record import json_line
from notbefore.courier.http_sink import HttpSink, headers_of
from notbefore.courier.sink import Receipt
from notbefore.net.http import Http


class Sink(HttpSink):
    """One address that gets the records."""

    def __init__(self, _name: str, settings: Webhook, messages: Messages) -> None:
        self._url = settings.url.reveal()
        self._content_type = settings.content_type
        self._headers = headers_of(settings)
        for name in list(self._headers):
            if name.lower() == "content-type":
                del self._headers[name]  # it is that of the template's text
        self._dedup_key = settings.dedup_key
        self._secret: bytes | None = None
        if settings.secret is not None:
            self._secret = settings.secret.reveal().encode()
        cert: str | tuple[str, str] | None = settings.cert_file
        if settings.cert_file is not None and settings.key_file is not None:
            cert = (settings.cert_file, settings.key_file)
        guarded = not settings.allow_private
        super().__init__(
            messages,
            Http(settings.timeout.seconds, ca_file=settings.ca_file, cert=cert, guarded=guarded),
        )

    def send(self, message: Message) -> Receipt:
        """POST the request; a 2xx answer accepts it, unless it is a web page."""
        if message.templated.request is not None:
            body = message.templated.request.encode()
            content_type = self._content_type
        else:
            body = json_line(self._values(message))
            content_type = JSON_TYPE

        headers = self._headers | {
            "Content-Type": content_type,
            "X-Notbefore-Delivery-Id": message.delivery_id,
            "Idempotency-Key": f'"{message.delivery_id}"',  # a string of RFC 8941, hence the quotes
        }
        if self._secret is not None:
            headers["X-Notbefore-Signature"] = sign(self._secret, body, int(time.time()))
        self._http.post(self._url, headers, body).check()
        if self._dedup_key is None:
            return Receipt()
        return Receipt(thread=message.alert_key)

    def _values(self, message: Message) -> dict[str, Any]:
        """Return the fields of the built-in body: the record, and facts about the delivery."""
        delivery = {
            "id": message.delivery_id,
            "kind": message.kind,
            "severity": message.severity,
            "note": message.note,
        }
        fields = {f"notbefore.delivery.{name}": value for name, value in delivery.items() if value}
        values: dict[str, Any] = {**message.content.flat(), **fields}
        if self._dedup_key is not None:
            values[self._dedup_key] = message.alert_key
        return values


def sign(secret: bytes, body: bytes, seconds: int) -> str:
    """Return the signature header for a body sent at that Unix time."""
    digest = hmac.new(secret, f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"
