"""What holds for all tests: hypothesis without a stopwatch, nobody asks Azure, and skips say what to install."""

import gc
import os
import runpy
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# the machines are noisy: how long one example takes says nothing
settings.register_profile("notbefore", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200)
settings.load_profile("notbefore")

GUARD = Path(__file__).with_name("guard")
runpy.run_path(str(GUARD / "sitecustomize.py"))  # here, and in every Python that a test starts
# where a spare state file is put: not in /dev/shm, where it would outlive the tests
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["RUNTIME_DIRECTORY"] = tempfile.mkdtemp(prefix="notbefore-run-")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(GUARD), os.environ.get("PYTHONPATH"))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where nothing may be missing (``.ci/run`` sets NOTBEFORE_NO_SKIPS) a skip is a failure."""
    report = yield
    if report.skipped and os.environ.get("NOTBEFORE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing may be skipped here: {report.longrepr}"
    return report


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test leaves to the garbage collector is found at its own end, and not within another test."""
    yield
    gc.collect()


def pytest_unconfigure() -> None:
    """Remove the runtime directory, after the processes that shared it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["RUNTIME_DIRECTORY"], ignore_errors=True)
