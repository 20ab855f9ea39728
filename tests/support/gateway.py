"""What leads a name of a VM to its agent, as the names in a network would."""

import http.server
import threading
from typing import Any, Self

from support.agent import RunningAgent, get


class Gateway(http.server.ThreadingHTTPServer):
    """Leads /NAME to the agent of that VM."""

    daemon_threads = True

    def __init__(self) -> None:
        self.agents: dict[str, RunningAgent] = {}
        super().__init__(("127.0.0.1", 0), GatewayHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """For ``peers.url``."""
        return f"http://127.0.0.1:{self.server_address[1]}/{{vm}}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class GatewayHandler(http.server.BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        agent = self.server.agents.get(self.path.strip("/"))
        try:
            status = get(agent.port, "/readyz")[0] if agent is not None else 502
        except OSError:
            status = 502
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass
