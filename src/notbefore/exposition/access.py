"""Who may ask: the web configuration (the form of Prometheus's exporter-toolkit), passwords, and names of this host.

The file and the certificates it names are looked at again with each handshake and each request. What is wrong, or would
take a protection away that was there, is not taken over.
"""

import ipaddress
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct, field

from notbefore.errors import ConfigError
from notbefore.exposition.tls import TlsServerConfig, make_context

MAX_COST: Final = 14  # of a bcrypt hash: a second of computing for each request
MAX_PASSWORD: Final = 72  # bytes; bcrypt reads no more
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}", re.ASCII)
_DECOY: Final = "$2b${:02d}$" + "notbeforenotbeforenote" + "." * 31  # the form of a hash, and nobody's

log = logging.getLogger("notbefore.http")


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Headers(_Section, frozen=True):
    """``http_server_config.headers``; an empty one leaves ours as it is."""

    content_security_policy: str = field(default="", name="Content-Security-Policy")
    x_frame_options: Literal["", "deny", "sameorigin"] = field(default="", name="X-Frame-Options")
    x_content_type_options: Literal["", "nosniff"] = field(default="", name="X-Content-Type-Options")
    x_xss_protection: str = field(default="", name="X-XSS-Protection")
    strict_transport_security: str = field(default="", name="Strict-Transport-Security")

    def __post_init__(self) -> None:
        if any(not value.isascii() or not value.isprintable() for _, value in self.given()):
            raise ValueError("expected visible ASCII in the headers")

    def given(self) -> list[tuple[str, str]]:
        """Names and values."""
        names = zip(self.__struct_encode_fields__, self.__struct_fields__, strict=True)
        return [(name, getattr(self, key)) for name, key in names if getattr(self, key)]


class HttpServerConfig(_Section, frozen=True):
    """``http_server_config``. ``http2`` is read for the sake of files that hold it: this server speaks HTTP/1.1."""

    http2: bool = True
    headers: Headers = Headers()


class WebConfig(_Section, frozen=True):
    """All of the file."""

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = HttpServerConfig()
    basic_auth_users: dict[str, str] = {}  # name -> bcrypt hash

    def __post_init__(self) -> None:
        for user, hashed in self.basic_auth_users.items():
            found = _HASH.fullmatch(hashed)
            if not found or not 4 <= int(found[1]) <= MAX_COST:  # noqa: PLR2004 - bcrypt's own lower bound
                # the hash is no secret to shout, and may be the password itself
                raise ValueError(f"basic_auth_users.{user}: expected a bcrypt hash ($2b$...) of cost 4 to {MAX_COST}")
            if not user or ":" in user:
                raise ValueError(f"basic_auth_users: {user!r} cannot be a user's name")

    @property
    def protections(self) -> frozenset[str]:
        """What keeps strangers out, in words."""
        tls = self.tls_server_config
        found = {"TLS"} if tls else set()
        if tls and tls.client_auth_type == "RequireAndVerifyClientCert":
            found.add("client certificates")
        if self.basic_auth_users:
            found.add("passwords")
        return frozenset(found)


Signature = tuple[tuple[int, int, int] | None, ...]


