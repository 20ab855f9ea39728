"""Access control: ``Access`` has the web configuration in use, and ``AccessControl`` checks each
request against it.

The file has the format of Prometheus's exporter-toolkit. The file and the certificates that it
names are checked for changes at each handshake and each request. A new version that is wrong, or
that would remove a protection, is not used.
"""

import base64
import hashlib
import ipaddress
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.extras import check_extra
from notbefore.config.model import Server, host_and_port
from notbefore.config.reading import read_struct
from notbefore.config.regular_file import open_file
from notbefore.config.shown import shown
from notbefore.errors import ConfigError
from notbefore.web.app import ANONYMOUS, App, Environ, Response, StartResponse, error, path_of, send

log = logging.getLogger("notbefore.http")

# a file's last change, length and inode; None if it cannot be read
Signature = tuple[int, int, int] | None
TLS_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
PROBES: Final = ("/healthz", "/readyz")  # they need no password, but give no reasons without one
REMEMBERED: Final = 16  # correct logins that are remembered
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="notbefore", charset="UTF-8"')
BUSY: Final = ("Retry-After", "1")
LONGEST_COMPARISON: Final = 2.0  # seconds; the most expensive hash takes one
MAX_COST: Final = 14  # of a bcrypt hash: it takes one second to check a password
MAX_PASSWORD: Final = 72  # bytes; bcrypt ignores the rest
# the 22nd character of the salt carries only two bits
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}", re.ASCII)
# a well-formed hash that no password matches
_DECOY: Final = "$2b${:02d}$" + "notbeforenotbeforenote" + "." * 31


class TlsServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """``tls_server_config``.

    A client's certificate is either not requested, or required and verified.
    """

    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    client_auth_type: Literal["NoClientCert", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS12"

    def __post_init__(self) -> None:
        if (self.client_ca_file is None) != (self.client_auth_type == "NoClientCert"):
            raise ValueError(
                "client_ca_file and client_auth_type: RequireAndVerifyClientCert need each other"
            )

    def context(self) -> ssl.SSLContext:
        """Return the context for a server; raises ``ConfigError`` with the key of the section."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = TLS_VERSIONS[self.min_version]
        context.options |= ssl.OP_NO_RENEGOTIATION
        _check_file("cert_file", self.cert_file)
        _check_file("key_file", self.key_file)
        if self.client_ca_file is not None:
            _check_file("client_ca_file", self.client_ca_file)
        with _mistakes_of(f"cert_file, key_file: {self.cert_file}, {self.key_file}"):
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        if self.client_ca_file is not None:
            with _mistakes_of(f"client_ca_file: {self.client_ca_file}"):
                context.load_verify_locations(self.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@contextmanager
def _mistakes_of(key: str) -> Iterator[None]:
    """Raise an error of a file inside the ``with`` as ``ConfigError`` with the key."""
    try:
        yield
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise ConfigError(f"tls_server_config.{key}: {error}") from None


def _check_file(key: str, file: str) -> None:
    """Raise ``ConfigError`` for a file that cannot be opened, or is not a regular one.

    OpenSSL would wait for the writer of a FIFO.
    """
    with _mistakes_of(f"{key}: {file}"):
        open_file(file).close()


def _no_password() -> str:
    raise ValueError(
        "the key is encrypted, and the agent cannot ask for its password: store it unencrypted"
    )


class WebConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole web configuration file."""

    tls_server_config: TlsServerConfig | None = None
    basic_auth_users: dict[str, str] = {}  # name -> bcrypt hash

    def __post_init__(self) -> None:
        for user, hashed in self.basic_auth_users.items():
            match = _HASH.fullmatch(hashed)
            if not match or not 4 <= int(match[1]) <= MAX_COST:  # noqa: PLR2004 - bcrypt's own lower bound
                # do not show the value: it may be the password itself
                raise ValueError(
                    f"basic_auth_users.{shown(user)}: expected a bcrypt hash ($2b$...) of cost 4 to"
                    f" {MAX_COST}"
                )
            if not user or ":" in user:
                raise ValueError(
                    f"basic_auth_users: {shown(user)!r} begins no valid user name: it has a colon,"
                    " or is empty"
                )

    @property
    def protections(self) -> frozenset[str]:
        """The protections that the file configures: ``TLS``, ``client certificates``,
        ``passwords``.
        """
        tls = self.tls_server_config
        protections: set[str] = set()
        if tls is not None:
            protections.add("TLS")
        if tls is not None and tls.client_ca_file is not None:
            protections.add("client certificates")
        if self.basic_auth_users:
            protections.add("passwords")
        return frozenset(protections)

    @property
    def files(self) -> tuple[str, ...]:
        """The other files that are read: the certificates and the key."""
        tls = self.tls_server_config
        if tls is None:
            return ()
        if tls.client_ca_file is None:
            return tls.cert_file, tls.key_file
        return tls.cert_file, tls.key_file, tls.client_ca_file

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS settings; ``None`` without TLS.

        Raises ``ConfigError``, also if bcrypt is missing.
        """
        if self.basic_auth_users:
            check_extra("web")
        if self.tls_server_config is None:
            return None
        return self.tls_server_config.context()

    def password_fits(self, user: str, password: bytes) -> bool:
        """Whether the password is the user's.

        An unknown user takes as long to check as the most expensive hash.
        """
        import bcrypt  # 1 MiB that only an agent with passwords needs

        hashed = self.basic_auth_users.get(user)
        if hashed is not None:
            return bcrypt.checkpw(password[:MAX_PASSWORD], hashed.encode("ascii"))

        costs = [int(other[4:6]) for other in self.basic_auth_users.values()]
        decoy = _DECOY.format(max(costs))
        bcrypt.checkpw(password[:MAX_PASSWORD], decoy.encode("ascii"))
        return False


def load_web_config(path: Path) -> WebConfig:
    """Read ``server.web_config_file``; raises ``ConfigError``.

    Paths in the file are relative to its directory.
    """
    return read_struct(path, WebConfig)


class Loaded(Struct, frozen=True):
    """The configuration in use.

    It is replaced as a whole, so that two threads that load it cannot mix their values.
    """

    # of the file and of the files that it names, when they were read
    signatures: dict[str, Signature] = {}
    config: WebConfig = WebConfig()
    context: "ssl.SSLContext | None" = None  # of new connections; None without TLS


class Access:
    """Decides who may read, by the present web configuration. Safe for several threads.

    The constructor raises ``ConfigError`` if the file cannot be used.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        names = (
            *server.allowed_hosts,
            "localhost",
            socket.gethostname(),
            host_and_port(server.listen)[0],
        )
        self._hosts = {_bare(name) for name in names if name.strip("[]")}
        self._loaded = Loaded()
        self.failures = 0  # logins with a wrong user or password
        if server.web_config_file is not None:
            self._load(server.web_config_file)

    @property
    def auth_failures(self) -> int | None:
        """Requests with a wrong user or password since the start.

        ``None`` if no password is needed.
        """
        if "passwords" not in self.protections:
            return None
        return self.failures

    @property
    def protections(self) -> frozenset[str]:
        """The protections of the configuration in use."""
        return self._loaded.config.protections

    def check_listen(self) -> list[str]:
        """Return the warnings of ``check_address`` for the configured ``server.listen``.

        A host name has none here: it is checked when the server binds.
        """
        host, _ = host_and_port(self._server.listen)
        if host and not _is_address(host):
            return []
        return self.check_address(host)

    def check_address(self, address: str) -> list[str]:
        """Return warnings about who can read the agent at an address.

        Raises ``ConfigError`` if others reach it without TLS, a password or ``insecure``.
        """
        if _is_address(address) and ipaddress.ip_address(address).is_loopback:
            return []
        if not self._server.insecure and not self.protections:
            reason = "without a host the agent listens on every address"
            if address:
                reason = f"{address} is not loopback"
            raise ConfigError(
                f"server.listen: {reason}, so others can reach it: set server.web_config_file (TLS,"
                " passwords), or server.insecure: true to let everyone read"
            )
        risk = f"everyone who reaches {address or 'this machine'} can read the agent"
        if not self.protections:
            return [f"{risk}: server.insecure is true"]
        if "TLS" not in self.protections:
            return [
                "passwords are sent unencrypted: add tls_server_config to server.web_config_file"
            ]
        if self.protections == {"TLS"}:
            advice = "add basic_auth_users or a client_ca_file to server.web_config_file"
            return [f"{risk} over TLS: {advice}"]
        return []

    def accepts_host(self, host: str) -> bool:
        """Whether the header ``Host`` names this agent.

        With TLS or passwords every name is accepted.

        A foreign web page can make a browser on this machine send requests here under the page's
        own name (DNS rebinding). The browser has no password for that name, and our certificate
        does not match it.
        """
        if self.protections or not host:
            return True
        name = host
        before, _, port = host.rpartition(":")
        if port.isdigit():
            name = before
        name = _bare(name)
        if name in self._hosts or "*" in self._hosts:
            return True
        if name.endswith(".localhost") or _is_address(name.strip("[]")):
            return True
        return any(
            pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self._hosts
        )

    # ---- the file

    def present(self) -> Loaded:
        """Return the configuration in use, after a look at the files."""
        path = self._server.web_config_file
        if path is None or not self._has_changed():
            return self._loaded
        try:
            self._load(path)
        except ConfigError as error:
            log.warning("the new web configuration is not used, the old one stays: %s", error)
        else:
            protections = ", ".join(sorted(self.protections)) or "no protection"
            log.info("web configuration reloaded: %s", protections)
        return self._loaded

    def _has_changed(self) -> bool:
        signatures = self._loaded.signatures
        return any(signature(file) != signatures[file] for file in signatures)

    def _load(self, path: str) -> None:
        """Read the file and its certificates.

        Signatures are taken first, so that a later change is found next time.
        """
        signatures = {path: signature(path)}
        # an unusable file is not read again until it changes, so that it is logged once
        self._loaded = replace(self._loaded, signatures=signatures)
        config = load_web_config(Path(path))
        signatures = signatures | {file: signature(file) for file in config.files}
        self._loaded = replace(self._loaded, signatures=signatures)
        lost = self.protections - config.protections
        if lost:  # a file that is being written may be empty
            raise ConfigError(
                f"{path}: it would remove {', '.join(sorted(lost))}: restart the agent to do that"
            )
        try:
            self._loaded = Loaded(signatures, config, config.context())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def signature(file: str | Path) -> Signature:
    """Return values that change when the file changes; ``None`` if it cannot be read."""
    try:
        status = Path(file).stat()
    except (OSError, ValueError):
        return None
    # not the time of modification, because a copy may keep the old one
    return status.st_ctime_ns, status.st_size, status.st_ino


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bare(host: str) -> str:
    return host.lower().removesuffix(".")


UNAUTHORIZED: Final = error("401 Unauthorized", "a user and a password are required", CHALLENGE)
TOO_MANY_LOGINS: Final = error("429 Too Many Requests", "another password is being checked", BUSY)


class AccessControl:
    """A WSGI application that passes permitted requests to ``app``.

    Passwords are compared with the hashes of the web configuration one at a time, and the last
    correct logins are remembered. A hash of cost 10 takes 70 ms of a core. While one is computed,
    other logins are refused (429), except remembered ones. So a flood of wrong passwords may delay
    a first login, but not a scrape or a person who has logged in before.
    """

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access
        self._key = os.urandom(32)
        self._correct_logins: list[bytes] = []  # digests of them, with this process's key
        self._comparing = threading.Lock()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        refusal = self._refusal(environ)
        if refusal is None:
            return self._app(environ, start_response)
        return send(refusal, environ, start_response)

    def close(self) -> None:
        """Stop comparing: a thread that computes a hash while the interpreter ends would abort the
        process.
        """
        self._comparing.acquire(timeout=LONGEST_COMPARISON)

    def _refusal(self, environ: Environ) -> Response | None:
        config = self._access.present().config
        host = environ.get("HTTP_HOST", "")
        if not self._access.accepts_host(host):
            text = (
                f"{host[:100]!r} is not a name of this agent: if it should be, add it to"
                " server.allowed_hosts"
            )
            return error("421 Misdirected Request", text)
        if not config.basic_auth_users:
            return None
        authorization = environ.get("HTTP_AUTHORIZATION", "")
        if not authorization and path_of(environ) in PROBES:
            environ[ANONYMOUS] = True
            return None
        if not authorization:
            return UNAUTHORIZED
        login = _user_and_password(authorization)
        return self._check(config, login, environ.get("REMOTE_ADDR", ""))

    def _check(
        self, config: WebConfig, login: tuple[str, bytes] | None, address: str
    ) -> Response | None:
        """Return why a login is refused; ``None`` if it is correct."""
        # the digest includes the hash, so that a changed password is not remembered
        digest = self._digest(login, config)
        if digest in self._correct_logins:
            return None
        is_free = self._comparing.acquire(blocking=False)
        if not is_free and login is None:
            return UNAUTHORIZED
        if not is_free:
            return TOO_MANY_LOGINS
        try:
            if login is not None and config.password_fits(*login):
                newest = self._correct_logins[-(REMEMBERED - 1) :]
                self._correct_logins = [*newest, digest]
                return None
            self._access.failures += 1
        finally:
            self._comparing.release()
        log.debug("a failed login from %s", address)
        return UNAUTHORIZED

    def _digest(self, login: tuple[str, bytes] | None, config: WebConfig) -> bytes:
        stored_hash = None
        if login is not None:
            user, _ = login
            stored_hash = config.basic_auth_users.get(user)
        return hashlib.blake2b(repr((login, stored_hash)).encode(), key=self._key).digest()


def _user_and_password(authorization: str) -> tuple[str, bytes] | None:
    """Return the login in a header ``Authorization``; ``None`` if it has none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
        name = user.decode("utf-8")
    except ValueError:
        return None
    if not colon:
        return None
    return name, password
