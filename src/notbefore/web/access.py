"""Who may ask: the web configuration (the form of Prometheus's exporter-toolkit), passwords, and names of this host.

The file and the certificates it names are looked at again with each handshake and each request. What is wrong, or would
take a protection away that was there, is not taken over.
"""

import ipaddress
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from notbefore.config.model import Server
from notbefore.errors import ConfigError

if TYPE_CHECKING:  # without the file, none of this is needed
    import ssl

    from notbefore.web.web_config import WebConfig

log = logging.getLogger("notbefore.http")

RETRY: Final = 60.0  # seconds until what was not taken over is tried again, should nothing about the files change

# of a file: when it was changed, how long it is, which it is; None if it cannot be looked at
Signature = tuple[int, int, int] | None


_TLS_FILES: Final = ("cert_file", "key_file", "client_ca_file")


def load_web_config(path: Path) -> "WebConfig":
    """Read ``server.web_config_file``; raises ``ConfigError``. What it names is found beside it."""
    from notbefore.config.yaml_file import convert, read  # noqa: PLC0415 - most agents have no such file
    from notbefore.web.web_config import WebConfig  # noqa: PLC0415 - as above

    values, places = read(path)
    tls = values.get("tls_server_config")
    if isinstance(tls, dict):
        found = {
            key: str(path.absolute().parent / value)
            for key, value in tls.items()
            if key in _TLS_FILES and isinstance(value, str)
        }
        values["tls_server_config"] = {**tls, **found}
    return convert(values, WebConfig, places, strict=True)


class Access:
    """Who may ask, as the file says at this moment. For several threads.

    Raises ``ConfigError`` when made from a file that cannot be used.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        insecure: bool = False,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        self._path = path
        self._insecure = insecure
        self._hosts = {_bare(name) for name in allowed_hosts} | {"localhost", _bare(socket.gethostname())}
        self._lock = threading.Lock()
        self._seen: dict[str, Signature] = {}
        self._next_try = math.inf  # monotonic seconds
        self._said = ""  # what was wrong the last time
        self._config: WebConfig | None = None
        self._context: ssl.SSLContext | None = None
        if path is not None:
            self._config, self._context = self._load(path)

    def config(self) -> "WebConfig | None":
        """The configuration that holds now, if there is one."""
        self._refresh()
        return self._config

    def context(self) -> "ssl.SSLContext | None":
        """What a new connection shakes hands with; ``None`` without TLS."""
        self._refresh()
        return self._context

    @property
    def _protections(self) -> frozenset[str]:
        return self._config.protections if self._config is not None else frozenset()

    def check_listen(self, listen: str) -> list[str]:
        """As ``check_address`` before it is known what a name stands for; returns what ought to be known."""
        host = listen.rpartition(":")[0].strip("[]")
        if ":" not in listen:
            return []
        if host and host != "localhost" and not _is_address(host):
            return [f"server.listen: {host} is a name: only at the start is it seen whether strangers could ask there"]
        self.check_address(host)
        return self.warnings(host)

    def check_address(self, address: str) -> None:
        """Raise ``ConfigError`` where strangers could ask at ``address``, and nobody said in writing that they may."""
        if is_loopback(address) or self._insecure or self._protections:
            return
        raise ConfigError(
            f"server.listen: {address or 'every address'} is not loopback, and nothing says who may ask there: set "
            "server.web_config_file (TLS or passwords), or server.insecure: true if everybody may"
        )

    def warnings(self, address: str) -> list[str]:
        """What is not wrong, but ought to be known."""
        if is_loopback(address):
            return []
        if not self._protections:
            return [f"everybody who reaches {address or 'this machine'} may ask: server.insecure is true"]
        if "TLS" not in self._protections:
            return ["passwords go over the network as they are: add tls_server_config to server.web_config_file"]
        if self._protections == {"TLS"}:
            who = f"everybody who reaches {address or 'this machine'} may ask, over TLS"
            return [f"{who}: add basic_auth_users or a client_ca_file to server.web_config_file"]
        return []

    def knows_host(self, host: str) -> bool:
        """Whether ``Host`` is a name of ours, as far as nothing else protects.

        A page of a stranger can have the browser ask us under the stranger's name (DNS rebinding). It has no
        password of ours then, and no certificate of ours fits that name: the name matters only without both.
        """
        if self._protections or not host:
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
            changed = any(_signature(file) != seen for file, seen in self._seen.items())
            if not changed and time.monotonic() < self._next_try:
                return
            try:
                config, context = self._load(self._path)
                self._check_kept(config)
            except Exception as error:  # noqa: BLE001 - whatever it is, who asks is answered
                self._stay(error, changed=changed)
                return
            self._config, self._context = config, context
            self._seen = {file: self._seen[file] for file in (self._path, *config.files)}
            self._next_try = math.inf
            log.info("web configuration reloaded: %s", ", ".join(sorted(config.protections)) or "no protection")

    def _stay(self, error: Exception, *, changed: bool) -> None:
        """Go on with the old configuration, and with what its certificates are now."""
        self._next_try = time.monotonic() + RETRY
        if changed or str(error) != self._said:
            unforeseen = not isinstance(error, ConfigError)
            log.error("the web configuration is not taken over, the old one stays: %s", error, exc_info=unforeseen)
        self._said = str(error)
        if self._config is not None:
            with suppress(Exception):  # where it is the certificates that are wrong, that is said above
                self._context = self._config.context()

    def _check_kept(self, config: "WebConfig") -> None:
        """A file that is just being written may be empty: what protects stays until a restart."""
        lost = self._protections - config.protections
        if lost:
            raise ConfigError(f"{self._path}: it would take away {', '.join(sorted(lost))}: that needs a restart")

    def _load(self, path: str) -> "tuple[WebConfig, ssl.SSLContext | None]":
        """Read it all. What is changed while we read is seen the next time, since we look before we read."""
        old = self._config.files if self._config is not None else ()  # still needed if the new ones are wrong
        self._seen = {file: _signature(file) for file in (path, *old)}
        config = load_web_config(Path(path))
        self._seen |= {file: _signature(file) for file in config.files if file not in self._seen}
        try:
            return config, config.context()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def access(server: Server) -> Access:
    """Who may ask; raises ``ConfigError``."""
    return Access(server.web_config_file, insecure=server.insecure, allowed_hosts=server.allowed_hosts)


def _signature(file: str) -> Signature:
    try:
        found = Path(file).stat()
    except (OSError, ValueError):
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino  # not mtime: who copies a file may set that


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
