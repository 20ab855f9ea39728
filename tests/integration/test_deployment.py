"""The files next to the package: the recipe of the image, workflows, units, and examples for other
programs.
"""

import json
import re
import socket
import sys
import textwrap
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import pytest
import yaml

from notbefore.commands.main import parsed
from notbefore.config.load import load
from notbefore.config.model import default_state_dir
from notbefore.courier.supervisor import STOP_SECONDS
from notbefore.fleet.instance import HAND_OVER_PATIENCE
from support.agent import NOWHERE, eventually, run
from support.needs import needs

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = ROOT / "config"
BIN: Final = Path(sys.executable).parent
UNITS: Final = [CONFIG / "systemd" / f"{name}.service" for name in ("notbefore", "notbefore-fleet")]
WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS: Final = (
    "config/fleet/install.sh",
    "config/commands/webdevops.sh",
    ".ci/run",
    "tools/bundle.sh",
)
ALERTMANAGER: Final = CONFIG / "alertmanager/alertmanager.yml"
TEMPLATES: Final = ALERTMANAGER.with_name("notbefore.tmpl")
PROMETHEUS: Final = CONFIG / "prometheus/prometheus.yml"


def check(*command: str | Path) -> str:
    """Run a command that must succeed; return its output."""
    result = run(*command)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", ROOT / "Dockerfile"),
        ("shellcheck", *(ROOT / name for name in SCRIPTS)),
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS),
        (
            "check-jsonschema",
            "--builtin-schema",
            "vendor.dependabot",
            ROOT / ".github" / "dependabot.yml",
        ),
        ("zizmor", "--offline", "--quiet", ROOT / ".github"),
    ],
    ids=lambda command: f"{command[0]} {Path(command[-1]).name}",
)
def test_recipe_scripts_and_workflows_are_clean(command: tuple[str | Path, ...]) -> None:
    check(BIN / command[0], *command[1:])


def test_actions_are_pinned_by_digest() -> None:
    workflows = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    actions = re.findall(r"uses: (.*)", workflows)
    pinned = re.compile(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+")

    assert len(actions) > 10
    assert [action for action in actions if not pinned.fullmatch(action)] == []


def test_workflows_use_no_image_without_a_digest() -> None:
    result = run(BIN / "zizmor", "--offline", "--format=json", "--pedantic", ROOT / ".github")

    findings = [
        (finding["determinations"]["severity"], finding["ident"])
        for finding in json.loads(result.stdout)
    ]
    assert [finding for finding in findings if finding[0] in ("Medium", "High")] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_has_a_low_exposure_level(unit: Path) -> None:
    needs("systemd-analyze")

    output = check("systemd-analyze", "security", "--offline=true", "--no-pager", unit)

    exposure = re.search(rf"Overall exposure level for {unit.name}: ([\d.]+)", output)
    assert exposure, output
    assert float(exposure[1]) <= 1.5


def installed_unit(unit: Path, directory: Path) -> Path:
    """Write the unit into the directory, with the command of the tests; return its path."""
    text = unit.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/")
    path = directory / unit.name
    path.write_text(text, encoding="utf-8")
    return path


def verify(unit: Path) -> None:
    """Check that systemd accepts a unit without a warning."""
    needs("systemd-analyze")
    result = run("systemd-analyze", "verify", "--man=no", unit)
    assert result.returncode == 0
    assert result.stdout == ""
    assert result.stderr == ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    verify(installed_unit(unit, tmp_path))


@pytest.mark.parametrize("document", ["access.md", "azure-monitor.md"])
def test_systemd_accepts_the_unit_with_the_drop_in_of_a_document(
    document: str, tmp_path: Path
) -> None:
    unit = installed_unit(UNITS[0], tmp_path)
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    (drop_in,) = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    override = tmp_path / f"{unit.name}.d" / "override.conf"
    override.parent.mkdir()
    override.write_text(textwrap.dedent(drop_in), encoding="utf-8")

    verify(unit)


def settings_of(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"(?m)^(\w+)=(.*)", unit.read_text(encoding="utf-8")))


def test_units_share_a_sandbox() -> None:
    sandboxes = [
        unit.read_text(encoding="utf-8").partition("CapabilityBoundingSet=")[2] for unit in UNITS
    ]

    assert sandboxes[0] != ""
    assert sandboxes[0] == sandboxes[1]


