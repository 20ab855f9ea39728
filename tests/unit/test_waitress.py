"""``web/`` subclasses internals of waitress: a change of their source must be reviewed."""

import hashlib
import inspect

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer, TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

# what ``web/server.py``, ``web/channel.py`` and ``web/tls_channel.py`` build on
FOUNDATION = (
    Adjustments,
    BaseWSGIServer,
    HTTPChannel,
    TcpWSGIServer,
    ThreadedTaskDispatcher,
    wasyncore,
)
REVIEWED = "a55d6f16c9d5200cb69308c78572c279e6cae6e17f223c69b0f60cded32e39f7"


def test_waitress_is_as_it_was_reviewed() -> None:
    source = "".join(inspect.getsource(part) for part in FOUNDATION)

    digest = hashlib.sha256(source.encode()).hexdigest()

    assert digest == REVIEWED, (
        "waitress has changed: compare its source with what web/ overrides and calls, run the tests"
        f" of tests/integration/test_http_server.py, then set REVIEWED to {digest}"
    )
