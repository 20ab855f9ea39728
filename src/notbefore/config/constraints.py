"""Constraints on values beyond their type, as annotations of the fields.

``config.reading`` applies them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.config.regular_file import open_file
from notbefore.config.secret import Secret
from notbefore.config.shown import shown
from notbefore.core.duration import Duration

MAX_PORT: Final = 65_535
NO_URL: Final = (
    "not a URL: a port is at most 65535, and special characters in a password are written as %XX"
)


class Constraint(Struct, frozen=True):
    """An annotation: ``check`` raises a ``ValueError`` that says what was expected, and never shows
    a secret.

    For a ``Secret`` it gets the revealed text. ``looks``: it reads files, so it is skipped if
    nothing will be sent.
    """

    check: Callable[[Any], object]
    looks: bool = False


def expect(fits: Callable[[Any], object], expected: str) -> Constraint:
    """Return the constraint that ``fits(value)`` is true; ``expected`` describes such values."""

    def check(value: Any) -> None:
        if not fits(value):
            raise ValueError(f"expected {expected}")

    return Constraint(check)


def matching(pattern: str, expected: str) -> Constraint:
    """Return the constraint that a whole text matches a regular expression."""
    return expect(re.compile(pattern, re.ASCII).fullmatch, expected)


def between(least: str, most: str = "", why: str = "") -> Constraint:
    """Return the constraint that a duration is from ``least`` to ``most``."""
    low, high = Duration(least).seconds, Duration(most).seconds if most else float("inf")
    return expect(
        lambda given: low <= given.seconds <= high,
        (f"{least} to {most}" if most else f"{least} or more") + why,
    )


def check_address(text: str) -> None:
    """Raise ``ValueError`` unless it is an HTTP address without a password.

    Never shows it: it may contain a key.
    """
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        raise ValueError(NO_URL) from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("expected http://HOST or https://HOST")
    if re.search(r"\s", text):
        raise ValueError("expected an address without blanks")
    if url.username is not None or url.password is not None:
        raise ValueError("user and password do not belong in the address")


def _readable(name: str) -> None:
    try:
        open_file(name).close()
    except OSError as error:
        path = Path(name)
        place = path.with_name(shown(path.name))  # a secret may stand there by mistake
        raise ValueError(f"{place} cannot be read: {error.strerror}") from None


Port = Annotated[int, expect(lambda port: 1 <= port <= MAX_PORT, f"a port from 1 to {MAX_PORT}")]
LinkUrl = Annotated[  # Alertmanager refuses every alert with a link that has a bare %
    str,
    Constraint(check_address),
    matching(
        "(?:[^%]|%[0-9A-Fa-f]{2})*",
        "two hexadecimal digits after each %: a % itself is written as %25",
    ),
]
HttpUrl = Annotated[
    LinkUrl, expect(lambda url: "?" not in url, "the address alone: what follows `?` may be a key")
]
HostName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*",
        "a name or an address alone: a port stands under its own key",
    ),
]
ReadableFile = Annotated[str, Constraint(_readable, looks=True)]
MailAddress = Annotated[
    str, matching(r'[^\s@<>,;:"\\]+@[^\s@<>,;:"\\]+', "a mail address such as ops@example.org")
]
Password = Annotated[
    Secret, expect(lambda text: len(text.splitlines()) == 1, "one line: this secret has several")
]
_LOGIN: Final = matching(
    "[ -~]+", "one line of ASCII characters: Python's SMTP client sends no others as a login"
)
MailUser = Annotated[str, _LOGIN]
MailPassword = Annotated[Secret, _LOGIN]
SecretUrl = Annotated[Secret, Constraint(check_address)]
HeaderValue = Annotated[
    Secret,
    matching(
        r"(?! )[ -~\xa0-\xff]*(?<! )",
        "one line of text that a header can hold, without space around it",
    ),
]
# RFC 9110's token
HeaderName = Annotated[str, matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "the name of a header")]
Headers = dict[HeaderName, HeaderValue]
HubConnection = Annotated[
    Secret,
    matching(
        r"(?is)(?=.*endpoint=)(?=.*sharedaccess(?:key|signature)=).*",
        "Endpoint=sb://NAMESPACE/;SharedAccessKeyName=NAME;SharedAccessKey=KEY;EntityPath=HUB",
    ),
]
StorageConnection = Annotated[
    Secret,
    matching(
        r"(?is)(?=.*accountname=)(?=.*accountkey=).*|(?=.*blobendpoint=)(?=.*sharedaccesssignature=).*",
        "AccountName=NAME;AccountKey=KEY;EndpointSuffix=core.windows.net, as the storage account"
        " shows it",
    ),
]
SendTimeout = Annotated[Duration, between("100ms", "5m")]


def refuse(*rules: tuple[object, str]) -> None:
    """Raise ``ValueError`` with the texts of the broken rules, one per line.

    For rules about several keys.

    ``rules``: (broken, text). A text may begin with the name of a key and ``: ``.
    """
    if found := [text for broken, text in rules if broken]:
        raise ValueError("\n".join(found))
