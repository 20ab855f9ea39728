"""The first event of a VM: its series begin at 1, and what counts a fleet's events counts it, in a
real Prometheus.
"""

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
VARIABLES = {
    # more than it takes
    "__range": "2m",
    "__range_s": "120",
    "__rate_interval": "2m",
    "__rate_interval_ms": "120000",
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

            def grown() -> list[float | None]:
                return [prometheus.value(resolved(expr, VARIABLES)) for expr in (announced, notice)]

            eventually(lambda: prometheus.value("up == 1"))
            eventually(lambda: (prometheus.value("count_over_time(up[1m])") or 0) >= 4)
            assert prometheus.value(f"{CHANGES}_total") is None

            simulator.set_document(body(item("first"), incarnation=2))

            eventually(lambda: prometheus.value(f"{CHANGES}_total"))
            becomes(grown, [1, 1])
            eventually(lambda: prometheus.value(resolved(median, VARIABLES)) is not None)
            # this is why: of the same series increase() sees nothing
            eventually(
                lambda: (prometheus.value(f"count_over_time({CHANGES}_total[1m])") or 0) >= 3
            )
            becomes(lambda: prometheus.value(f"increase({CHANGES}_total[1m])"), 0)
            becomes(grown, [1, 1])

            simulator.set_document(body(item("first"), item("second"), incarnation=3))
            eventually(lambda: prometheus.value(f"{CHANGES}_total") == 2)
            becomes(grown, [2, 2])

            # once the windows begin after the first events, nothing has grown
            later = time.time() + 180
            for expr in (announced, notice):
                (found,) = prometheus.ask("query", query=resolved(expr, VARIABLES), time=later)[
                    "result"
                ] or [{"value": [0, "0"]}]
                assert float(found["value"][1]) == pytest.approx(0)
