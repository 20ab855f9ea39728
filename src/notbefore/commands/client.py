"""How the commands ask a running agent: where it is, how its certificate is known, and who asks."""

import argparse
import base64
import http.client
import os
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from notbefore.config.load import load
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.web.access import load_web_config

TIMEOUT: Final = 10.0  # seconds
MAX_PORT: Final = 65_535
END: Final = "-----END CERTIFICATE-----"


class AgentClient(Struct, frozen=True):
    """A running agent as it is asked."""

    url: str
    ca_file: str | None = None  # who vouches for its certificate; default: those whom the system trusts
    own_cert_file: str | None = None  # the agent's own certificate, where it is at hand: that one and no other
    cert_file: str | None = None  # ours
    key_file: str | None = None
    user: str | None = None
    password_file: str | None = None

    def ask(self, path: str) -> dict[str, Any]:
        """GET JSON; raises ``NotBeforeError`` saying what to do when no agent answers, or not what was asked for."""
        connection = self._connection()
        try:
            connection.connect()
            self._check_pin(connection)
            connection.request("GET", urlsplit(self.url).path.rstrip("/") + path, headers=self._headers())
            response = connection.getresponse()
            content = response.read()
        except ssl.SSLError as error:
            raise NotBeforeError(f"{self.url}: no TLS with it ({error}): is --ca-file or --cert-file needed?") from None
        except (OSError, http.client.HTTPException) as error:
            raise NotBeforeError(
                f"no agent answers at {self.url} ({error}): is `notbefore run` running, or is --url needed?"
            ) from None
        finally:
            connection.close()
        return self._read(path, response.status, content)

    def _read(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status == http.client.UNAUTHORIZED:
            raise NotBeforeError(f"{self.url} wants a password: give --user and --password-file, or others")
        try:
            body: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = content[:200].decode("utf-8", "replace").strip()
            raise NotBeforeError(f"{self.url}{path}: HTTP {status}, and no JSON: {said!r}") from None
        if status != http.client.OK:
            reasons = body.get("error") or ": ".join([str(body.get("status", status)), *body.get("reasons", ())])
            raise NotBeforeError(f"{self.url}{path}: {reasons}")
        return body

    def _connection(self) -> http.client.HTTPConnection:
        try:
            address = urlsplit(self.url)
            host, port = address.hostname, address.port
        except ValueError:
            host, port = None, None
        if not host or address.scheme not in ("http", "https"):
            raise ConfigError(f"--url: expected http://HOST:PORT or https://HOST:PORT, got {self.url!r}")
        if address.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._context())

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.own_cert_file is not None:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE  # it is compared as it is, see _check_pin
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:
            raise ConfigError(f"--ca-file, --cert-file, --key-file: {error}") from None
        return context

    def _check_pin(self, connection: http.client.HTTPConnection) -> None:
        """Before anything is said: is this the certificate in the file? It needs no authority, and no dates."""
        if self.own_cert_file is None or not isinstance(connection.sock, ssl.SSLSocket):
            return
        try:
            first = Path(self.own_cert_file).read_bytes().decode("ascii", "replace").split(END)[0]
            own = ssl.PEM_cert_to_DER_cert(first[first.find("-----BEGIN CERTIFICATE-----") :] + END)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.own_cert_file}: no certificate can be read there: {error}") from None
        if connection.sock.getpeercert(binary_form=True) != own:
            raise NotBeforeError(f"{self.url} has another certificate than {self.own_cert_file}: is it this agent?")

    def _headers(self) -> dict[str, str]:
        if self.user is None or self.password_file is None:
            return {}
        try:
            password = Path(self.password_file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--password-file: {error}") from None
        return {"Authorization": "Basic " + base64.b64encode(f"{self.user}:{password}".encode()).decode("ascii")}


def agent_client(options: argparse.Namespace) -> AgentClient:
    """Where the options lead; raises ``ConfigError``."""
    if (options.user is None) != (options.password_file is None):
        raise ConfigError("--user and --password-file belong together")
    names = ("ca_file", "cert_file", "key_file", "user", "password_file")
    given = {name: getattr(options, name) for name in names}
    if options.url is not None:
        return AgentClient(options.url, **given)
    server = load(options.config, os.environ, {}, sending=False).server
    tls = load_web_config(Path(server.web_config_file)).tls_server_config if server.web_config_file else None
    host, _, port = server.listen.rpartition(":")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104 - told apart, not bound
    own = tls.cert_file if tls is not None and options.ca_file is None else None
    return AgentClient(f"{'http' if tls is None else 'https'}://{host}:{port}", own_cert_file=own, **given)
