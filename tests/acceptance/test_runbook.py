"""What the documents have somebody type at night works for the configuration that they gave him."""

import re
import shlex
import sys
from pathlib import Path
from typing import Final

import pytest

from notbefore.simulator.server import Simulator
from support.agent import run
from support.peers import HttpPeer

DOCS: Final = Path(__file__).parents[2] / "docs"
PLACE: Final = "/etc/notbefore/notbefore.yml"
# as the installed command, with the credentials in another place than this machine's own
COMMAND: Final = """
import sys
from pathlib import Path

from notbefore.commands.main import main
from notbefore.config import secret

secret.INSTALLED = Path(sys.argv.pop(1))
sys.exit(main())
"""


def typed() -> list[str]:
    """The commands that read secrets, as they stand in the documents."""
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("runbook.md", "getting-started.md"))
    found = re.findall(r"notbefore (check-config \S*\.yml)", text)
    return sorted(set(found))


def getting_started() -> str:
    config, *_ = re.findall(
        r"```yaml\n(sinks:\n  oncall:.*?)```", (DOCS / "getting-started.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return str(config)


def test_there_are_commands_that_read_secrets() -> None:
    assert typed()


@pytest.mark.parametrize("line", typed())
def test_a_command_finds_the_credentials_that_the_service_has(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    config = tmp_path / "notbefore.yml"
    config.write_text(getting_started(), encoding="utf-8")
    with HttpPeer() as slack, Simulator() as imds:
        monkeypatch.setenv("NOTBEFORE_IMDS__ENDPOINT", imds.endpoint)
        credentials = tmp_path / "credentials"
        credentials.mkdir()
        (credentials / "slack-url").write_text(f"{slack.url}\n", encoding="utf-8")
        words = [str(config) if word.endswith("notbefore.yml") else word for word in shlex.split(line)]
        done = run(sys.executable, "-c", COMMAND, credentials, *words)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if "notbefore: note: " not in line] == []
        assert not slack.requests