def test_units_give_enough_time_to_stop() -> None:
    agent, fleet = (settings_of(unit) for unit in UNITS)

    assert int(agent["TimeoutStopSec"]) > STOP_SECONDS + 5
    assert int(fleet["TimeoutStopSec"]) > HAND_OVER_PATIENCE + STOP_SECONDS + 5


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_lets_its_process_end_the_courier(unit: Path) -> None:
    assert settings_of(unit)["KillMode"] == "mixed"


def test_unit_creates_the_default_state_directory() -> None:
    agent = settings_of(UNITS[0])

    assert default_state_dir() == Path("/var/lib") / agent["StateDirectory"]


def test_agent_and_fleet_listen_on_different_ports() -> None:
    fleet = settings_of(UNITS[1])
    options = parsed(fleet["ExecStart"].split()[1:])

    assert options.listen != load(None, {}, {}).server.listen


def test_unit_does_not_restart_an_agent_that_cannot_start(tmp_path: Path) -> None:
    wrong = tmp_path / "notbefore.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    words = (BIN / "notbefore", "run", "--imds", NOWHERE, "--state-dir", tmp_path)

    wrong_configuration = run(*words, wrong).returncode
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        occupied_address = run(*words, "--listen", f"127.0.0.1:{port}").returncode

    agent = settings_of(UNITS[0])
    assert agent["Restart"] == "always"
    assert agent["RestartPreventExitStatus"] == f"{wrong_configuration} {occupied_address}"


def test_windows_service_runs_the_agent() -> None:
    file = CONFIG / "windows" / "notbefore-service.xml"

    service = ET.parse(file).getroot()  # noqa: S314 - a file of this repository

    assert (service.findtext("arguments") or "").startswith("run ")


def test_example_configuration_is_the_default() -> None:
    assert load(CONFIG / "notbefore.yml", {}, {}) == load(None, {}, {})


def test_example_configuration_is_valid_when_its_lines_are_enabled(tmp_path: Path) -> None:
    text = (CONFIG / "notbefore.yml").read_text(encoding="utf-8")
    # a comment has one space after its `#`; a disabled line has none, or its indentation of two
    enabled = re.sub(r"^#(?=[^ ]|  )", "", text, flags=re.MULTILINE)
    file = tmp_path / "notbefore.yml"
    file.write_text(enabled, encoding="utf-8")
    secrets = {
        "slack-token": "xoxb-1-2-3\n",
        "hook-key": "https://hooks.example.org/x\n",
        "ping-url": "https://hooks.example.org/x\n",
        "pager-key": "0123456789abcdef0123456789abcdef\n",
    }
    for name, secret in secrets.items():
        (tmp_path / name).write_text(secret, encoding="utf-8")

    config = load(file, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, {})

    assert list(config.sinks) == ["oncall", "pager", "am", "hook"]
    assert len(config.routes) == 2


def test_prometheus_accepts_the_example_with_its_rules_and_targets() -> None:
    needs("promtool")
    output = check("promtool", "check", "config", "--lint=all", "--lint-fatal", PROMETHEUS)

    rules = yaml.safe_load((CONFIG / "prometheus/notbefore.rules.yml").read_text(encoding="utf-8"))
    count = sum(len(group["rules"]) for group in rules["groups"])
    assert f"SUCCESS: {count} rules found" in output


def test_prometheus_example_has_a_file_of_targets() -> None:
    # promtool accepts a pattern of names that no file has
    (file,) = (CONFIG / "prometheus/targets").glob("*.yml")
    (group,) = yaml.safe_load(file.read_text(encoding="utf-8"))

    assert group["targets"] != []


def relabeled(
    relabelings: list[dict[str, Any]], directory: Path, *discovered: dict[str, str]
) -> list[dict[str, str]]:
    """Return the labels of targets after relabeling; ``discovered``: their labels before.

    The targets are static, because Debian's Prometheus cannot discover targets in Kubernetes.
    """
    needs("promtool")
    targets = [
        {"targets": [f"10.0.0.{number}:10169"], "labels": labels}
        for number, labels in enumerate(discovered)
    ]
    job = {"job_name": "some job", "static_configs": targets, "relabel_configs": relabelings}
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [job]}), encoding="utf-8")
    command = ("promtool", "check", "service-discovery", "--timeout=1s", file, "some job")

    by_address: dict[str, dict[str, str]] = {}
    # promtool prints no target if the machine was too busy to find them within its timeout
    for target in eventually(lambda: json.loads(check(*command))):
        address = target["discoveredLabels"]["__address__"]
        by_address[address] = target["labels"] or {}
    return [by_address[address] for address in sorted(by_address)]


