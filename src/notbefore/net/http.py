"""``Http``: every request except those to IMDS.

It follows no redirects and bounds what it reads. Its errors say whether to try again.

Proxies and CA bundles come from the environment (``HTTPS_PROXY``, ``NO_PROXY``,
``REQUESTS_CA_BUNDLE``), as in requests. A ``.netrc`` file, and a user and password in an address,
are not used.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from requests.utils import select_proxy

from notbefore.errors import SendError
from notbefore.net.addresses import check_proxied
from notbefore.net.connections import Adapter, Deadline
from notbefore.net.failures import REQUEST_ERRORS, forget_frames, host_and_port, innermost_cause
from notbefore.net.response import INFORMATIONAL, HttpResponse, read_response

# a host name may have several addresses: each gets this part of the timeout
CONNECT_SHARE: Final = 4


class Http:
    """Connections that are kept for the next message. Use it in one thread at a time.

    ``timeout``: seconds for a request and its answer. ``guarded``: connect only to public
    addresses.
    """

    def __init__(
        self,
        timeout: float,
        *,
        ca_file: str | None = None,
        cert: str | tuple[str, str] | None = None,
        guarded: bool = False,
    ) -> None:
        self._verify: str | bool = ca_file or True
        self._cert = cert
        self._guarded = guarded
        self._deadline = Deadline(timeout)
        # it sends without a session: no cookies, no redirects, nothing of a .netrc
        self._adapter = Adapter(self._deadline, guarded=guarded)
        self._environment = requests.Session()  # only to read proxies and a CA bundle
        self._settings: dict[str, Any] = {}  # of the environment, by host: reading them takes long

    def post(self, url: str, headers: Mapping[str, str], body: bytes = b"") -> HttpResponse:
        """Send, and return the answer with any status; raises ``SendError`` if there is none."""
        return self._send("POST", url, headers, body)

    def patch(self, url: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        """Send a PATCH request, otherwise as ``post``."""
        return self._send("PATCH", url, headers, body)

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        try:
            with self._deadline.exchange():
                response = self._exchange(method, url, headers, body)
                self._deadline.check()
        except REQUEST_ERRORS as error:
            failure = f"{host_and_port(url)}: {self._reason(error)}"
            forget_frames(error)
            raise SendError(failure) from None

        if response.status in INFORMATIONAL:
            self.close()  # the real answer may still come, and must not answer the next request
        return response

    def close(self) -> None:
        """Close the connections. The next request reads the environment again."""
        self._adapter.close()
        self._deadline.close()
        self._settings.clear()

    def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> HttpResponse:
        request = requests.Request(method, url, {"User-Agent": "notbefore", **headers}, data=body)
        request.auth = _keep_headers
        settings = self._settings_for(url)
        if self._guarded and select_proxy(url, settings["proxies"]) is not None:
            check_proxied(url)

        timeout = (self._deadline.seconds / CONNECT_SHARE, self._deadline.seconds)
        with self._adapter.send(request.prepare(), timeout=timeout, **settings) as response:
            return read_response(response)

    def _settings_for(self, url: str) -> Any:
        """Return the proxies, the CA bundle and the certificate for an address."""
        parts = urlsplit(url)
        host = f"{parts.scheme}://{parts.netloc}"
        if host not in self._settings:
            self._settings[host] = self._environment.merge_environment_settings(
                url, proxies={}, stream=True, verify=self._verify, cert=self._cert
            )
        return self._settings[host]

    def _reason(self, error: Exception) -> str:
        """Return what went wrong, without the address."""
        if self._deadline.passed:
            return f"no complete answer within {round(self._deadline.seconds, 2):g} s"
        cause = innermost_cause(error)
        if isinstance(error, requests.exceptions.ProxyError):
            return f"the proxy: {cause}"
        return cause


def _keep_headers(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Let no user and password of the address replace a header: ``auth`` that changes nothing."""
    return request
