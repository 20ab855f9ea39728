"""``AgentClient``: how the commands ask a running agent. Its address, its certificate, and the password."""

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
from notbefore.config.model import Server, host_and_port
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.web.access import load_web_config

TIMEOUT: Final = 10.0  # seconds
USUAL_PORT: Final = 10169
END: Final = "-----END CERTIFICATE-----"


class AgentClient(Struct, frozen=True):
    """Asks one agent over HTTP or HTTPS."""

    url: str
    ca_file: str | None = None  # PEM; default: the certificate authorities that the system trusts
    own_cert_file: str | None = None  # the agent's own certificate, where its file is known: no other is accepted
    cert_file: str | None = None  # the client certificate of this command
    key_file: str | None = None
    user: str | None = None
    password_file: str | None = None

    def ask(self, path: str) -> dict[str, Any]:
        """GET a path and return its JSON object; raises ``NotBeforeError``, which says what to do."""
        connection = self._connection()
        try:
            connection.connect()
            self._check_pin(connection)
            connection.request("GET", urlsplit(self.url).path.rstrip("/") + path, headers=self._headers())
            response = connection.getresponse()
            content = response.read()
        except ssl.SSLError as error:
            raise NotBeforeError(f"{self.url}: TLS failed ({error}): is --ca-file or --cert-file needed?") from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or error
            raise NotBeforeError(
                f"no agent answers at {self.url} ({why}): is `notbefore run` running (of a fleet, `notbefore fleet`),"
                " or is --url needed?"
            ) from None
        finally:
            connection.close()
        return self._read(path, response.status, content)

    def _read(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status == http.client.UNAUTHORIZED:
            raise NotBeforeError(f"{self.url} requires a user and a password: check --user and --password-file")
        try:
            body: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = content[:200].decode("utf-8", "replace").strip()
            raise NotBeforeError(f"{self.url}{path}: HTTP {status}, and the body is not JSON: {text!r}") from None
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
                context.verify_mode = ssl.CERT_NONE  # _check_pin compares it with the file instead
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # which of the files it was is not said
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise ConfigError(f"{files}: expected a certificate and its key (PEM): {error.strerror or error}") from None
        return context

    def _check_pin(self, connection: http.client.HTTPConnection) -> None:
        """Before anything is sent: is this the certificate in the file? Issuer and dates do not matter then."""
        if self.own_cert_file is None or not isinstance(connection.sock, ssl.SSLSocket):
            return
        try:
            first = Path(self.own_cert_file).read_bytes().decode("ascii", "replace").split(END)[0]
            own = ssl.PEM_cert_to_DER_cert(first[first.find("-----BEGIN CERTIFICATE-----") :] + END)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.own_cert_file}: cannot read a certificate: {error}") from None
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


def add_agent(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, ``--url`` and how to log in: what ``agent_client`` reads."""
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="the agent's configuration: it names the address"
    )
    parser.add_argument("--url", metavar="URL", help="the address of the agent, http://HOST:PORT or https://HOST:PORT")
    parser.add_argument("--ca-file", metavar="FILE", help="the certificate authority of the agent's certificate (PEM)")
    parser.add_argument("--cert-file", metavar="FILE", help="the client certificate for the agent (PEM)")
    parser.add_argument("--key-file", metavar="FILE", help="the key of --cert-file, where it is not in the same file")
    parser.add_argument("--user", metavar="NAME", help="the user, for an agent that requires a password")
    parser.add_argument("--password-file", metavar="FILE", help="a file that holds the password")


def agent_client(options: argparse.Namespace) -> AgentClient:
    """Return the client for the agent that the options name; raises ``ConfigError``."""
    if (options.user is None) != (options.password_file is None):
        raise ConfigError("--user and --password-file belong together")
    names = ("ca_file", "cert_file", "key_file", "user", "password_file")
    given = {name: getattr(options, name) for name in names}
    if options.url is not None:
        return AgentClient(options.url, **given)
    return local_agent(load(options.config, os.environ, {}, sending=False).server, **given)


def local_agent(server: Server, **given: str | None) -> AgentClient:
    """Return the client for the agent that serves as ``server`` says; ``given``: the other fields of the client."""
    tls = load_web_config(Path(server.web_config_file)).tls_server_config if server.web_config_file else None
    host, port = host_and_port(server.listen)
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    host = f"[{host}]" if ":" in host else host
    own = tls.cert_file if tls is not None and given.get("ca_file") is None else None
    return AgentClient(f"{'http' if tls is None else 'https'}://{host}:{port}", own_cert_file=own, **given)
