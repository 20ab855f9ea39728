"""The cause of a failed HTTP request: the error of ``requests`` as a few words."""

import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import requests
import urllib3

# the errors of ``requests`` and of the libraries below it, while it sends or reads
REQUEST_ERRORS: Final = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    OSError,
    ValueError,
)


def host_and_port(url: str) -> str:
    """Return the part of an address that may be shown: the rest may be secret."""
    with suppress(ValueError):
        return urlsplit(url).netloc.rpartition("@")[2]
    return "the address"


def innermost_cause(error: BaseException) -> str:
    """Return the innermost cause that says something: ``Connection refused``."""
    causes = (getattr(error, "reason", None), error.__cause__, error.__context__, *error.args[:1])
    for cause in causes:
        if isinstance(cause, BaseException):
            return innermost_cause(cause)
    if isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError)):
        return type(error).__name__
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def forget_frames(error: BaseException) -> None:
    """Free what the frames of an error hold, such as megabytes of headers.

    urllib3 stores a caught error in a local variable: error, traceback and frame refer to each
    other, and only the garbage collector would find them, much later.
    """
    for related in _related(error):
        traceback.clear_frames(related.__traceback__)
        related.__traceback__ = None


def _related(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, those that it was raised from, and those that it contains; each once."""
    waiting = [error]
    visited_ids: set[int] = set()
    while waiting:
        current = waiting.pop()
        if id(current) in visited_ids:
            continue
        visited_ids.add(id(current))
        for other in (current.__cause__, current.__context__, *_contained(current)):
            if isinstance(other, BaseException):
                waiting.append(other)
        yield current


def _contained(error: BaseException) -> tuple[Any, ...]:
    return (getattr(error, "reason", None), *error.args)
