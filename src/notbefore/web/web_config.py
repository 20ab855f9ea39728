"""``WebConfig``: the file ``server.web_config_file``, in the form of Prometheus's exporter-toolkit."""

import re
import ssl
from typing import Final, Literal

from msgspec import Struct, field

from notbefore.errors import ConfigError
from notbefore.web.tls import TlsServerConfig, make_context

MAX_COST: Final = 14  # of a bcrypt hash: one second of computing for each password
MAX_PASSWORD: Final = 72  # bytes; bcrypt ignores the rest
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}", re.ASCII)
_DECOY: Final = "$2b${:02d}$" + "notbeforenotbeforenote" + "." * 31  # a well-formed hash that no password has


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Headers(_Section, frozen=True):
    """``http_server_config.headers``; an empty value keeps the agent's own."""

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
    """``http_server_config``. ``http2`` is accepted and has no effect: this server speaks HTTP/1.1."""

    http2: bool = True
    headers: Headers = Headers()


class WebConfig(_Section, frozen=True):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = HttpServerConfig()
    basic_auth_users: dict[str, str] = {}  # name -> bcrypt hash

    def __post_init__(self) -> None:
        for user, hashed in self.basic_auth_users.items():
            found = _HASH.fullmatch(hashed)
            if not found or not 4 <= int(found[1]) <= MAX_COST:  # noqa: PLR2004 - bcrypt's own lower bound
                # the value is not shown: it may be the password itself
                raise ValueError(f"basic_auth_users.{user}: expected a bcrypt hash ($2b$...) of cost 4 to {MAX_COST}")
            if not user or ":" in user:
                raise ValueError(f"basic_auth_users: {user!r} cannot be a user's name")

    @property
    def protections(self) -> frozenset[str]:
        """The protections that it sets up: ``TLS``, ``client certificates``, ``passwords``."""
        tls = self.tls_server_config
        found = {"TLS"} if tls else set()
        if tls and tls.client_auth_type == "RequireAndVerifyClientCert":
            found.add("client certificates")
        if self.basic_auth_users:
            found.add("passwords")
        return frozenset(found)

    @property
    def files(self) -> tuple[str, ...]:
        """The other files that are read: certificates and keys."""
        return self.tls_server_config.files if self.tls_server_config is not None else ()

    def context(self) -> ssl.SSLContext | None:
        """The TLS settings, ``None`` without TLS. Raises ``ConfigError``, also where bcrypt is missing."""
        if self.basic_auth_users:
            _check_hashes(self.basic_auth_users)
        try:
            return make_context(self.tls_server_config) if self.tls_server_config is not None else None
        except ConfigError as error:
            raise ConfigError(f"tls_server_config.{error}") from None

    def password_fits(self, user: str, password: bytes) -> bool:
        """Whether the password is the user's. Takes the same time for every user, known or not.

        Each step of a hash's cost doubles its time. For a user whose hash costs less than the highest, decoys of all
        costs between them are computed as well, which makes up the difference.
        """
        import bcrypt  # noqa: PLC0415 - 1 MiB that only an agent with passwords needs

        password = password[:MAX_PASSWORD]
        most = max(map(_cost, self.basic_auth_users.values()))
        hashed = self.basic_auth_users.get(user, _DECOY.format(most))
        fits = bcrypt.checkpw(password, hashed.encode("ascii"))
        for cost in range(_cost(hashed), most):
            bcrypt.checkpw(password, _DECOY.format(cost).encode("ascii"))
        return fits and user in self.basic_auth_users


def _check_hashes(users: dict[str, str]) -> None:
    try:
        import bcrypt  # noqa: PLC0415 - as above
    except ImportError:
        raise ConfigError("basic_auth_users needs bcrypt: pip install 'azure-notbefore[web]'") from None
    for user, hashed in users.items():
        try:
            bcrypt.hashpw(b"", f"$2b$04${hashed[7:29]}".encode("ascii"))  # its salt, at the least cost
        except ValueError:
            raise ConfigError(f"basic_auth_users.{user}: expected a bcrypt hash, this one has a bad salt") from None


def _cost(hashed: str) -> int:
    return int(hashed[4:6])
