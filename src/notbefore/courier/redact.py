"""``Redactor``: the last gate before a log, an error or a terminal: what is secret becomes ``***``.

A library may log an address, or a part of one, in its own words and its own quoting, and a receiver may repeat the
request that it refuses. So pieces of a secret are looked for in a text as it stands, and in what it says once every
quoting is undone (``plain``): of addresses, JSON, HTML and Python.
"""

import base64
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from html import unescape
from typing import Final
from urllib.parse import unquote, unquote_plus

from notbefore.config.secret import HIDDEN
from notbefore.config.sinks import SinkConfig
from notbefore.errors import ConfigError

SHORTEST_WHOLE: Final = 3  # characters; a shorter "secret" would blacken the log and protect nothing
SHORTEST_PART: Final = 6  # characters of a part of an address that is taken for secret by itself
PIECE: Final = 8  # characters of a secret that are recognised without the rest
QUOTED: Final = 5  # times that a text is taken out of its quoting at most
_PLAIN_SCHEMES: Final = ("http", "https", "mailto", "mailtos")  # their host names are no secret; in others they may be
# tokens that are made from a secret, and are one for as long as they last: of Event Hubs, and of a managed identity
_TOKEN: Final = re.compile(r"(?<=SharedAccessSignature )\S+|\beyJ[\w-]{10,}\.[\w-]+\.?[\w-]*", re.IGNORECASE)
_SECRET_NAME: Final = re.compile("(key|signature|password|secret)$", re.IGNORECASE)
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)  # begins an address; a connection string holds some
_ESCAPE: Final = re.compile(
    r"(?P<bytes>(?:\\x[0-9a-f]{2})+)|\\u(?P<u>[0-9a-f]{4})|\\U(?P<U>[0-9a-f]{8})|\\(?P<itself>.)",
    re.IGNORECASE | re.DOTALL,
)
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # the places of the letters stay


class Redactor:
    """Call it with a text; it returns the text without the secrets that were added, whatever the case of their letters.

    Safe from several threads: its sets only grow.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._exact: set[str] = set()  # whole secrets, and what is shorter than a piece
        self._pieces: set[str] = set()
        self._compiled = (0, _TOKEN)  # how many of ``_exact`` the pattern knows
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """Hide this from now on, and its parts."""
        parts = list(_parts(secret))
        if not parts and not secret.startswith(("http://", "https://")):
            parts = [secret]  # it only looks like a connection string, or an address
        forms = {form.translate(_LOWER) for part in parts for form in _forms(part)}
        exact = {*_forms(secret), *(form for form in forms if len(form) < PIECE)}
        self._pieces.update({form[at : at + PIECE] for form in forms for at in range(len(form) - PIECE + 1)})
        self._exact.update({form for form in exact if len(form) >= SHORTEST_WHOLE})

    def __call__(self, text: str) -> str:
        """The text without secrets; where one of them is quoted in any way, all quoting in the text is undone."""
        said = plain(text)
        left = self._hidden(said)
        return self._hidden(text) if left == said else left

    def _hidden(self, text: str) -> str:
        known, pattern = self._compiled
        if known != len(self._exact):
            longest_first = sorted(self._exact, key=len, reverse=True)
            pattern = re.compile("|".join((*map(re.escape, longest_first), _TOKEN.pattern)), re.IGNORECASE)
            self._compiled = len(longest_first), pattern
        text = pattern.sub(HIDDEN, text)
        low, parts, end = text.translate(_LOWER), list[str](), 0
        for at in range(len(text) - PIECE + 1):
            if low[at : at + PIECE] in self._pieces:
                if at >= end:  # not the next one within the same piece
                    parts += (text[end:at], HIDDEN)
                end = at + PIECE
        return "".join((*parts, text[end:]))


def known_secrets(sinks: Mapping[str, SinkConfig]) -> list[str]:
    """The secrets of the sinks, and what is made of them to be sent; one that cannot be read now cannot leak either."""
    found: list[str] = []
    for sink in sinks.values():
        user = getattr(sink.settings, "username", None) or getattr(sink.settings, "user", None) or ""
        for name, secret in sink.secrets.items():
            with suppress(ConfigError):
                found.append(secret.reveal())
                if name == "password":
                    found += _authorizations(user, found[-1])
    return found


def _authorizations(user: str, password: str) -> Iterator[str]:
    """User and password as HTTP (Basic) and SMTP (AUTH PLAIN, AUTH LOGIN) send them."""
    for pair in (f"{user}:{password}", f"\0{user}\0{password}", password):
        yield base64.b64encode(pair.encode()).decode()


def _parts(secret: str) -> Iterator[str]:
    """What of it is secret by itself: of an address or a connection string not all is."""
    scheme, _, token = secret.partition(" ")
    if _URL.match(secret):
        yield from _parts_of_url(secret)
    elif ";" in secret:  # a connection string: KEY=VALUE;...
        pairs = (pair.partition("=") for pair in secret.split(";"))
        yield from (value for name, _, value in pairs if _SECRET_NAME.search(name))
    elif scheme.isalpha() and len(token) >= SHORTEST_PART:  # Bearer ..., Basic ...: of an Authorization header
        yield from (token, *_unwrapped(token))
    else:
        yield secret


def _unwrapped(token: str) -> Iterator[str]:
    """What Basic authentication wraps: user and password, and the password by itself."""
    with suppress(ValueError):
        text = base64.b64decode(token, validate=True).decode()
        if ":" in text and text.isprintable():
            yield from (text, text.partition(":")[2])


def _parts_of_url(secret: str) -> Iterator[str]:
    """Password, path and query; user and host as well where a scheme hides keys in them."""
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
    """A text as it stands, on one line, and without any quoting."""
    for text in {part, " ".join(part.split())}:
        yield from (text, plain(text), plain(text).encode("ascii", "ignore").decode())


def plain(text: str) -> str:
    """What a text says: without the quoting of addresses, JSON, HTML and Python, and what cannot be seen."""
    for _ in range(QUOTED):
        seen = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
        unquoted = unquote_plus(_ESCAPE.sub(_letter, unescape(seen)))
        if unquoted == text:
            break
        text = unquoted
    return text


def _letter(escape: re.Match[str]) -> str:
    """What stands behind a backslash."""
    if escape["bytes"]:
        octets = bytes.fromhex(escape["bytes"].replace("\\x", "").replace("\\X", ""))
        try:
            return octets.decode()
        except UnicodeDecodeError:
            return octets.decode("latin-1")
    code = int(escape["u"] or escape["U"] or "0", 16)
    return escape["itself"] or (chr(code) if code <= sys.maxunicode else "")