class Access:
    """Who may ask, as the file says at this moment. For several threads.

    Raises ``ConfigError`` when made from a file that cannot be used.
    """

    def __init__(
        self,
        path: str | None = None,
        read: Callable[[Path], WebConfig] = lambda _: WebConfig(),
        *,
        insecure: bool = False,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        self._path = path
        self._read = read
        self._insecure = insecure
        self._hosts = {_bare(name) for name in allowed_hosts} | {"localhost", _bare(socket.gethostname())}
        self._lock = threading.Lock()
        self._files: tuple[str, ...] = ()
        self._seen: Signature = ()
        self._config = WebConfig()
        self._context: ssl.SSLContext | None = None
        if path is not None:
            self._config, self._context = self._load(path)

    def config(self) -> WebConfig:
        """The configuration that holds now."""
        self._refresh()
        return self._config

    def context(self) -> ssl.SSLContext | None:
        """What a new connection shakes hands with; ``None`` without TLS."""
        self._refresh()
        return self._context

    def check_listen(self, listen: str) -> list[str]:
        """As ``check_address`` before it is known what a name stands for; returns what ought to be known."""
        host = listen.rpartition(":")[0].strip("[]")
        if ":" not in listen or (host and not _is_address(host)):
            return []
        self.check_address(host)
        return self.warnings(host)

    def check_address(self, address: str) -> None:
        """Raise ``ConfigError`` where strangers could ask at ``address``, and nobody said in writing that they may."""
        if is_loopback(address) or self._insecure or self._config.protections:
            return
        raise ConfigError(
            f"server.listen: {address or 'every address'} is not loopback, and nothing says who may ask there: set "
            "server.web_config_file (TLS or passwords), or server.insecure: true if everybody may"
        )

    def warnings(self, address: str) -> list[str]:
        """What is not wrong, but ought to be known."""
        if is_loopback(address):
            return []
        if not self._config.protections:
            return [f"everybody who reaches {address or 'this machine'} may ask: server.insecure is true"]
        if "TLS" not in self._config.protections:
            return ["passwords go over the network as they are: add tls_server_config to server.web_config_file"]
        return []

    def knows_host(self, host: str) -> bool:
        """Whether ``Host`` is a name of ours, as far as nothing else protects.

        A page of a stranger can have the browser ask us under the stranger's name (DNS rebinding). It has no
        password of ours then, and no certificate of ours fits that name: the name matters only without both.
        """
        if self._config.protections or not host:
            return True
        name = _bare(re.sub(r":\d*\Z", "", host))
        if name in self._hosts or "*" in self._hosts or name.endswith(".localhost") or _is_address(name.strip("[]")):
            return True
        return any(pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self._hosts)

    def listen_at(self, host: str) -> None:
        """The name under which we were told to listen is one of ours."""
        if host.strip("[]"):
            self._hosts.add(_bare(host))

    # ---- the file

    def _refresh(self) -> None:
        if self._path is None:
            return
        with self._lock:
            if _signature(self._files) == self._seen:
                return
            try:
                config, context = self._load(self._path)
                self._check_kept(config)
            except ConfigError as error:
                log.error("the web configuration is not taken over, the old one stays: %s", error)  # noqa: TRY400 - its text says all
                return
            self._config, self._context = config, context
            log.info("web configuration reloaded: %s", ", ".join(sorted(config.protections)) or "no protection")

    def _check_kept(self, config: WebConfig) -> None:
        """A file that is just being written may be empty: what protects stays until a restart."""
        lost = self._config.protections - config.protections
        if lost:
            raise ConfigError(f"{self._path}: it would take away {', '.join(sorted(lost))}: that needs a restart")

    def _load(self, path: str) -> tuple[WebConfig, ssl.SSLContext | None]:
        """Read it all. What is changed while we read is seen the next time, since we look before we read."""
        self._files = (path,)
        self._seen = _signature(self._files)
        config = self._read(Path(path))
        tls = config.tls_server_config
        if tls is not None:
            self._files += tls.files
            self._seen += _signature(tls.files)
        if config.basic_auth_users:
            _check_bcrypt(path)
        try:
            return config, make_context(tls) if tls is not None else None
        except ConfigError as error:
            raise ConfigError(f"{path}: tls_server_config.{error}") from None


def _signature(files: Iterable[str]) -> Signature:
    return tuple(map(_signature_of, files))


def _signature_of(file: str) -> tuple[int, int, int] | None:
    try:
        found = Path(file).stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_bcrypt(path: str) -> None:
    try:
        import bcrypt  # noqa: F401, PLC0415 - only who has passwords pays for it
    except ImportError:
        raise ConfigError(f"{path}: basic_auth_users needs bcrypt: pip install 'notbefore[web]'") from None


def password_fits(users: Mapping[str, str], user: str, password: bytes) -> bool:
    """Whether it is the user's; takes the same time for everybody, whether there is such a user or not.

    Each step of a hash's cost doubles its time: a user whose hash is cheaper than the dearest has decoys of all the
    costs in between computed as well, which makes the same sum.
    """
    import bcrypt  # noqa: PLC0415 - as above

    password = password[:MAX_PASSWORD]
    most = max(map(_cost, users.values()))
    hashed = users.get(user, _DECOY.format(most))
    fits = bcrypt.checkpw(password, hashed.encode("ascii"))
    for cost in range(_cost(hashed), most):
        bcrypt.checkpw(password, _DECOY.format(cost).encode("ascii"))
    return fits and user in users


def _cost(hashed: str) -> int:
    return int(hashed[4:6])


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches ``address`` (an IP address, ``localhost``, or empty for every address)."""
    if address == "localhost":
        return True
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bare(host: str) -> str:
    return host.lower().removesuffix(".")
