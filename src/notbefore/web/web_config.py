"""``WebConfig``: the file ``server.web_config_file``, in the form of Prometheus's exporter-toolkit."""

import re
import ssl
from importlib.util import find_spec
from typing import Final, Literal

from msgspec import Struct

from notbefore.errors import ConfigError

MAX_COST: Final = 14  # of a bcrypt hash: one second of computing for each password
MAX_PASSWORD: Final = 72  # bytes; bcrypt ignores the rest
VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
# the 22nd character of the salt has two bits alone
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}", re.ASCII)
_DECOY: Final = "$2b${:02d}$" + "notbeforenotbeforenote" + "." * 31  # a well-formed hash that no password has


class TlsServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """``tls_server_config``. A client's certificate is either not requested, or required and verified."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    client_auth_type: Literal["NoClientCert", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS12"

    def __post_init__(self) -> None:
        if (self.client_ca_file is None) != (self.client_auth_type == "NoClientCert"):
            raise ValueError("client_ca_file and client_auth_type: RequireAndVerifyClientCert need each other")

    def context(self) -> ssl.SSLContext:
        """The context that a server uses; raises ``ConfigError``, which names the key of the section."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self.min_version]
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            key = f"cert_file, key_file: {self.cert_file}, {self.key_file}"
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
            if self.client_ca_file is not None:
                key = f"client_ca_file: {self.client_ca_file}"
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_ca_file)
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            raise ConfigError(f"tls_server_config.{key}: {error}") from None
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and the agent cannot ask for its password: store it unencrypted")


class WebConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
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
        if tls and tls.client_ca_file:
            found.add("client certificates")
        if self.basic_auth_users:
            found.add("passwords")
        return frozenset(found)

    @property
    def files(self) -> tuple[str, ...]:
        """The other files that are read: certificates and keys."""
        tls = self.tls_server_config
        return tuple(filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file))) if tls is not None else ()

    def context(self) -> ssl.SSLContext | None:
        """The TLS settings, ``None`` without TLS. Raises ``ConfigError``, also where bcrypt is missing."""
        if self.basic_auth_users and not find_spec("bcrypt"):
            raise ConfigError("basic_auth_users needs bcrypt: pip install 'azure-notbefore[web]'")
        return self.tls_server_config.context() if self.tls_server_config is not None else None

    def password_fits(self, user: str, password: bytes) -> bool:
        """Whether the password is the user's. Takes as long for a user that there is not as for the dearest hash."""
        import bcrypt  # 1 MiB that only an agent with passwords needs

        decoy = _DECOY.format(max(int(hashed[4:6]) for hashed in self.basic_auth_users.values()))
        hashed = self.basic_auth_users.get(user, decoy)
        return bcrypt.checkpw(password[:MAX_PASSWORD], hashed.encode("ascii")) and user in self.basic_auth_users
