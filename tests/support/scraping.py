"""A real Prometheus: what it scrapes, what it held before, and what it answers."""

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
    """Scrapes each second.

    ``history`` is OpenMetrics text with timestamps that it is to have known all along.

    ``exporters`` are the instances of another job, and whether it answers there (as which
    Prometheus itself does); ``settings`` are what else stands in its configuration.
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
            text = directory / "history.txt"
            text.write_bytes(history)
            command = [
                "promtool",
                "tsdb",
                "create-blocks-from",
                "openmetrics",
                "--quiet",
                str(text),
                str(data),
            ]
            subprocess.run(command, check=True, timeout=600, capture_output=True)
        config = directory / "prometheus.yml"
        scraped = {"job_name": job, "static_configs": [*targets]}
        others = [
            {
                "targets": [f"127.0.0.1:{self.port if up else free_port()}"],
                "labels": {"instance": instance},
            }
            for instance, up in (exporters or {}).items()
        ]
        jobs = [scraped, {"job_name": "node", "static_configs": others}]
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config.write_text(
            yaml.safe_dump({"global": every, "scrape_configs": jobs, **settings}), encoding="utf-8"
        )
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

    def __enter__(self) -> Self:
        eventually(self._answers)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._log.close()

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return get(self.port, "/-/ready")[0] == 200
        return False

    def ask(self, path: str, **words: str | float) -> Any:
        """The ``data`` of an answer of its API.

        Fails with what it says of a query that is wrong.
        """
        status, body = get(self.port, f"/api/v1/{path}?{urlencode(words)}")
        answer = json.loads(body)
        assert status == 200, f"{answer['error']}: {words}"
        return answer["data"]

    def value(self, expr: str) -> float | None:
        """The value of an instant query's only series; ``None`` without one."""
        found = self.ask("query", query=expr)["result"]
        return float(found[0]["value"][1]) if found else None
