"""What holds for all tests: hypothesis without a stopwatch, nobody asks Azure, and skips say what to install."""

import gc
import os
import runpy
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# the machines are noisy: how long one example takes says nothing. The examples are the same each time: what
# chance finds refuses nobody's work. `--hypothesis-profile=random` and benchmarks/truth.py search on
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200)
settings.register_profile("notbefore", settings.get_profile("random"), derandomize=True)
settings.load_profile("notbefore")

# what these make once for their module takes seconds: it is made in one process only
ONE_PROCESS = {
    "test_access.py",
    "test_bundle.py",
    "test_dashboards.py",
    "test_discovery.py",
    "test_fleet_page.py",
    "test_package.py",
    "test_page.py",
    "test_python_api.py",
}

# measuring what they start costs two fifths of its CPU time, and finds nothing that other tests do not run
UNMEASURED = {
    "test_access.py",
    "test_alertmanager.py",
    "test_approval_recipe.py",
    "test_bundle.py",
    "test_dashboards.py",
    "test_deployment.py",
    "test_elsewhere.py",
    "test_faults.py",
    "test_fleet_dashboard.py",
    "test_fleet_faults.py",
    "test_fleet_inventory.py",
    "test_fleet_page.py",
    "test_fleet_receivers.py",
    "test_heartbeat.py",
    "test_leader.py",
    "test_one_reboot.py",
    "test_package.py",
    "test_page.py",
    "test_runbook.py",
    "test_secrets.py",
    "test_switching.py",
    "test_upgrade.py",
}
MEASURED = {"test_events_go_on_where_the_hub_is_given_more_partitions_that_another_instance_reads"}  # but for these

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take long start first: at the end nobody waits for them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Of some tests, only this process is measured, and not those that they start."""
    with pytest.MonkeyPatch.context() as patch:
        if item.path.name in UNMEASURED and item.name not in MEASURED:
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        return (yield)


@pytest.hookimpl(optionalhook=True)  # the unit tests need no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process is given one test after the other, in their order, or a whole module where that is cheaper."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - where there is xdist
    from xdist.workermanage import NodeManager  # noqa: PLC0415 - as above

    NodeManager.EXIT_TIMEOUT = 120  # seconds: after 10, a busy machine has not written its coverage down

    class OneByOne(LoadScopeScheduling):  # type: ignore[misc]  # it ships no types
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return module if module.rpartition("/")[2] in ONE_PROCESS else nodeid

    return OneByOne(config, log)


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test leaves to the garbage collector is found at its own end, and not within another test."""
    yield
    gc.collect()


def pytest_unconfigure() -> None:
    """Remove the runtime directory, after the processes that shared it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["RUNTIME_DIRECTORY"], ignore_errors=True)
