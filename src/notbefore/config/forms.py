"""What an address over HTTP and the names of headers must be like."""

import re
from typing import Final
from urllib.parse import urlsplit

from notbefore.config.secret import Secret

Headers = dict[str, Secret]
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)  # RFC 9110's token


def check_address_form(url: str, key: str) -> None:
    """Raise ``ValueError`` that begins with ``key`` unless ``url`` is an HTTP address without a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key}: expected http://HOST or https://HOST")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{key}: user and password do not belong in the address")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def check_header_names(headers: Headers) -> None:
    """Raise ``ValueError`` for what is no name of a header, and for one that is given twice."""
    seen: dict[str, str] = {}
    for name in headers:
        if not _HEADER.fullmatch(name):
            raise ValueError(f"headers: {name!r} is no name of a header")
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(f"headers: {other!r} and {name!r} are one header: give it once")
