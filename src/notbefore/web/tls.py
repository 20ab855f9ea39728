"""``TlsServerConfig``: the section ``tls_server_config``, and the ``SSLContext`` that it describes."""

import ssl
from typing import Final, Literal

from msgspec import Struct

from notbefore.errors import ConfigError

# Go's names, which the file uses -> OpenSSL's; only suites with forward secrecy
SUITES: Final = {
    f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for go, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
# those of TLS 1.3 are always on, as in Go; Go knows ChaCha20 by a longer name as well
SUITES_13: Final = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
POLICIES: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


class TlsServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """``tls_server_config``. A client's certificate is either not requested or verified; nothing in between."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    def __post_init__(self) -> None:
        if (self.client_ca_file is None) != (self.client_auth_type == "NoClientCert"):
            raise ValueError("client_ca_file and a client_auth_type that verifies certificates need each other")
        if self.min_version > self.max_version:
            raise ValueError("min_version is above max_version")
        unknown = [name for name in self.cipher_suites if name not in SUITES and name not in SUITES_13]
        if unknown:
            raise ValueError(f"cipher_suites: {unknown[0]!r} is none of {', '.join((*SUITES, *SUITES_13))}")

    @property
    def files(self) -> tuple[str, ...]:
        """The certificates and keys that are read."""
        return tuple(filter(None, (self.cert_file, self.key_file, self.client_ca_file)))


def make_context(config: TlsServerConfig) -> ssl.SSLContext:
    """The context that a server uses; raises ``ConfigError``, which names the key of the section."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = VERSIONS[config.min_version], VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    try:
        key = "cipher_suites"
        _choose_suites(context, config)
        key = f"cert_file, key_file: {config.cert_file}, {config.key_file}"
        context.load_cert_chain(config.cert_file, config.key_file, password=_no_password)
        if config.client_ca_file is not None:
            key = f"client_ca_file: {config.client_ca_file}"
            context.verify_mode = POLICIES[config.client_auth_type]
            context.load_verify_locations(config.client_ca_file)
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise ConfigError(f"{key}: {error}") from None
    return context


def _choose_suites(context: ssl.SSLContext, config: TlsServerConfig) -> None:
    if not config.cipher_suites:
        return
    chosen = [SUITES[name] for name in config.cipher_suites if name in SUITES]
    if chosen:
        context.set_ciphers(":".join(chosen))
    elif config.max_version == "TLS12":
        raise ValueError("none of them belongs to TLS 1.2, which is max_version")
    else:
        context.minimum_version = ssl.TLSVersion.TLSv1_3


def _no_password() -> str:
    raise ValueError("the key is encrypted, and the agent cannot ask for its password: store it unencrypted")