def test_prometheus_example_scrapes_tagged_vms_of_azure_by_name(tmp_path: Path) -> None:
    (job,) = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))["scrape_configs"]
    name = "__meta_azure_machine_name"
    tag = "__meta_azure_machine_tag_notbefore"

    targets = relabeled(
        job["relabel_configs"],
        tmp_path,
        {name: "web_0", tag: "yes"},
        {name: "web_1", tag: "no"},
        {name: "web_2"},
        {},
    )

    instances = [labels.get("instance") for labels in targets]
    assert instances == ["web_0", None, None, "10.0.0.3:10169"]


def test_amtool_accepts_the_alertmanager_example() -> None:
    needs("amtool")
    check("amtool", "check-config", ALERTMANAGER)


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        pytest.param(
            "alertname=AzureScheduledEvent event_id=E severity=critical",
            "oncall,chat",
            id="critical event",
        ),
        pytest.param(
            "alertname=AzureScheduledEvent event_id=E severity=warning", "chat", id="event"
        ),
        pytest.param(
            "alertname=AzureScheduledEvent event_id=E severity=critical exercise=true",
            "chat",
            id="drill",
        ),
        pytest.param(
            "alertname=NotbeforeNoAgents severity=critical", "oncall,chat", id="critical trouble"
        ),
        pytest.param("alertname=NotbeforeImdsDown severity=warning", "chat", id="trouble"),
    ],
)
def test_alertmanager_example_routes_alerts_to_their_receivers(labels: str, receivers: str) -> None:
    needs("amtool")
    words = (f"--config.file={ALERTMANAGER}", f"--verify.receivers={receivers}", *labels.split())
    check("amtool", "config", "routes", "test", *words)


def template_output(directory: Path, template: str, status: str, *alerts: dict[str, Any]) -> str:
    """Render a template of the example for a group of alerts."""
    needs("amtool")
    data = directory / "data.json"
    group = [{"status": status, "labels": {}, "annotations": {}} | alert for alert in alerts]
    data.write_text(json.dumps({"status": status, "alerts": group}), encoding="utf-8")
    text = f'{{{{ template "{template}" . }}}}'
    return check(
        "amtool",
        "template",
        "render",
        f"--template.glob={TEMPLATES}",
        f"--template.text={text}",
        f"--template.data={data}",
    )


def event_alert(summary: str, outcome: str = "") -> dict[str, Any]:
    annotations = {"summary": summary, "outcome": outcome}
    return {"labels": {"event_id": "E", "severity": "critical"}, "annotations": annotations}


@pytest.mark.parametrize(
    ("alert", "title", "color"),
    [
        pytest.param(
            event_alert("Reboot of web_0 is over", "finished"),
            "Reboot of web_0 is over",
            "good",
            id="finished",
        ),
        pytest.param(
            event_alert("Reboot of web_0 was canceled", "canceled"),
            "Reboot of web_0 was canceled",
            "good",
            id="canceled",
        ),
        pytest.param(
            event_alert("Reboot of web_0 may have happened", "unknown"),
            "Reboot of web_0 may have happened",
            "warning",
            id="unknown",
        ),
        pytest.param(
            event_alert("Reboot of web_0, not before 2026-03-01 09:42 UTC"),
            "Not known how it ended: Reboot of web_0, not before 2026-03-01 09:42 UTC",
            "warning",
            id="without an outcome",
        ),
        pytest.param(
            {"annotations": {"summary": "No agents"}}, "Over: No agents", "good", id="trouble"
        ),
    ],
)
def test_alertmanager_example_tells_ends_of_events_apart(
    alert: dict[str, Any], title: str, color: str, tmp_path: Path
) -> None:
    assert template_output(tmp_path, "notbefore.title", "resolved", alert) == title
    assert template_output(tmp_path, "notbefore.color", "resolved", alert) == color


@pytest.mark.parametrize(
    ("severities", "color"),
    [
        (["info"], "#3a7bd5"),
        (["info", "warning"], "warning"),
        (["critical", "warning"], "danger"),
    ],
)
def test_alertmanager_example_colors_by_severity(
    severities: list[str], color: str, tmp_path: Path
) -> None:
    alerts = [
        {"labels": {"severity": severity}, "annotations": {"summary": severity}}
        for severity in severities
    ]

    title = "; ".join(severities)
    assert template_output(tmp_path, "notbefore.title", "firing", *alerts) == title
    assert template_output(tmp_path, "notbefore.color", "firing", *alerts) == color
