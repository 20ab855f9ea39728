"""``Redactor``: replaces secrets by ``***`` before a text goes to a log, an error or a terminal.

A library may log an address, or a part of it, in its own words and its own quoting, and a receiver
may repeat the request that it refuses. So it looks for pieces of a secret in the text itself, and
in the text without any quoting (``plain``): that of addresses, JSON, HTML and Python. A secret in
hex or in base64 is recognised too.
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

from notbefore.config.secret import HIDDEN, secrets_in
from notbefore.config.sinks import SinkConfig
from notbefore.errors import ConfigError

# characters; to hide a shorter one would hide most of the log, and protect nothing
SHORTEST: Final = 3
SHORTEST_PART: Final = 6  # characters; a part of an address counts as secret from this length
PIECE: Final = 8  # characters; so much of a secret is recognised without the rest
MAX_ENCODED: Final = 4_096  # bytes of a secret that are recognised in hex and base64
SHORTEST_ENCODED: Final = 4  # characters; a shorter piece of base64 is in any text
BASE64_GROUP: Final = 3  # bytes that base64 encodes together
BASE64_BITS: Final = 6  # in each of its characters
_SIZES: Final = range(PIECE, SHORTEST - 1, -1)
QUOTED: Final = 5  # the most levels of quoting that are removed
# their host names are not secret; others may be
_PLAIN_SCHEMES: Final = (
    "http",
    "https",
    "mailto",
    "mailtos",
)
# tokens that are made from a secret, and secret while they are valid: of Event Hubs, and of a
# managed identity
_TOKEN: Final = re.compile(
    r"(?<=SharedAccessSignature )\S+|\beyJ[\w-]{10,}\.[\w-]+\.?[\w-]*", re.IGNORECASE
)
_SECRET_NAME: Final = re.compile("(key|signature|password|secret)$", re.IGNORECASE)
# starts an address; a connection string contains some
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ESCAPE: Final = re.compile(
    r"((?:\\x[0-9a-f]{2})+)|\\u([0-9a-f]{4})|\\(.)", re.IGNORECASE | re.DOTALL
)
# keeps the position of each letter
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class Redactor:
    """Called with a text, it returns the text without the secrets that were added, in upper or
    lower case.

    Safe to call from several threads: secrets are only added.
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
            low = form.translate(_LOWER)
            if len(low) >= SHORTEST:
                last = max(0, len(low) - PIECE)
                self._pieces.update(low[at : at + PIECE] for at in range(last + 1))

    def __call__(self, text: str) -> str:
        """Return the text without secrets; if a quoted one is found, without any quoting."""
        said = plain(text)
        left = self._hidden(said)
        return self._hidden(text) if left == said else left

    def _hidden(self, text: str) -> str:
        text = _TOKEN.sub(HIDDEN, text)
        low, kept, end = text.translate(_LOWER), list[str](), 0
        for at in range(len(text)):
            size = next((size for size in _SIZES if low[at : at + size] in self._pieces), 0)
            if size and at >= end:  # not within the piece before
                kept += (text[end:at], HIDDEN)
            end = max(end, at + size) if size else end
        return "".join((*kept, text[end:]))


def known_secrets(sink: SinkConfig) -> list[str]:
    """Return the secrets of a sink, also as they are sent.

    One that cannot be read now cannot leak either.
    """
    found: list[str] = []
    user = getattr(sink.settings, "username", None) or getattr(sink.settings, "user", None) or ""
    for name, secret in secrets_in(sink.settings).items():
        with suppress(ConfigError):
            found.append(secret.reveal())
            if name == "password":
                found += _authorizations(user, found[-1])
    return found


def _authorizations(user: str, password: str) -> Iterator[str]:
    """Yield user and password as HTTP (Basic) and SMTP (AUTH PLAIN, AUTH LOGIN) send them."""
    for pair in (f"{user}:{password}", f"\0{user}\0{password}", password):
        yield base64.b64encode(pair.encode()).decode()


def _parts(secret: str) -> list[str]:
    """Return the parts that are secret by themselves: an address or a connection string is not
    secret as a whole.
    """
    scheme, _, token = secret.partition(" ")
    found = [secret]
    if _URL.match(secret):
        found = list(_parts_of_url(secret))
    elif "sharedaccess" in secret.lower():  # a connection string: KEY=VALUE;...
        pairs = (pair.partition("=") for pair in secret.split(";"))
        found = [
            value
            for name, _, value in pairs
            if len(value) >= SHORTEST and _SECRET_NAME.search(name)
        ]
    elif (
        scheme.isalpha() and len(token) >= SHORTEST_PART
    ):  # an Authorization header: Bearer ..., Basic ...
        found = [token]
        with suppress(ValueError):  # user and password, and the password by itself
            text = base64.b64decode(token, validate=True).decode()
            found += [text, text.partition(":")[2]] if ":" in text and text.isprintable() else []
    # without secret parts: a web address has no secret; any other text only looked like one of
    # these
    return found or ([] if secret.startswith(("http://", "https://")) else [secret])


def _parts_of_url(secret: str) -> Iterator[str]:
    """Yield password, path and query; also user and host, if the scheme may have keys in them."""
    scheme, _, rest = secret.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest[len(authority) :]
    user, _, password = authority.rpartition("@")[0].partition(":")
    if password:
        yield from (password, *_authorizations(unquote(user), unquote(password)))
    segments = [path, *re.split("[/?&=#]", path)]
    if scheme not in _PLAIN_SCHEMES:
        segments += re.split("[@:]", authority)
    yield from (segment for segment in segments if len(unquote(segment)) >= SHORTEST_PART)


def _forms(part: str) -> Iterator[str]:
    """Yield a text as it is, on one line, and without any quoting."""
    for text in {part, " ".join(part.split())}:
        yield from (text, plain(text), plain(text).encode("ascii", "ignore").decode())


def _encoded(part: str) -> Iterator[str]:
    """Yield a text in hex, and in base64, alone or within a longer text.

    Base64 has three forms of a text, by its place in the whole. The first and the last letter of
    it may depend on what stands next to it; they are left out.
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
    """Return a text without the quoting of addresses, JSON, HTML and Python, and without invisible
    characters.
    """
    for _ in range(QUOTED):
        seen = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
        unquoted = unquote_plus(_ESCAPE.sub(_letter, unescape(seen)))
        if unquoted == text:
            break
        text = unquoted
    return text


def _letter(escape: re.Match[str]) -> str:
    """Return the text that an escape sequence stands for."""
    octets, code, itself = escape.groups()
    if octets is None:
        return itself or chr(int(code, 16))
    data = bytes.fromhex(octets.lower().replace("\\x", ""))
    with suppress(UnicodeDecodeError):
        return data.decode()
    return data.decode("latin-1")
