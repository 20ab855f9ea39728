"""``Redactor``: the last gate before a log, an error or a terminal: what is secret leaves as ``***``.

A library may log an address, or a part of one, in its own words and its own quoting; so all parts of a secret that
could be told on their own are looked for, in the forms in which they are usually written.
"""

import base64
import json
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from notbefore.config.secret import HIDDEN

SHORTEST_WHOLE: Final = 3  # characters; a shorter "secret" would blacken the log and protect nothing
SHORTEST_PART: Final = 6  # characters of a part of an address that is taken for secret by itself
_PLAIN_SCHEMES: Final = ("http", "https", "mailto", "mailtos")  # their host names are no secret; in others they may be


_SECRET_NAME: Final = re.compile("(key|signature|password|secret)$", re.IGNORECASE)


class Redactor:
    """Call it with a text; it returns the text without the secrets that were added. Safe from several threads."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._forms: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """From now on this is not told, nor its parts."""
        forms = {form for part in (secret, *_parts(secret)) for form in _forms(part)}
        with self._lock:
            self._forms |= {form for form in forms if len(form) >= SHORTEST_WHOLE}
            longest_first = sorted(self._forms, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """The text as it may be told."""
        return self._pattern.sub(HIDDEN, text) if self._pattern is not None else text


def _parts(secret: str) -> Iterator[str]:
    """What of an address is secret by itself: user and password, path, query; hosts where schemes hide keys in them."""
    if ";" in secret:  # a connection string: KEY=VALUE;...
        pairs = (pair.partition("=") for pair in secret.split(";"))
        yield from (value for name, _, value in pairs if _SECRET_NAME.search(name))
        return
    if "://" not in secret:
        scheme, _, token = secret.partition(" ")
        if scheme.isalpha() and len(token) >= SHORTEST_PART:  # Bearer ..., Basic ...: of an Authorization header
            yield from (token, *_plain(token))
        return
    yield from _parts_of_url(secret)


def _plain(token: str) -> Iterator[str]:
    """What Basic authentication wraps: user and password, and the password by itself."""
    try:
        text = base64.b64decode(token, validate=True).decode()
    except ValueError:
        return
    if ":" in text and text.isprintable():
        yield text
        yield text.partition(":")[2]


def _parts_of_url(secret: str) -> Iterator[str]:
    try:
        url = urlsplit(secret)
    except ValueError:  # it is no address after all, whatever it looks like
        yield from (piece for piece in re.split("[/:@?&=#]", secret) if len(piece) >= SHORTEST_PART)
        return
    user, _, password = url.netloc.rpartition("@")[0].partition(":")
    yield password
    segments = [*url.path.split("/"), url.fragment]
    segments += [value for pair in url.query.split("&") for value in (pair, pair.partition("=")[2])]
    if url.scheme not in _PLAIN_SCHEMES:
        segments += re.split("[@:]", url.netloc)
    if len(url.path) > SHORTEST_PART:
        yield url.path
    if url.query:
        yield f"{url.path}?{url.query}"
    for segment in segments:
        if len(unquote(segment)) >= SHORTEST_PART:
            yield segment
    if password:
        for pair in (f"{unquote(user)}:{unquote(password)}", f"\0{unquote(user)}\0{unquote(password)}"):
            yield base64.b64encode(pair.encode()).decode()  # as HTTP and SMTP write it


def _forms(part: str) -> Iterator[str]:
    """A text as it stands, quoted and unquoted for an address, and as Python and JSON would write it."""
    if not part:
        return
    for text in {part, unquote(part)}:
        yield text
        yield quote(text)
        yield quote(text, safe="")
        yield repr(text)[1:-1]
        yield json.dumps(text)[1:-1]
