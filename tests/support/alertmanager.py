"""A cluster of two Alertmanagers of Debian that gossip."""

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from support.agent import PATIENCE, eventually, free_port, get
from support.needs import needs


@contextmanager
def cluster_of_two(directory: Path, configuration: dict[str, Any]) -> Iterator[list[int]]:
    """The ports of the two, once they know each other."""
    needs("prometheus-alertmanager")
    config = directory / "alertmanager.yml"
    config.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    ports = [free_port(), free_port()]
    gossip = [free_port(), free_port()]
    with ExitStack() as stack:
        for number in (0, 1):
            log = stack.enter_context((directory / f"am-{number}.log").open("wb"))
            words = [
                "prometheus-alertmanager",
                f"--config.file={config}",
                f"--storage.path={directory / f'am-{number}'}",
                f"--web.listen-address=127.0.0.1:{ports[number]}",
                f"--cluster.listen-address=127.0.0.1:{gossip[number]}",
                f"--cluster.peer=127.0.0.1:{gossip[1 - number]}",
                "--cluster.pushpull-interval=1s",
                "--cluster.gossip-interval=100ms",
                "--cluster.settle-timeout=5s",
                "--cluster.peer-timeout=10s",
            ]
            process = subprocess.Popen(words, stdout=log, stderr=log)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.terminate)
        for port in ports:
            eventually(lambda: _state(port) == ("ready", 2))
        yield ports


def alerts(port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(get(port, "/api/v2/alerts")[1])
    return found


def _state(port: int) -> tuple[str, int]:
    with suppress(OSError, http.client.HTTPException, ValueError):
        state = json.loads(get(port, "/api/v2/status")[1])["cluster"]
        return state["status"], len(state["peers"])
    return "", 0
