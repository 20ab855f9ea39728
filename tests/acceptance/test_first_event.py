"""A real Prometheus counts the first event of a VM, although its series begin at 1."""

import time
from pathlib import Path

import pytest

from boards import queries
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, becomes, eventually
from support.azure import ME, body, item
from support.panels import resolved
from support.scraping import Prometheus

NOTICE = "azure_scheduled_event_initial_notice_seconds"
CHANGES = "azure_scheduled_event_changes"
WINDOW = 600  # seconds: far longer than this test takes
VARIABLES = {
    "__range": "10m",
    "__range_s": f"{WINDOW}",
    "__rate_interval": "10m",
    "__rate_interval_ms": f"{WINDOW}000",
    "region": ".*",
    "group": ".*",
    "scale_set": ".*",
    "vm": ".*",
}


def test_first_event_of_a_vm_is_counted_once(tmp_path: Path) -> None:
    announced = queries.grown_by(
        "change", f'{CHANGES}_total{{change="announced"}}', f"{CHANGES}_created"
    )
    notice = f"max({queries.notice_buckets()})"
    median = queries.quantile_by("event_type", 0.5, NOTICE, f"{NOTICE}_created")
    with (
        Simulator((ME,)) as simulator,
        RunningAgent(simulator.endpoint, tmp_path / "state") as agent,
    ):
        targets = [{"targets": [f"127.0.0.1:{agent.port}"]}]
        with Prometheus(tmp_path, targets) as prometheus:

            def value(query: str) -> float:
                return prometheus.value(query) or 0.0

            def grown() -> list[float | None]:
                return [prometheus.value(resolved(expr, VARIABLES)) for expr in (announced, notice)]

            eventually(lambda: value("sum_over_time(up[10m])") >= 4)
            assert prometheus.value(f"{CHANGES}_total") is None

            simulator.set_document(body(item("first"), incarnation=2))

            eventually(lambda: prometheus.value(f"{CHANGES}_total"))
            becomes(grown, [1, 1])
            eventually(lambda: prometheus.value(resolved(median, VARIABLES)) is not None)
            # increase() alone does not count the first event
            eventually(lambda: value(f"count_over_time({CHANGES}_total[10m])") >= 3)
            becomes(lambda: prometheus.value(f"increase({CHANGES}_total[10m])"), 0)
            becomes(grown, [1, 1])

            simulator.set_document(body(item("first"), item("second"), incarnation=3))
            eventually(lambda: prometheus.value(f"{CHANGES}_total") == 2)
            becomes(grown, [2, 2])

            # in a window that begins after the events, nothing grows
            later = time.time() + WINDOW + 60
            for expr in (announced, notice):
                query = resolved(expr, VARIABLES)
                for row in prometheus.ask("query", query=query, time=later)["result"]:
                    assert float(row["value"][1]) == pytest.approx(0)
