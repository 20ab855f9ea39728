"""``notbefore demo --fleet``, as a user runs it."""

import re
import sys

import pytest

from support.agent import notbefore, run

WITHOUT = """
import sys
sys.modules["proton"] = None  # as where it is not installed
from notbefore.commands import main
sys.exit(main.main(["demo", "--fleet"]))
"""


@pytest.mark.timeout(400)  # its wave takes a minute; what it waits for, on a busy machine, longer
@pytest.mark.long
def test_six_hundred_records_are_a_handful_of_notifications_though_the_instance_is_killed() -> None:
    done = notbefore("demo", "--fleet", timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"notification \d+: (.*)", done.stdout)
    wave = [text for text in shown if text.startswith("Freeze of 40 VMs of the scale set web ")]
    assert [sum(f" {step}" in text for text in wave) for step in ("announced", "finished")] == [1, 1]
    assert [text for text in shown if "silent" in text] == ["2 VMs of the scale set data: silent"]
    assert "600 records of events went in" in done.stdout
    assert re.search(r"Freeze +westeurope +5 +40 ", done.stdout)


def test_where_a_library_is_missing_it_says_what_to_install() -> None:
    done = run(sys.executable, "-c", WITHOUT)
    assert done.returncode == 2
    assert "pip install 'azure-notbefore[demo]'" in done.stderr
