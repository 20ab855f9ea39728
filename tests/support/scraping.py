"""``Prometheus`` runs a real Prometheus with past samples, and queries it."""

import http.client
import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import yaml

from support.agent import PATIENCE, eventually, free_port, get
from support.needs import needs


class Prometheus:
    """Scrapes ``targets`` each second.

    ``history``: past samples, as OpenMetrics text with timestamps. ``exporters``: instances of
    another job, and whether they answer; Prometheus itself answers in their place. ``settings``:
    further sections of the configuration.
    """

    def __init__(
        self,
        directory: Path,
        targets: Sequence[dict[str, Any]],
        history: bytes = b"",
        exporters: Mapping[str, bool] | None = None,
        job: str = "notbefore",
        **settings: Any,
    ) -> None:
        needs("prometheus", "promtool")
        self.port = free_port()
        data = directory / "prometheus"
        data.mkdir(parents=True)
        if history:
            _import(history, directory / "history.txt", data)
        config = directory / "prometheus.yml"
        values = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [*targets]},
                {"job_name": "node", "static_configs": self._targets_of(exporters or {})},
            ],
            **settings,
        }
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self._log = (directory / "prometheus.log").open("wb")
        words = [
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self._process = subprocess.Popen(
            ["prometheus", *words, "--storage.tsdb.retention.time=10y"],
            stdout=self._log,
            stderr=self._log,
        )

    def _targets_of(self, exporters: Mapping[str, bool]) -> list[dict[str, Any]]:
        targets: list[dict[str, Any]] = []
        for instance, answers in exporters.items():
            port = self.port if answers else free_port()
            target = {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": instance}}
            targets.append(target)
        return targets

    def __enter__(self) -> Self:
        try:
            eventually(self._answers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._log.close()

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return get(self.port, "/-/ready")[0] == 200
        return False

    def ask(self, path: str, **parameters: str | float) -> Any:
        """Return the ``data`` of an answer of the API, or fail with the error of the answer."""
        status, body = get(self.port, f"/api/v1/{path}?{urlencode(parameters)}")
        answer = json.loads(body)
        assert status == 200, f"{answer['error']}: {parameters}"
        return answer["data"]

    def value(self, expr: str) -> float | None:
        """Return the value of an instant query's first series; ``None`` without a series."""
        rows = self.ask("query", query=expr)["result"]
        if not rows:
            return None
        _, value = rows[0]["value"]
        return float(value)


def _import(history: bytes, text_file: Path, data: Path) -> None:
    """Write past samples into the directory of a Prometheus that does not run yet."""
    text_file.write_bytes(history)
    command = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        "--quiet",
        str(text_file),
        str(data),
    ]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
