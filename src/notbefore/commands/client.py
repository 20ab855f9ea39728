"""``AgentClient``: sends the requests of commands to a running agent."""

import argparse
import hashlib
import ssl
from pathlib import Path
from typing import Any, Final

import msgspec
import requests
from msgspec import Struct
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.exceptions import SSLError

from notbefore.commands.options import add_config_file, load_configuration
from notbefore.config.model import host_and_port, local_url
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.web.access import load_web_config

TIMEOUT: Final = 10.0  # seconds
BEGIN: Final = "-----BEGIN CERTIFICATE-----"
END: Final = "-----END CERTIFICATE-----"
ADDRESS: Final = {  # option -> metavar, help; {owner} is the agent, or an instance of a fleet
    "--url": ("URL", "the address of {owner}, http://HOST:PORT or https://HOST:PORT"),
    "--ca-file": ("FILE", "the certificate authority of {owner}'s certificate (PEM)"),
    "--cert-file": ("FILE", "the client certificate for {owner} (PEM)"),
    "--key-file": ("FILE", "the key of --cert-file, if it is not in the same file"),
    "--user": ("NAME", "the user, if {owner} requires a password"),
    "--password-file": ("FILE", "a file that contains the password"),
}


class _TlsAdapter(HTTPAdapter):
    """Checks another host name than that of the URL, or a fingerprint instead of an authority."""

    def __init__(self, name: str | None, fingerprint: str | None) -> None:
        self._name = name
        self._fingerprint = fingerprint
        super().__init__(pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *arguments: Any, **settings: Any) -> None:
        """Make the connection pool; the constructor of ``HTTPAdapter`` calls this."""
        super().init_poolmanager(
            *arguments,
            **settings,
            server_hostname=self._name,
            assert_fingerprint=self._fingerprint,
        )


class AgentClient(Struct, frozen=True):
    """Sends requests to one agent over HTTP or HTTPS."""

    url: str
    options: argparse.Namespace  # certificates, user and password: see ``add_agent``
    # the agent's own certificate, if its file is known: then no other one is accepted
    agent_cert_file: str | None = None
    # the host name that TLS checks, if ``url`` has an address instead of the name
    name: str | None = None

    def ask(self, path: str) -> dict[str, Any]:
        """GET a path and return its JSON object.

        Raises a ``NotBeforeError`` that says what to do.
        """
        try:
            with self._session() as session:
                url = self.url.rstrip("/") + path
                response = session.get(url, timeout=TIMEOUT, allow_redirects=False)
        except ValueError:  # from requests, from urllib3, or from the encoding of the name
            raise ConfigError(
                f"--url: expected http://HOST:PORT or https://HOST:PORT, got {self.url!r}"
            ) from None
        except SSLError as error:
            raise NotBeforeError(
                f"{self.url}: TLS failed ({error}): is it this agent, and is --ca-file or"
                " --cert-file needed?"
            ) from None
        except requests.RequestException as error:
            raise NotBeforeError(
                f"no agent answers at {self.url} ({type(error).__name__}): is `notbefore run`"
                " running (for a fleet, `notbefore fleet`), and does --url name its address,"
                " http:// or https://?"
            ) from None
        except OSError as error:  # a named file does not exist
            raise ConfigError(
                f"expected the file of a certificate, a key or a password: {error}"
            ) from None
        return self._read(path, response.status_code, response.content)

    def _session(self) -> requests.Session:
        options = self.options
        has_tls_options = options.ca_file or options.cert_file or options.key_file
        if has_tls_options and self.url.lower().startswith("http:"):
            raise ConfigError(f"{self.url}: --ca-file, --cert-file and --key-file need https://")

        session = requests.Session()
        session.trust_env = False  # no proxy
        session.verify = options.ca_file or True
        fingerprint = None
        if self.agent_cert_file is not None:
            # issuer, name and dates do not matter: the fingerprint is compared instead
            session.verify = False
            fingerprint = _fingerprint(Path(self.agent_cert_file))
        session.mount("https://", _TlsAdapter(self.name, fingerprint))

        if options.cert_file is not None:
            session.cert = (options.cert_file, options.key_file or options.cert_file)
        if options.user is not None:
            password = Path(options.password_file).read_bytes().rstrip(b"\r\n")
            session.auth = HTTPBasicAuth(options.user.encode(), password)
        return session

    def _read(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status == requests.codes.unauthorized:
            raise NotBeforeError(
                f"{self.url} requires a user and a password: check --user and --password-file"
            )
        try:
            body: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = content[:200].decode("utf-8", "replace").strip()
            raise NotBeforeError(
                f"{self.url}{path}: HTTP {status}, and the body is not JSON: {text!r}. Is --url the"
                " address of an agent?"
            ) from None
        if status == requests.codes.not_found:
            hint = "a fleet instance? Use `events --fleet`"
            if "/fleet/" in path:
                hint = "an agent, not a fleet instance?"
            raise NotBeforeError(f"{self.url}{path}: HTTP 404: is this {hint}")
        if status != requests.codes.ok:
            reasons = [str(body.get("status", status)), *body.get("reasons", ())]
            text = body.get("error") or ": ".join(reasons)
            raise NotBeforeError(f"{self.url}{path}: {text}")
        return body


def _fingerprint(path: Path) -> str:
    """Return the SHA-256 of the first certificate in a file (PEM); raises ``ConfigError``."""
    try:
        content = path.read_bytes().decode("ascii", "replace")
        up_to_first, _, _ = content.partition(END)
        begin = up_to_first.find(BEGIN)
        certificate = ssl.PEM_cert_to_DER_cert(up_to_first[begin:] + END)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot read a certificate: {error}. With --ca-file, the file is not needed"
        ) from None
    return hashlib.sha256(certificate).hexdigest()


def add_agent(parser: argparse.ArgumentParser, owner: str = "the agent") -> None:
    """Add the options that ``agent_client`` reads: CONFIG, and those of ``add_address``."""
    add_config_file(parser, f"the configuration of {owner}, which names its address")
    add_address(parser, owner)


def add_address(parser: argparse.ArgumentParser, owner: str = "the agent") -> None:
    """Add ``--url``, certificates, user and password."""
    for option, (value, text) in ADDRESS.items():
        parser.add_argument(option, metavar=value, help=text.format(owner=owner))


def agent_client(options: argparse.Namespace) -> AgentClient:
    """Return the client for the agent that the options name; raises ``ConfigError``."""
    if (options.user is None) != (options.password_file is None):
        raise ConfigError("--user and --password-file belong together")
    if options.url is not None:
        return AgentClient(options.url, options)
    server = load_configuration(options, sending=False).server
    tls = None
    if server.web_config_file:
        tls = load_web_config(Path(server.web_config_file)).tls_server_config
    agent_cert_file = None
    if tls is not None and options.ca_file is None:
        agent_cert_file = tls.cert_file
    host, port = host_and_port(server.listen)
    return AgentClient(local_url(host, port, tls=tls is not None), options, agent_cert_file)
