"""A user runs ``make demo-fleet``."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(400)  # the wave takes a minute, and a busy machine is slow
@pytest.mark.long
def test_demo_fleet_notifies_of_a_wave_once_despite_a_kill() -> None:
    command = [sys.executable, "-m", "support.demo_fleet"]

    done = subprocess.run(
        command, cwd=TESTS, capture_output=True, text=True, timeout=380, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr

    shown = re.findall(r"notification \d+: (.*)", done.stdout)
    wave = [text for text in shown if text.startswith("Freeze of 40 VMs of the scale set web ")]
    silent = [text for text in shown if "silent" in text]
    assert len([text for text in wave if " announced" in text]) == 1
    assert len([text for text in wave if " finished" in text]) == 1
    assert silent == ["2 VMs of the scale set data are silent"]
    assert "600 records of events went in" in done.stdout
    assert "legacy (no agent)" in done.stdout
    assert "Reboot of legacy finished (reported by Azure)" in shown
    assert shown[-1] == "Redeploy of alone finished (a correction, reported by Azure)"
    assert re.search(r"Freeze +westeurope +5 +40 ", done.stdout)
