"""What values must be like beyond their type, as annotations of the fields: ``config.reading`` holds them all."""

import re
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta, Struct

from notbefore.config.open_file import open_file
from notbefore.config.secret import Secret
from notbefore.core.duration import Duration

MAX_PORT: Final = 65_535
NO_URL: Final = "not a URL: a port is at most 65535, and special characters in a password are written as %XX"


class Form(Struct, frozen=True):
    """An annotation: ``check`` raises ``ValueError`` that says what was expected, and never shows a secret.

    Of a ``Secret`` it is given the text. ``pattern``: for the JSON schema. ``looks``: it looks at files, so that it is
    left out where nothing is sent.
    """

    check: Callable[[Any], object]
    pattern: str = ""
    looks: bool = False


def expect(fits: Callable[[Any], object], expected: str, pattern: str = "") -> Form:
    """Return the form of values for which ``fits`` holds; ``expected`` says what they are like."""

    def check(value: Any) -> None:
        if not fits(value):
            raise ValueError(f"expected {expected}")

    return Form(check, pattern)


def matching(pattern: str, expected: str) -> Form:
    """Return the form of texts that match a regular expression as a whole."""
    return expect(re.compile(pattern, re.ASCII).fullmatch, expected, f"^(?:{pattern})$")


def between(least: str, most: str = "", why: str = "") -> Form:
    """Return the form of durations from ``least`` to ``most``."""
    low, high = Duration(least).seconds, Duration(most).seconds if most else float("inf")
    return expect(
        lambda given: low <= given.seconds <= high, (f"{least} to {most}" if most else f"{least} or more") + why
    )


def _http(text: str) -> SplitResult:
    """Return the parts of an address over HTTP; raises ``ValueError``, which does not show it: it may hold a key."""
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        raise ValueError(NO_URL) from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("expected http://HOST or https://HOST")
    _without_blanks(text)
    return url


def _without_blanks(text: str) -> None:
    if re.search(r"\s", text):
        raise ValueError("expected an address without blanks")


def check_address(text: str) -> None:
    """Raise ``ValueError`` unless it is an HTTP address without a password."""
    url = _http(text)
    if url.username is not None or url.password is not None:
        raise ValueError("user and password do not belong in the address")


def _mail_url(text: str) -> None:
    try:
        scheme = urlsplit(text).scheme
    except ValueError:
        raise ValueError(NO_URL) from None
    if scheme not in ("mailto", "mailtos"):
        raise ValueError("expected mailtos://USER:PASSWORD@HOST?from=vm@example.org&to=ops@example.org")
    _without_blanks(text)


def _host(text: str) -> None:
    if ":" in text:
        try:
            ip_address(text)
        except ValueError:
            raise ValueError("expected a name or an address alone: a port stands under its own key") from None
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", text, re.ASCII):
        raise ValueError("expected a name or an address")


def check_header(text: str) -> None:
    """Raise ``ValueError`` for what cannot be the value of a header; its text does not show the value."""
    wrong = next((place for place, letter in enumerate(text, start=1) if not " " <= letter <= "\xff"), None)
    if wrong is not None or text != text.strip():
        where = f"its character {wrong}" if wrong else "the space around it"
        raise ValueError(f"expected one line of text that a header can hold: check {where}")


_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)  # RFC 9110's token


def _header_names(headers: dict[str, Any]) -> None:
    seen: dict[str, str] = {}
    for name in headers:
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a header")
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise ValueError(f"{other!r} and {name!r} are one header: give it once")


def _parts(text: str) -> set[str]:
    """Return the names in ``Name=value;Name=value``; raises ``ValueError`` for anything else."""
    pairs = [part.partition("=") for part in text.strip().rstrip(";").split(";")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError
    return {name.strip().lower() for name, _, value in pairs if value}


def names_hub(text: str) -> bool:
    """Return whether a connection string says which hub it is for."""
    return "entitypath" in _parts(text)


def _signed(*ways: set[str]) -> Callable[[str], bool]:
    def fits(text: str) -> bool:
        try:
            names = _parts(text)
        except ValueError:
            return False
        return any(way <= names for way in ways)

    return fits


def _readable(name: str) -> None:
    try:
        open_file(Path(name)).close()
    except OSError as error:
        hint = "" if name.isprintable() else r": in double quotes \t is a tab: write a path in single quotes"
        raise ValueError(f"{name} cannot be read: {error.strerror}{hint}") from None


Port = Annotated[int, Meta(ge=1, le=MAX_PORT)]
HttpUrl = Annotated[str, Form(check_address, pattern=r"^https?://\S+$")]
HostName = Annotated[str, Form(_host)]
ReadableFile = Annotated[str, Form(_readable, looks=True)]
MailAddress = Annotated[str, matching(r'[^\s@<>,;:"\\]+@[^\s@<>,;:"\\]+', "a mail address such as ops@example.org")]
Password = Annotated[Secret, expect(lambda text: len(text.splitlines()) == 1, "one line: this secret has several")]
SecretUrl = Annotated[Secret, Form(check_address)]
MailUrl = Annotated[Secret, Form(_mail_url)]
HeaderValue = Annotated[Secret, Form(check_header)]
Headers = Annotated[dict[str, HeaderValue], Form(_header_names)]
HubConnection = Annotated[
    Secret,
    expect(
        _signed({"endpoint", "sharedaccesskeyname", "sharedaccesskey"}, {"endpoint", "sharedaccesssignature"}),
        "Endpoint=sb://NAMESPACE/;SharedAccessKeyName=NAME;SharedAccessKey=KEY;EntityPath=HUB",
    ),
]
StorageConnection = Annotated[
    Secret,
    expect(
        _signed({"accountname", "accountkey"}, {"blobendpoint", "sharedaccesssignature"}),
        "AccountName=NAME;AccountKey=KEY;EndpointSuffix=core.windows.net, as the storage account shows it",
    ),
]
SendTimeout = Annotated[Duration, between("100ms", "5m")]


def refuse(*rules: tuple[object, str]) -> None:
    """Raise ``ValueError`` with the text of each rule that is broken, a line each; for what several keys say together.

    A text may begin with the name of a key and ``: ``.
    """
    if found := [text for broken, text in rules if broken]:
        raise ValueError("\n".join(found))
