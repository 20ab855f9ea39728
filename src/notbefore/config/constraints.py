"""Constraints on values beyond their type: annotations of fields, for ``config.reading``."""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, available_timezones

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
    """An annotation of a type.

    ``check`` gets a value, of a ``Secret`` the revealed text. It raises a ``ValueError`` that says
    what was expected, and that does not contain the value: it may be a secret.
    """

    check: Callable[[Any], object]
    reads_files: bool = False  # then it is checked only if something will be sent


def expect(fits: Callable[[Any], object], expected: str) -> Constraint:
    """Return the constraint that ``fits(value)`` is true; ``expected`` describes such values."""

    def check(value: Any) -> None:
        if not fits(value):
            raise ValueError(f"expected {expected}")

    return Constraint(check)


def matching(pattern: str, expected: str) -> Constraint:
    """Return the constraint that a whole text matches a regular expression."""
    return expect(re.compile(pattern, re.ASCII).fullmatch, expected)


def between(shortest: str, longest: str = "", why: str = "") -> Constraint:
    """Return the constraint that a duration is from ``shortest`` to ``longest``."""
    least_seconds = Duration(shortest).seconds
    most_seconds = float("inf")
    expected = f"{shortest} or more"
    if longest:
        most_seconds = Duration(longest).seconds
        expected = f"{shortest} to {longest}"

    def fits(duration: Duration) -> bool:
        return least_seconds <= duration.seconds <= most_seconds

    return expect(fits, expected + why)


def check_address(text: str) -> None:
    """Raise ``ValueError`` unless it is an HTTP address without a password.

    The error does not contain the address: it may contain a key.
    """
    try:
        url = urlsplit(text)
        _ = url.port  # raises if it is no number, or too large
    except ValueError:
        raise ValueError(NO_URL) from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("expected http://HOST or https://HOST")
    if re.search(r"\s", text):
        raise ValueError("expected an address without blanks")
    if url.username is not None or url.password is not None:
        raise ValueError("user and password do not belong in the address")


def _check_readable(name: str) -> None:
    try:
        open_file(name).close()
    except OSError as error:
        path = Path(name)
        shown_path = path.with_name(shown(path.name))  # the name may be a secret, by mistake
        raise ValueError(f"{shown_path} cannot be read: {error.strerror}") from None


def _check_time_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # such as the name of a directory, or of no zone
        zones = {zone.casefold(): zone for zone in available_timezones()}
        if not zones:
            raise ValueError(
                "this machine has no time zones: install the system's package tzdata, or run"
                " `pip install tzdata`"
            ) from None
        hint = ", such as Europe/Berlin"
        near = get_close_matches(name.casefold(), zones, n=1)
        if near:
            hint = f": did you mean {zones[near[0]]!r}?"
        raise ValueError(f"expected a time zone of the IANA database{hint}") from None


def _check_template(source: str) -> None:
    from notbefore.config.template import Template  # Jinja2, 2 MB

    Template(source)


def _is_port(number: int) -> bool:
    return 1 <= number <= MAX_PORT


def _has_no_query(url: str) -> bool:
    return "?" not in url


def _is_not_framing(header: str) -> bool:
    """Whether a header does not say where a request ends."""
    return header.lower() not in ("content-length", "transfer-encoding")


def _is_one_line(text: str) -> bool:
    return len(text.splitlines()) == 1


Port = Annotated[int, expect(_is_port, f"a port from 1 to {MAX_PORT}")]
LinkUrl = Annotated[  # Alertmanager refuses every alert with a link that has a bare %
    str,
    Constraint(check_address),
    matching(
        "(?:[^%]|%[0-9A-Fa-f]{2})*",
        "two hexadecimal digits after each %: a % itself is written as %25",
    ),
]
HttpUrl = Annotated[
    LinkUrl, expect(_has_no_query, "the address alone: what follows `?` may be a key")
]
ManagementUrl = Annotated[  # requests to it have a token
    HttpUrl,
    matching(
        r"https://[^/]+/?|http://(?:127\.0\.0\.1|localhost)(?::[0-9]+)?/?",
        "https://HOST (http only on loopback)",
    ),
]
AzureVersion = Annotated[
    str, matching(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:-preview)?", "YYYY-MM-DD or YYYY-MM-DD-preview")
]
HostName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*",
        "a name or an address alone: a port stands under its own key",
    ),
]
ReadableFile = Annotated[str, Constraint(_check_readable, reads_files=True)]
TimeZone = Annotated[str, Constraint(_check_time_zone)]
MailAddress = Annotated[
    str, matching(r'[^\s@<>,;:"\\]+@[^\s@<>,;:"\\]+', "a mail address such as ops@example.org")
]
Password = Annotated[Secret, expect(_is_one_line, "one line: this secret has several")]
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
HeaderName = Annotated[
    str,
    matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "the name of a header"),  # RFC 9110's token
    expect(_is_not_framing, "another header: the agent writes this one itself"),
]
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
TemplateText = Annotated[str, Constraint(_check_template)]
SendTimeout = Annotated[Duration, between("100ms", "5m")]


def raise_mistakes(texts: Sequence[str]) -> None:
    """Raise ``ValueError`` with these texts, one per line, if there are any.

    For rules about several keys of a struct. A text may begin with the name of a key and ``: ``.
    """
    if texts:
        raise ValueError("\n".join(texts))
