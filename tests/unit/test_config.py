"""The configuration: every key has a default, and all mistakes are reported with their places."""

import re
import sys
import zoneinfo
from pathlib import Path
from typing import Any

import pytest

from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.config.model import Config, Server, default_state_dir, host_and_port
from notbefore.config.secret import Secret, secrets_in
from notbefore.config.sinks import Kubernetes
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError
from support.json_output import parsed_output

MISTAKEN = """\
imds:
  intervall: 1s
sinkz: {}
sinks:
  slack: {url_file: hook}
  oncall: {slack: {url: 'ftp://x', timeout: 5}}
  mail:
    email: {host: mail.example.org, to: [ops@example.org, nobody], from: vm@example.org}
routes:
  - {sinks: [oncall, oncal]}
approval:
  rules: [{match: all}, {match: {event_type: Freez}}]
"""
MISTAKES = [  # line, column, key
    (2, 3, "imds.intervall"),
    (3, 1, "sinkz"),
    (5, 11, "sinks.slack.url_file"),
    (6, 20, "sinks.oncall.slack.url"),
    (6, 36, "sinks.oncall.slack.timeout"),
    (8, 59, "sinks.mail.email.to[1]"),
    (10, 6, "routes[0].sinks"),
    (12, 34, "approval.rules[1].match.event_type"),
]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "notbefore.yml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def read(tmp_path: Path, text: str, **environment: str) -> Config:
    return load(write(tmp_path, text), environment, {})


# ---- where values come from


@pytest.mark.parametrize("text", ["", "\ufeff# nothing, after the mark of some editors\n", "{}"])
def test_empty_file_is_a_working_configuration(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)

    assert config == Config()
    assert config.imds.endpoint == "http://169.254.169.254"
    assert config.server.listen == "127.0.0.1:10169"
    assert config.imds.interval.seconds == 1.0


def test_configuration_has_defaults_without_a_file() -> None:
    assert load(None, {}, {}) == Config()


def test_command_line_wins_over_environment_and_file(tmp_path: Path) -> None:
    path = write(tmp_path, "vm: {name: file}\n")
    environment = {"NOTBEFORE_VM__NAME": "environment", "OTHER__X": "y"}

    config = load(path, environment, {"vm.name": "command-line", "state.dir": None})

    assert config.vm.name == "command-line"


def test_environment_wins_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "imds: {interval: 2s, endpoint: 'http://file'}\n")
    environment = {"NOTBEFORE_IMDS__ENDPOINT": "http://environment"}

    config = load(path, environment, {})

    assert config.imds.endpoint == "http://environment"
    assert config.imds.interval == Duration("2s")


def test_variable_replaces_a_key_of_a_sink_in_the_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "sinks: {OnCall: {slack: {url_file: another}}}",
        NOTBEFORE_SINKS__ONCALL__SLACK__URL_ENV="URL",
        URL="https://hooks.slack.com/services/x",
    )

    assert secrets_in(config.sinks["OnCall"].settings) == {"url": Secret("URL", "env")}


def test_variables_define_a_sink(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()

    config = read(
        tmp_path,
        "{}",
        NOTBEFORE_SINKS__B__WEBHOOK__URL="https://example.org",
        NOTBEFORE_SINKS__B__WEBHOOK__HEADERS__KEY__ENV="URL",
        NOTBEFORE_SINKS__B__WEBHOOK__CA_FILE="ca.pem",
        URL="https://hooks.slack.com/services/x",
    )

    assert config.sinks["b"].webhook is not None
    assert config.sinks["b"].webhook.ca_file == str(tmp_path / "ca.pem")


def test_variables_are_read_as_the_type_of_their_key(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "{}",
        NOTBEFORE_IMDS__DISCOVER="false",
        NOTBEFORE_SERVER__ALLOWED_HOSTS="a, *.b",
    )

    assert config.imds.discover is False
    assert config.server.allowed_hosts == ("a", "*.b")


def test_unquoted_value_is_typed_by_its_key(tmp_path: Path) -> None:
    text = """\
vm: {name: 0123}
imds: {api_version: 2020-07-01, discover: false}
sinks: {m: {email: {host: h, from: a@example.org, to: b@example.org, port: 2525}}}
routes: [{match: {zone: 1, tags: {env: [no, 1:30]}, duration: {min: 9}}, sinks: m}]
"""

    config = read(tmp_path, text)

    assert config.vm.name == "0123"
    assert config.imds.api_version == "2020-07-01"
    assert config.imds.discover is False
    email = config.sinks["m"].email
    assert email is not None
    assert email.port == 2525
    assert email.to == ("b@example.org",)
    (route,) = config.routes
    assert route.sinks == ("m",)
    assert route.match.zone == ("1",)
    assert route.match.tags == {"env": ("no", "1:30")}
    assert route.match.duration is not None
    assert route.match.duration.min == 9


def test_state_directory_is_the_first_that_systemd_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/run/a:/run/b")

    assert default_state_dir() == Path("/run/a")


def test_state_directory_has_a_default_without_systemd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)

    if sys.platform == "win32":
        assert default_state_dir() == Path(r"C:\ProgramData\notbefore")
    else:
        assert default_state_dir() == Path("/var/lib/notbefore")


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        (":80", "", 80),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::]:65535", "::", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("vm-1.example.org:10169", "vm-1.example.org", 10169),
    ],
)
def test_listen_address_has_host_and_port(listen: str, host: str, port: int) -> None:
    assert host_and_port(listen) == (host, port)
    assert Server(listen=listen).listen == listen


