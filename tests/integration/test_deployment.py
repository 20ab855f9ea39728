"""What is delivered beside the package: the image's recipe, workflows, units, examples for other
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
from support.agent import run
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
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
def test_recipe_scripts_and_workflows_are_clean(
    command: tuple[str | Path, ...],
) -> None:
    check(BIN / command[0], *command[1:])


def test_actions_are_pinned_by_digest() -> None:
    used = [
        line
        for path in WORKFLOWS
        for line in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    ]

    assert len(used) > 10
    assert [
        line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)
    ] == []


def test_workflows_use_no_image_without_a_digest() -> None:
    done = run(BIN / "zizmor", "--offline", "--format=json", "--pedantic", ROOT / ".github")

    findings = json.loads(done.stdout)
    severe = [
        finding["ident"]
        for finding in findings
        if finding["determinations"]["severity"] in ("Medium", "High")
    ]

    assert severe == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_has_a_low_exposure_level(unit: Path) -> None:
    needs("systemd-analyze")
    output = check("systemd-analyze", "security", "--offline=true", "--no-pager", unit)

    exposure = re.search(rf"Overall exposure level for {unit.name}: ([\d.]+)", output)

    assert exposure, output
    assert float(exposure[1]) <= 1.5


@pytest.mark.parametrize(
    ("unit", "document"),
    [(UNITS[0], ""), (UNITS[1], ""), (UNITS[0], "access.md"), (UNITS[0], "azure-monitor.md")],
)
def test_systemd_accepts_the_unit_with_the_drop_ins_of_the_documents(
    unit: Path, document: str, tmp_path: Path
) -> None:
    needs("systemd-analyze")
    here = tmp_path / unit.name
    here.write_text(
        unit.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/"), encoding="utf-8"
    )
    if document:
        (text,) = re.findall(
            r"```ini\n(.*?)```", (ROOT / "docs" / document).read_text(encoding="utf-8"), re.DOTALL
        )
        (tmp_path / f"{unit.name}.d").mkdir()
        (tmp_path / f"{unit.name}.d" / "override.conf").write_text(
            textwrap.dedent(text), encoding="utf-8"
        )

    done = run("systemd-analyze", "verify", "--man=no", here)

    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr == ""


def test_units_share_a_sandbox_and_give_enough_time_to_stop() -> None:
    texts = [path.read_text(encoding="utf-8") for path in UNITS]
    (_, sandbox, one), (_, _, other) = (text.partition("CapabilityBoundingSet=") for text in texts)

    assert sandbox
    assert one == other

    agent, fleet = (dict(re.findall(r"(?m)^(\w+)=(.*)", text)) for text in texts)

    assert agent["KillMode"] == fleet["KillMode"] == "mixed", "each ends its courier itself"
    assert int(agent["TimeoutStopSec"]) > STOP_SECONDS + 5
    assert int(fleet["TimeoutStopSec"]) > HAND_OVER_PATIENCE + STOP_SECONDS + 5
    assert default_state_dir() == Path("/var/lib") / agent["StateDirectory"]

    options = parsed(fleet["ExecStart"].split()[1:])
    assert options.listen != load(None, {}, {}).server.listen, (
        "an agent on the same machine has that port"
    )


def test_unit_does_not_restart_an_agent_that_cannot_start(tmp_path: Path) -> None:
    wrong = tmp_path / "notbefore.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    words = (BIN / "notbefore", "run", "--imds", "http://127.0.0.1:9", "--state-dir", tmp_path)
    configuration = run(*words, wrong).returncode
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = run(*words, "--listen", f"127.0.0.1:{taken.getsockname()[1]}").returncode

    unit = UNITS[0].read_text(encoding="utf-8")

    assert "\nRestart=always\n" in unit
    assert f"\nRestartPreventExitStatus={configuration} {address}\n" in unit


def test_windows_service_runs_the_agent() -> None:
    service = ET.parse(CONFIG / "windows" / "notbefore-service.xml").getroot()  # noqa: S314 - our own file

    assert (service.findtext("arguments") or "").startswith("run ")


def test_example_configuration_is_valid_with_and_without_its_comments(tmp_path: Path) -> None:
    text = (CONFIG / "notbefore.yml").read_text(encoding="utf-8")
    whole = tmp_path / "notbefore.yml"
    # `# ` is prose; what is commented out begins at once, or with the two spaces of its indentation
    whole.write_text(re.sub(r"^#(?=[^ ]|  )", "", text, flags=re.MULTILINE), encoding="utf-8")
    (tmp_path / "slack-token").write_text("xoxb-1-2-3\n", encoding="utf-8")
    for name in ("hook-key", "ping-url"):
        (tmp_path / name).write_text("https://hooks.example.org/x\n", encoding="utf-8")
    (tmp_path / "pager-key").write_text("0123456789abcdef0123456789abcdef\n", encoding="utf-8")

    assert load(CONFIG / "notbefore.yml", {}, {}) == load(None, {}, {})

    config = load(whole, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, {})
    assert list(config.sinks) == ["oncall", "pager", "am", "hook"]
    assert len(config.routes) == 2


def test_prometheus_accepts_the_example_with_its_rules_and_targets() -> None:
    needs("promtool")
    output = check("promtool", "check", "config", "--lint=all", "--lint-fatal", PROMETHEUS)
    rules = yaml.safe_load((CONFIG / "prometheus/notbefore.rules.yml").read_text(encoding="utf-8"))

    assert f"SUCCESS: {sum(len(group['rules']) for group in rules['groups'])} rules found" in output

    # a file that is not found is no error to promtool
    (targets,) = (CONFIG / "prometheus/targets").glob("*.yml")
    assert yaml.safe_load(targets.read_text(encoding="utf-8"))[0]["targets"]


def relabeled(
    relabelings: list[dict[str, Any]], directory: Path, *found: dict[str, str]
) -> list[dict[str, str]]:
    """The labels of targets that were discovered with ``found``.

    Debian's Prometheus has no Kubernetes to ask.
    """
    needs("promtool")
    job = {
        "job_name": "some job",
        "static_configs": [
            {"targets": [f"10.0.0.{n}:10169"], "labels": labels} for n, labels in enumerate(found)
        ],
        "relabel_configs": relabelings,
    }
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [job]}), encoding="utf-8")
    targets = json.loads(
        check("promtool", "check", "service-discovery", "--timeout=1s", file, "some job")
    )
    targets.sort(key=lambda one: one["discoveredLabels"]["__address__"])
    return [target["labels"] or {} for target in targets]


def test_prometheus_example_scrapes_tagged_vms_of_azure_by_name(tmp_path: Path) -> None:
    (job,) = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))["scrape_configs"]
    name = "__meta_azure_machine_name"
    tag = "__meta_azure_machine_tag_notbefore"
    found: list[dict[str, str]] = [
        {name: "web_0", tag: "yes"},
        {name: "web_1", tag: "no"},
        {name: "web_2"},
        {},
    ]

    labels = relabeled(job["relabel_configs"], tmp_path, *found)

    assert [one.get("instance") for one in labels] == ["web_0", None, None, "10.0.0.3:10169"]


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ("alertname=AzureScheduledEvent event_id=E severity=critical", "oncall,chat"),
        ("alertname=AzureScheduledEvent event_id=E severity=warning", "chat"),
        ("alertname=AzureScheduledEvent event_id=E severity=critical exercise=true", "chat"),
        ("alertname=NotbeforeNoAgents severity=critical", "oncall,chat"),
        ("alertname=NotbeforeImdsDown severity=warning", "chat"),
    ],
)
def test_alertmanager_example_routes_alerts_to_their_receivers(labels: str, receivers: str) -> None:
    needs("amtool")
    check("amtool", "check-config", ALERTMANAGER)
    words = (f"--config.file={ALERTMANAGER}", f"--verify.receivers={receivers}", *labels.split())
    check("amtool", "config", "routes", "test", *words)


def notified(tmp_path: Path, template: str, status: str, *alerts: dict[str, Any]) -> str:
    """What the template of the example makes of a group of alerts."""
    needs("amtool")
    data = tmp_path / "data.json"
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


def ended(summary: str, outcome: str = "") -> dict[str, Any]:
    annotations = {"summary": summary, "outcome": outcome}
    return {"labels": {"event_id": "E", "severity": "critical"}, "annotations": annotations}


@pytest.mark.parametrize(
    ("alert", "title", "color"),
    [
        (ended("Reboot of web_0 is over", "finished"), "Reboot of web_0 is over", "good"),
        (ended("Reboot of web_0 was canceled", "canceled"), "Reboot of web_0 was canceled", "good"),
        (
            ended("Reboot of web_0 may have happened", "unknown"),
            "Reboot of web_0 may have happened",
            "warning",
        ),
        (
            ended("Reboot of web_0, not before 2026-03-01 09:42 UTC"),
            "Not known how it ended: Reboot of web_0, not before 2026-03-01 09:42 UTC",
            "warning",
        ),
        ({"annotations": {"summary": "No agents"}}, "Over: No agents", "good"),
    ],
)
def test_alertmanager_example_tells_ends_of_events_apart(
    alert: dict[str, Any], title: str, color: str, tmp_path: Path
) -> None:
    assert notified(tmp_path, "notbefore.title", "resolved", alert) == title
    assert notified(tmp_path, "notbefore.color", "resolved", alert) == color


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

    assert notified(tmp_path, "notbefore.color", "firing", *alerts) == color
    assert notified(tmp_path, "notbefore.title", "firing", *alerts) == "; ".join(severities)
