"""``python -m boards`` writes the dashboards as JSON."""

from pathlib import Path

from boards import agents, event_hub, fleet, vm

DASHBOARDS = {
    "fleet.json": fleet.build,
    "vm.json": vm.build,
    "notbefore.json": agents.build,
    "event-hub.json": event_hub.build,
}


def main(directory: Path) -> None:
    """Write all dashboards."""
    for name, build in DASHBOARDS.items():
        (directory / name).write_text(build(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parents[2])