# ---- secrets and other files


def test_missing_secret_is_a_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: {a: {slack: {url_file: nowhere}}}\n")

    with pytest.raises(ConfigError, match=r"sinks.a.slack.url_file: the secret's file is missing"):
        load(path, {}, {})


def test_missing_secret_is_accepted_when_nothing_is_sent(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: {a: {slack: {url_file: nowhere}}}\n")

    config = load(path, {}, {}, sending=False)

    assert "a" in config.sinks


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1/x", "https://10.0.0.4", "http://localhost", "http://localhost./"]
)
def test_private_webhook_is_refused_when_the_configuration_is_loaded(
    tmp_path: Path, address: str
) -> None:
    path = write(tmp_path, f"sinks: {{a: {{webhook: {{url: '{address}'}}}}}}\n")

    with pytest.raises(ConfigError, match=r"sinks.a.webhook.url: .* is not a public address"):
        load(path, {}, {})


def test_kubernetes_sink_outside_a_pod_is_refused_when_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: {a: {kubernetes: {token_env: TOKEN}}}\n")

    with pytest.raises(ConfigError) as refusal:
        load(path, {"TOKEN": "x"}, {})

    keys = {mistake.key for mistake in refusal.value.mistakes}
    assert keys == {"sinks.a.kubernetes.url", "sinks.a.kubernetes.node_name"}


def test_kubernetes_sink_in_a_pod_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: {a: {kubernetes: {token_env: TOKEN}}}\n")
    variables = {
        "TOKEN": "x",
        "KUBERNETES_SERVICE_HOST": "fd00::1",
        "KUBERNETES_SERVICE_PORT": "443",
        "NODE_NAME": "node-1",
    }

    config = load(path, variables, {})

    settings = config.sinks["a"].settings
    assert isinstance(settings, Kubernetes)
    assert settings.api_server(variables) == "https://[fd00::1]:443"


def test_private_webhook_is_loaded_when_it_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: {a: {webhook: {url: 'http://10.0.0.4', allow_private: true}}}\n")

    config = load(path, {}, {})

    assert "a" in config.sinks


def test_name_of_a_webhook_is_not_resolved_when_it_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: {a: {webhook: {url: 'http://host.invalid/x'}}}\n")

    config = load(path, {}, {})

    assert "a" in config.sinks


@pytest.mark.usefixtures("log_as_before")
@pytest.mark.parametrize(
    ("text", "expected_exit_code"),
    [
        pytest.param("state: {dir: PATH}\n", 0, id="state directory"),
        pytest.param("sinks: {a: {slack: {url_file: PATH}}}\n", 2, id="secret"),
    ],
)
def test_path_that_the_system_refuses_causes_no_traceback(
    tmp_path: Path,
    text: str,
    expected_exit_code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, text.replace("PATH", f"/{'x' * 300}/below"))

    exit_code = main(["check-config", str(path)])

    assert exit_code == expected_exit_code
    assert "Traceback" not in capsys.readouterr().err


def test_file_paths_are_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()

    config = read(
        tmp_path,
        """\
otlp: {endpoint: 'https://collector:4318', ca_file: ca.pem}
server: {web_config_file: web.yml}
""",
    )

    assert config.otlp is not None
    assert config.otlp.ca_file == str(tmp_path / "ca.pem")
    assert config.server.web_config_file == str(tmp_path / "web.yml")


def test_file_paths_of_a_fleet_are_relative_to_the_configuration(tmp_path: Path) -> None:
    key = "Endpoint=sb://a/;SharedAccessKeyName=root;SharedAccessKey=b;EntityPath=c"
    (tmp_path / "key").write_text(key, encoding="utf-8")
    (tmp_path / "blob").write_text("AccountName=a;AccountKey=b", encoding="utf-8")

    config = read(
        tmp_path,
        """\
fleet:
  hub: {connection_string_file: key}
  checkpoints: {connection_string: {file: blob}, container: c}
  inventory_file: vms.txt
""",
    )

    assert config.fleet is not None
    assert config.fleet.inventory_file == str(tmp_path / "vms.txt")
    assert config.fleet.hub.connection_string == Secret(str(tmp_path / "key"), "file")
    assert config.fleet.checkpoints is not None
    assert config.fleet.checkpoints.connection_string == Secret(str(tmp_path / "blob"), "file")


