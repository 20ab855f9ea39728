"""A cluster of two real Alertmanagers, from Debian's package."""

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
    """Start two Alertmanagers, wait until each has the other as peer, and yield their ports."""
    needs("prometheus-alertmanager")
    config = directory / "alertmanager.yml"
    config.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    ports = [free_port(), free_port()]
    gossip_ports = [free_port(), free_port()]
    with ExitStack() as stack:
        for number in (0, 1):
            log = stack.enter_context((directory / f"am-{number}.log").open("wb"))
            words = [
                "prometheus-alertmanager",
                f"--config.file={config}",
                f"--storage.path={directory / f'am-{number}'}",
                f"--web.listen-address=127.0.0.1:{ports[number]}",
                f"--cluster.listen-address=127.0.0.1:{gossip_ports[number]}",
                f"--cluster.peer=127.0.0.1:{gossip_ports[1 - number]}",
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
    """Return the alerts of an Alertmanager."""
    _, body = get(port, "/api/v2/alerts")
    rows: list[dict[str, Any]] = json.loads(body)
    return rows


def _state(port: int) -> tuple[str, int]:
    """Return the state of the cluster and the number of its members, as one of them sees it."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        _, body = get(port, "/api/v2/status")
        cluster = json.loads(body)["cluster"]
        return cluster["status"], len(cluster["peers"])
    return "", 0
