"""``Request`` and ``Task``: waitress's, but strict about the form of a path and about how long a body is."""

from typing import Any
from urllib.parse import urlsplit

from waitress.parser import HTTPRequestParser, ParsingError
from waitress.task import WSGITask


class Request(HTTPRequestParser):  # type: ignore[misc]  # waitress has no types
    """One request. ``path`` is as it was sent: ``//metrics`` and ``/%6detrics`` are not ``/metrics``."""

    path: str = ""
    headers: dict[str, str]
    error: Any  # what is wrong with it; None

    def parse_header(self, header_plus: bytes) -> None:
        """Read the header; raises ``ParsingError``, after which the connection is closed."""
        try:
            super().parse_header(header_plus)
        except ValueError as error:  # such as a target of `http://[`, or a length of 5,000 digits
            raise ParsingError(str(error)) from None
        # RFC 9112, 6.1 and 6.3: two lengths of one body are how requests are smuggled past a proxy
        if "TRANSFER_ENCODING" in self.headers or (self.chunked and "CONTENT_LENGTH" in self.headers):
            raise ParsingError("Transfer-Encoding together with Content-Length, or in version 1.0")
        if self.proxy_netloc:  # RFC 9112, 3.2.2: the host of an absolute target counts, not the header
            self.headers["HOST"] = self.proxy_netloc
            self.path = urlsplit(self.request_uri).path or "/"
        else:
            self.path = self.request_uri.partition("?")[0]


class Task(WSGITask):  # type: ignore[misc]  # as above
    """Answers one request through the WSGI application."""

    def get_environment(self) -> dict[str, Any]:
        """The WSGI environment."""
        environ: dict[str, Any] = super().get_environment()
        environ["PATH_INFO"] = self.request.path  # waitress decodes it and strips slashes
        return environ
