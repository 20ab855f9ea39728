"""``HttpSink``: the base class of the sinks that send messages by HTTP."""

import base64

from notbefore.config.sinks import Alertmanager, Messages, Webhook
from notbefore.courier.sink import Sink
from notbefore.net.http import Http


class HttpSink(Sink):
    """A sink with its connections, which are kept for the next message."""

    def __init__(self, messages: Messages, http: Http) -> None:
        self._messages = messages
        self._http = http

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def headers_of(settings: Webhook | Alertmanager) -> dict[str, str]:
    """Return the configured headers, with that of the login."""
    headers = {name: value.reveal() for name, value in settings.headers.items()}
    if settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token.reveal()}"
    elif settings.username is not None and settings.password is not None:
        login = f"{settings.username}:{settings.password.reveal()}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    return headers
