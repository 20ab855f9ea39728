"""``Redactor`` replaces secrets by ``***`` before a text goes to a log, an error or a terminal.

A library may log an address, or a part of it, in its own words and its own quoting, and a receiver
may repeat the request that it refuses. So the redactor looks for pieces of a secret, both in the
text itself and in the text without any quoting (``plain``): that of addresses, JSON, HTML and
Python. It also recognizes a secret in hex or base64.
"""

import base64
import math
import re
import string
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html import unescape
from typing import Final
from urllib.parse import unquote, unquote_plus

from msgspec import Struct

from notbefore.config.secret import HIDDEN, secrets_in
from notbefore.errors import ConfigError

# characters; hiding a shorter secret would hide most of the log, and protect nothing
SHORTEST_SECRET: Final = 3
SHORTEST_PART: Final = 6  # characters; a part of an address counts as secret from this length
PIECE: Final = 8  # characters; so much of a secret is recognized without the rest
MAX_ENCODED: Final = 4_096  # bytes of a secret that are recognized in hex and base64
SHORTEST_ENCODED: Final = 4  # characters; a shorter piece of base64 is in any text
BASE64_GROUP: Final = 3  # bytes that base64 encodes together
BASE64_BITS: Final = 6  # in each of its characters
_PIECE_LENGTHS: Final = range(PIECE, SHORTEST_SECRET - 1, -1)  # the longest first
QUOTING_LEVELS: Final = 5  # that are removed at most
# in addresses of other schemes, the host may be a secret
_SCHEMES_WITH_HOSTS: Final = ("http", "https", "mailto", "mailtos")
# tokens of Event Hubs and of a managed identity: libraries make them, and they are secret too
_TOKEN: Final = re.compile(
    r"(?<=SharedAccessSignature )\S+|\beyJ[\w-]{10,}\.[\w-]+\.?[\w-]*", re.IGNORECASE
)
_SECRET_NAME: Final = re.compile("(key|signature|password|secret)$", re.IGNORECASE)
# the start of an address
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ESCAPE: Final = re.compile(
    r"((?:\\x[0-9a-f]{2})+)|\\u([0-9a-f]{4})|\\(.)", re.IGNORECASE | re.DOTALL
)
# unlike ``str.lower``, it keeps the position of each letter
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class Redactor:
    """Returns a text, when called with it, without the secrets that were added.

    It ignores case. Several threads may use it: secrets are only added.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._pieces: set[str] = set()
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """Hide this secret and its parts from now on."""
        for part in _parts(secret):
            self._add_forms(part)
            for encoded in _encoded(part):
                self._add_forms(encoded)

    def _add_forms(self, text: str) -> None:
        for form in _forms(text):
            lower = form.translate(_LOWER)
            if len(lower) < SHORTEST_SECRET:
                continue
            last_start = max(0, len(lower) - PIECE)
            for start in range(last_start + 1):
                self._pieces.add(lower[start : start + PIECE])

    def __call__(self, text: str) -> str:
        """Return the text without secrets. If a quoted secret was in it, remove all quoting too."""
        unquoted = plain(text)
        redacted = self._hidden(unquoted)
        if redacted != unquoted:
            return redacted
        return self._hidden(text)

    def _hidden(self, text: str) -> str:
        """Return the text with ``***`` in place of each run of pieces."""
        text = _TOKEN.sub(HIDDEN, text)
        lower = text.translate(_LOWER)
        parts: list[str] = []
        hidden_until = 0
        for start in range(len(text)):
            length = self._piece_length(lower, start)
            if length == 0:
                continue
            if start >= hidden_until:  # a new run begins
                parts.append(text[hidden_until:start])
                parts.append(HIDDEN)
            hidden_until = max(hidden_until, start + length)
        parts.append(text[hidden_until:])
        return "".join(parts)

    def _piece_length(self, lower: str, start: int) -> int:
        """Return the length of the longest piece that starts there; 0 if there is none."""
        for length in _PIECE_LENGTHS:
            if lower[start : start + length] in self._pieces:
                return length
        return 0


def known_secrets(settings: Struct) -> list[str]:
    """Return the secrets of a sink, also as they are sent.

    One that cannot be read now cannot leak either.
    """
    texts: list[str] = []
    user = getattr(settings, "username", None)  # of HTTP
    if user is None:
        user = getattr(settings, "user", None)  # of SMTP
    for name, secret in secrets_in(settings).items():
        with suppress(ConfigError):
            text = secret.reveal()
            texts.append(text)
            if name == "password":
                texts += _authorizations(user or "", text)
    return texts


def _authorizations(user: str, password: str) -> Iterator[str]:
    """Yield user and password as HTTP (Basic) and SMTP (AUTH PLAIN, AUTH LOGIN) send them."""
    for pair in (f"{user}:{password}", f"\0{user}\0{password}", password):
        yield base64.b64encode(pair.encode()).decode()


def _parts(secret: str) -> list[str]:
    """Return the parts that are secret by themselves.

    An address or a connection string is not secret as a whole.
    """
    parts: list[str]
    if _URL.match(secret):
        parts = list(_parts_of_url(secret))
    elif "sharedaccess" in secret.lower():
        parts = list(_parts_of_connection_string(secret))
    else:
        parts = list(_parts_of_authorization(secret))

    is_public_address = not parts and secret.startswith(("http://", "https://"))
    if parts or is_public_address:
        return parts
    return [secret]


def _parts_of_connection_string(secret: str) -> Iterator[str]:
    """Yield the secret values of ``KEY=VALUE;...``."""
    for pair in secret.split(";"):
        name, _, value = pair.partition("=")
        if len(value) >= SHORTEST_SECRET and _SECRET_NAME.search(name):
            yield value


def _parts_of_authorization(secret: str) -> Iterator[str]:
    """Yield the token of ``Bearer TOKEN``; of ``Basic TOKEN`` also the login and the password."""
    scheme, _, token = secret.partition(" ")
    if not scheme.isalpha() or len(token) < SHORTEST_PART:
        return
    yield token
    with suppress(ValueError):
        login = base64.b64decode(token, validate=True).decode()
        if ":" in login and login.isprintable():
            yield login
            yield login.partition(":")[2]


def _parts_of_url(secret: str) -> Iterator[str]:
    """Yield password, path and query; also user and host, where they may be secrets."""
    scheme, _, rest = secret.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest[len(authority) :]
    user, _, password = authority.rpartition("@")[0].partition(":")
    if password:
        yield password
        yield from _authorizations(unquote(user), unquote(password))

    segments = [path, *re.split("[/?&=#]", path)]
    if scheme not in _SCHEMES_WITH_HOSTS:
        segments += re.split("[@:]", authority)
    for segment in segments:
        if len(unquote(segment)) >= SHORTEST_PART:
            yield segment


def _forms(part: str) -> Iterator[str]:
    """Yield a text as it is, on one line, and without any quoting."""
    for text in {part, " ".join(part.split())}:
        unquoted = plain(text)
        yield text
        yield unquoted
        yield unquoted.encode("ascii", "ignore").decode()


def _encoded(part: str) -> Iterator[str]:
    """Yield a text in hex, and in base64, alone or within a longer text.

    Base64 has three forms of a text, which depend on its position. Its first and its last letter
    may depend on the neighboring text; they are left out.
    """
    data = part.encode()[:MAX_ENCODED]
    yield data.hex()
    for offset in range(BASE64_GROUP):
        shifted = bytes(offset) + data
        start = math.ceil(offset * 8 / BASE64_BITS)
        end = len(shifted) * 8 // BASE64_BITS
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            form = encode(shifted).decode()[start:end]
            if len(form) >= SHORTEST_ENCODED:
                yield form


def plain(text: str) -> str:
    """Return a text without the quoting of addresses, JSON, HTML and Python.

    It also lacks invisible characters.
    """
    for _ in range(QUOTING_LEVELS):
        visible = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
        unquoted = unquote_plus(_ESCAPE.sub(_letter, unescape(visible)))
        if unquoted == text:
            break
        text = unquoted
    return text


def _letter(escape: re.Match[str]) -> str:
    """Return the text that an escape sequence stands for."""
    octets, code, letter = escape.groups()
    if letter is not None:
        return str(letter)
    if code is not None:
        return chr(int(code, 16))
    data = bytes.fromhex(octets.lower().replace("\\x", ""))
    with suppress(UnicodeDecodeError):
        return data.decode()
    return data.decode("latin-1")
