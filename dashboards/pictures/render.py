"""Draws pictures of the dashboards: ``make dashboard-pictures``.

Grafana's components (``@grafana/ui``) draw each panel in headless Chromium. The values are the
answers of a real Prometheus that has scraped the fleet of the tests (``tests/support/fleet.py``).
There is no Grafana server, so the heading, the variables and the annotations are missing. Panels
that need a plugin of Grafana are left out, because npm has no package of them; the panels next to
them take their place.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from support.fleet import watched_fleet
from support.scraping import Prometheus

HERE: Final = Path(__file__).parent
DASHBOARDS: Final = HERE.parent
WIDTH: Final = 1600  # pixels
HOURS: Final = 12.0
STEP: Final = 120.0  # seconds between the samples of the past
EVERYTHING: Final = {"region": ".*", "group": ".*", "scale_set": ".*", "vm": ".*"}
PICTURES: Final = {"fleet": ("dark", EVERYTHING), "vm": ("light", {**EVERYTHING, "vm": "EastUS_0"})}
COLUMNS: Final = 24  # of Grafana's grid
PLUGINS: Final = ("heatmap", "state-timeline")
LINE: Final = 38  # pixels of a line of the grid
BUNDLING: Final = (
    "--format=iife",
    '--define:process.env.NODE_ENV="production"',
    "--loader:.svg=dataurl",
    "--loader:.ttf=empty",
    "--log-level=error",
)


def main(into: Path) -> None:
    """Draw all pictures into a directory."""
    for program in ("npm", "chromium", "prometheus", "promtool"):
        if shutil.which(program) is None:
            sys.exit(f"there is no {program}: apt-get install npm chromium prometheus")
    # kept in the environment, because npm installs half a gigabyte
    work = Path(sys.prefix) / "pictures"
    work.mkdir(exist_ok=True)
    for name in ("package.json", "page.tsx", "shoot.mjs"):
        shutil.copy(HERE / name, work)
    run(work, "npm", "install", "--no-audit", "--no-fund", "--loglevel=error")
    run(work, "npx", "esbuild", "page.tsx", "--bundle", "--outfile=page.js", *BUNDLING)
    with (
        tempfile.TemporaryDirectory(prefix="notbefore-pictures-") as temporary,
        watched_fleet(Path(temporary), hours=HOURS, step=STEP) as prometheus,
    ):
        for name, (mode, variables) in PICTURES.items():
            picture = into / f"{name}-{mode}.png"
            shoot(work, picture, page_of(prometheus, name, mode, variables))
            print(f"{picture}: {picture.stat().st_size // 1000} kB")  # noqa: T201 - it is a command


def run(work: Path, *command: str) -> None:
    """Run a command in a directory, and show its output."""
    subprocess.run(
        command,
        cwd=work,
        check=True,
        env={**os.environ, "CHROMIUM": shutil.which("chromium") or ""},
    )


def page_of(
    prometheus: Prometheus, name: str, mode: str, variables: dict[str, str]
) -> dict[str, Any]:
    """Return the dashboard and the results of its queries, for ``page.tsx``."""
    dashboard = json.loads((DASHBOARDS / f"{name}.json").read_bytes())
    panels = drawable_panels(dashboard["panels"])
    dashboard["panels"] = panels
    now = time.time()
    shown = {panel["id"]: query(prometheus, panel, variables, now) for panel in panels}
    begin = (now - HOURS * 3600) * 1000
    return {
        "dashboard": dashboard,
        "shown": shown,
        "width": WIDTH,
        "mode": mode,
        "from": begin,
        "to": now * 1000,
    }


def drawable_panels(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the panels that need no plugin, widened to fill their row."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for panel in panels:
        if panel["type"] not in PLUGINS:
            rows.setdefault(panel["gridPos"]["y"], []).append(panel)

    drawable = []
    for row in rows.values():
        row_width = sum(panel["gridPos"]["w"] for panel in row)
        x = 0.0
        for panel in row:
            width = panel["gridPos"]["w"] * COLUMNS / row_width
            panel["gridPos"] |= {"x": x, "w": width}
            x += width
            drawable.append(panel)
    return drawable


def query(
    prometheus: Prometheus, panel: dict[str, Any], variables: dict[str, str], now: float
) -> list[dict[str, Any]]:
    """Return the series of all queries of a panel."""
    begin = now - HOURS * 3600
    step = HOURS * 3600 / panel.get("maxDataPoints", 360)
    rate = max(4 * STEP, step + STEP)
    all_variables = {
        **variables,
        "__range": f"{HOURS:g}h",
        "__range_s": f"{HOURS * 3600:.0f}",
        "__rate_interval": f"{rate:.0f}s",
        "__rate_interval_ms": f"{rate * 1000:.0f}",
    }
    series = []
    for target in panel["targets"]:
        expr = re.sub(r"\$([a-z_]\w*)", lambda match: all_variables[match[1]], target["expr"])
        if target["instant"]:
            answer = prometheus.ask("query", query=expr, time=now)
        else:
            answer = prometheus.ask("query_range", query=expr, start=begin, end=now, step=step)
        for result in answer["result"]:
            samples = [result["value"]] if target["instant"] else result["values"]
            series.append(
                {
                    "refId": target["refId"],
                    "labels": result["metric"],
                    "times": [seconds * 1000 for seconds, _ in samples],
                    "values": [float(value) for _, value in samples],
                    "step": step * 1000,
                }
            )
    return series


def shoot(work: Path, picture: Path, page: dict[str, Any]) -> None:
    """Draw one picture."""
    # JSON has no NaN, and a `<` in a label must not end the script
    data = re.sub(r"\bNaN\b", "null", json.dumps(page)).replace("<", "\\u003c")
    head = "<!doctype html><meta charset=utf-8><link rel=stylesheet href=page.css>"
    body = f"<body style=margin:0><div id=board></div><script>window.dashboard={data}</script>"
    (work / "page.html").write_text(f"{head}{body}<script src=page.js></script>", encoding="utf-8")
    positions = [panel["gridPos"] for panel in page["dashboard"]["panels"]]
    height = max(position["y"] + position["h"] for position in positions) * LINE
    picture.parent.mkdir(parents=True, exist_ok=True)
    run(
        work,
        "node",
        "shoot.mjs",
        str(work / "page.html"),
        str(WIDTH),
        str(height),
        str(picture.absolute()),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
