"""The Helm chart, rendered by Helm's own library."""

from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

CHART: Final = Path(__file__).parents[2] / "config" / "helm" / "notbefore"
ACCESS: Final[dict[str, dict[str, Any]]] = {  # who may ask the agents: the values that docs/getting-started.md names
    "node": {},
    "open": {"access": "open", "podMonitor": {"enabled": True}},
    "tls": {"access": "tls", "podMonitor": {"enabled": True}},
}


def rendered(
    values: dict[str, Any], *, name: str = "notbefore", namespace: str = "notbefore"
) -> dict[tuple[str, str], Any]:
    """The objects that `helm template` gives, by kind and name."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=name, namespace=namespace)
    objects = [one for path, text in texts.items() if path.endswith(".yaml") for one in yaml.safe_load_all(text) if one]
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects)
    return found
