"""What the documents have somebody type at night works for the configuration that they gave him."""

import re
import shlex
import sys
from pathlib import Path
from typing import Final

import pytest

from support.agent import run
from support.peers import HttpPeer

DOCS: Final = Path(__file__).parents[2] / "docs"
# as the installed command, with the credentials in another place than this machine's own
COMMAND: Final = """
import sys
from pathlib import Path

from notbefore.commands.main import main
from notbefore.config import secret

secret.INSTALLED = Path(sys.argv.pop(1))
sys.exit(main())
"""


def documents(*names: str) -> str:
    return "".join((DOCS / name).read_text(encoding="utf-8") for name in names)


def test_the_commands_that_read_secrets_find_the_credentials_that_the_service_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.findall(r"notbefore (check-config \S*\.yml)", documents("runbook.md", "getting-started.md"))
    assert found
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setenv("NOTBEFORE_IMDS__ENDPOINT", "http://127.0.0.1:9")
    config, credentials = tmp_path / "notbefore.yml", tmp_path / "credentials"
    written, *_ = re.findall(r"```yaml\n(sinks:\n  oncall:.*?)```", documents("getting-started.md"), re.DOTALL)
    config.write_text(written, encoding="utf-8")
    credentials.mkdir()
    with HttpPeer() as slack:
        (credentials / "slack-url").write_text(f"{slack.url}\n", encoding="utf-8")
        for line in sorted(set(found)):
            words = [str(config) if word.endswith("notbefore.yml") else word for word in shlex.split(line)]
            done = run(sys.executable, "-c", COMMAND, credentials, *words)
            assert done.returncode == 0, done.stderr
            assert done.stderr == ""
        assert not slack.requests
