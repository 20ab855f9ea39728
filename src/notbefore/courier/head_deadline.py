"""``HeadDeadlineMixin``: the head of an HTTP answer has an end as a whole."""

import socket
import threading
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Final

LONGEST_HEAD: Final = 300.0  # seconds for the head of an answer, where no timeout says less


class HeadDeadlineMixin:
    """Beside a class of connections, of ``http.client`` or urllib3.

    (A timeout of a socket is for its next bytes alone: a head that drips would never end.)
    """

    sock: Any

    def getresponse(self) -> Any:
        """As of the class beside it; raises ``TimeoutError`` where the head does not end within the timeout."""
        sock, late = self.sock, threading.Event()

        def cut() -> None:
            late.set()
            with suppress(OSError, AttributeError):  # it has ended after all
                sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer((sock.gettimeout() if sock is not None else None) or LONGEST_HEAD, cut)
        timer.daemon = True
        timer.start()
        response = None
        try:
            response = super().getresponse()  # type: ignore[misc] # of the class beside it
        except (OSError, HTTPException):
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if late.is_set():  # a head that was cut off looks like one that has ended, or like a receiver that hung up
            raise TimeoutError("no answer in time")
        return response