# ---- mistakes


@pytest.mark.usefixtures("log_as_before")
def test_check_config_prints_all_mistakes_as_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MISTAKEN)

    exit_code = main(["check-config", str(path)])

    assert exit_code == 2
    lines = capsys.readouterr().err.splitlines()
    places_and_keys = [line.split(": ")[1:3] for line in lines]
    assert places_and_keys == [[f"{path}:{line}:{column}", key] for line, column, key in MISTAKES]


@pytest.mark.usefixtures("log_as_before")
def test_check_config_without_a_sink_has_no_text_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "messages: {title: 'Mind: {{ title }}'}\n")

    exit_code = main(["check-config", "--render", "--", str(path)])

    assert exit_code == 2
    assert "this configuration has no sink" in capsys.readouterr().err


HUB = "hub: {connection_string: 'Endpoint=sb://a/;SharedAccessKey=b;EntityPath=c'}"


@pytest.mark.usefixtures("log_as_before")
@pytest.mark.parametrize(
    ("text", "mistaken_key"), [(f"fleet: {{{HUB}, windw: 1h}}\n", "fleet.windw"), ("", "fleet")]
)
def test_check_config_for_a_fleet_names_a_wrong_or_missing_key(
    tmp_path: Path, text: str, mistaken_key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)

    exit_code = main(["check-config", "--for", "fleet", str(path)])

    assert exit_code == 2
    lines = capsys.readouterr().err.splitlines()
    keys = [line.split(": ")[2] for line in lines]
    assert keys == [mistaken_key]


def json_of_check_config(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Return the exit code of ``check-config --json`` and what it printed."""
    exit_code = main(["check-config", "--json", str(path)])
    (report,) = parsed_output("check-config", capsys.readouterr().out)
    return exit_code, report


@pytest.mark.usefixtures("log_as_before")
def test_check_config_prints_all_mistakes_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MISTAKEN)

    exit_code, result = json_of_check_config(path, capsys)

    assert exit_code == 2
    assert result["ok"] is False
    assert str(path) in result["error"]
    mistakes = [
        (mistake["line"], mistake["column"], mistake["key"]) for mistake in result["mistakes"]
    ]
    assert mistakes == MISTAKES


@pytest.mark.usefixtures("log_as_before")
def test_check_config_prints_ok_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "log: {level: debug}")

    exit_code, result = json_of_check_config(path, capsys)

    assert exit_code == 0
    assert result["ok"] is True


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(
            b"log:\n  level: \xff\n",
            ":2:10: this is not YAML: invalid leading UTF-8 octet",
            id="not UTF-8",
        ),
        pytest.param(
            b"\nimds: " + b"[" * 30_000,
            ":2:38: lists and mappings are nested more than 32 deep",
            id="nested lists",
        ),
        pytest.param(
            b"imds: " + b"{a: " * 5_000,
            ":1:131: lists and mappings are nested more than 32 deep",
            id="nested mappings",
        ),
        pytest.param(
            b"- a\n" * 60_000,
            ": more than 20000 values: is this the right file?",
            id="many values",
        ),
        pytest.param(
            b"#" * 300_000,
            ": more than 262144 bytes: is this the right file?",
            id="many bytes",
        ),
        pytest.param(
            b"sinks: {m: {email: {port: " + b"1" * 10_000 + b"}}}",
            " sinks.m.email.port: expected a whole number, got text",
            id="long number",
        ),
        pytest.param(
            b"messages: {advice: {Reboot: " + b"x" * 2_001 + b"}}",
            " expected a text of 2000 characters or less",
            id="long text",
        ),
        pytest.param(
            b"server: {listen: '" + b"a" * 300 + b":1'}",
            " server.listen: expected HOST:PORT such as 127.0.0.1:10169 or",
            id="long address",
        ),
    ],
)
def test_file_beyond_a_bound_is_refused_with_the_place(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        load(path, {}, {})

    assert str(caught.value).startswith(str(path))


def test_missing_database_of_time_zones_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "messages: {time_zone: Europe/Berlin}\n")
    for name in list(sys.modules):  # another test may have read a zone of PyPI's package
        if name.startswith("tzdata."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tzdata", None)
    zoneinfo.reset_tzpath(to=[])
    zoneinfo.ZoneInfo.clear_cache()

    try:
        with pytest.raises(ConfigError, match="this machine has no time zones: install"):
            load(path, {}, {})
    finally:
        zoneinfo.reset_tzpath()
