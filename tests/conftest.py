"""Rules for all tests: hypothesis has no time limit, no test reaches Azure, and a skip says what to
install.
"""

import gc
import json
import logging
import os
import runpy
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.fleet_records import FIRST_REPORTED
from support.needs import skip_summary

# The time of an example means nothing on a busy machine. The examples are the same in each run, so
# that a random find does not fail an unrelated change; `--hypothesis-profile=random` searches on.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000
)
settings.register_profile(
    "notbefore", settings.get_profile("random"), max_examples=200, derandomize=True
)
settings.load_profile("notbefore")

# the fixtures of these modules take seconds: only one process makes them
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

# Coverage is also measured in the processes that these acceptance tests start: each module runs
# commands that no other runs. The rest run the same lines, and measuring takes two fifths of the
# CPU time.
MEASURED = {
    "test_agent.py",
    "test_approval.py",
    "test_commands.py",
    "test_deliveries.py",
    "test_event_hub.py",
    "test_fleet.py",
    "test_fleet_approve.py",
    "test_fleet_azure.py",
    "test_fleet_commands.py",
    "test_fleet_history.py",
    "test_fleet_inventory.py",
    "test_plugins.py",
    "test_templates.py",
    "test_watch.py",
}
# These start an installed copy, whose coverage does not count, or a courier that is killed if its
# end takes more than a second: on a busy machine, coverage takes longer to be written.
UNMEASURED = {
    "test_bundle.py",
    "test_deployment.py",
    "test_kubernetes.py",
    "test_package.py",
    "test_supervisor.py",
}

# the acceptance tests that are quick enough for everyday work: -m "not long"
QUICK = {"test_agent.py", "test_commands.py"}

# the documents name the paths of Linux, and the generated ones its defaults
collect_ignore = ["unit/test_documents.py"] if sys.platform == "win32" else []

GUARD = Path(__file__).with_name("guard")
# the guard works in this process, and in every Python that a test starts
runpy.run_path(str(GUARD / "sitecustomize.py"))
PATHS = [str(GUARD)]
if os.environ.get("PYTHONPATH"):
    PATHS.append(os.environ["PYTHONPATH"])
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)


ID_LENGTH = 80  # characters; pytest puts the id in a variable, which Windows bounds


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a readable id for words, for plain objects and for long bytes."""
    if isinstance(val, bytes) and len(val) > 1_000:
        return f"{len(val)}-bytes"
    text = ""
    if isinstance(val, tuple | list) and all(isinstance(word, str) for word in val):
        text = " ".join(val)
    elif isinstance(val, dict):
        with suppress(TypeError):  # a value that JSON does not have
            text = json.dumps(val)
    return text[:ID_LENGTH].encode("unicode_escape").decode("ascii") or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure if NOTBEFORE_NO_SKIPS is set, as ``.ci/run`` does."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and "needs " in report.longrepr[2]:
        # one place, so that pytest prints the same reason once
        report.longrepr = ("tests/support/needs.py", 1, report.longrepr[2])
    if report.skipped and os.environ.get("NOTBEFORE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing may be skipped here: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print in one line what was skipped, and write it to the file in NOT_SEEN for the Makefile."""
    if skipped := terminalreporter.stats.get("skipped"):
        line = skip_summary(report.longrepr[2] for report in skipped)
        terminalreporter.write_line(line)
        if file := os.environ.get("NOT_SEEN"):
            Path(file).write_text(line, encoding="utf-8")


def is_alone(item: pytest.Item) -> bool:
    """Return whether no other test may run at the same time."""
    return item.get_closest_marker("alone") is not None


def is_acceptance(item: pytest.Item) -> bool:
    """Return whether the test starts the installed command, and mostly waits for it."""
    return item.path.parent.name == "acceptance"


def order_of(item: pytest.Item) -> tuple[bool, bool, bool]:
    """Order long tests first, so that no one waits for them at the end, and lone tests last."""
    return is_alone(item), not item.get_closest_marker("long"), not is_acceptance(item)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, mark the long ones, and group those that share a process."""
    items.sort(key=order_of)
    has_xdist = config.pluginmanager.hasplugin("xdist")  # the unit tests do not need it
    for item in items:
        if is_acceptance(item) and item.path.name not in QUICK:
            item.add_marker("long")
        if not has_xdist:
            continue
        if is_alone(item):
            item.add_marker(pytest.mark.xdist_group("alone"))
        elif item.path.name in ONE_PROCESS:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def is_measured(item: pytest.Item) -> bool:
    """Return whether coverage is measured in the processes that the test starts."""
    if is_acceptance(item):
        return item.path.name in MEASURED
    return item.path.name not in UNMEASURED


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time of a test begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let a lone test wait for those of the other processes, and switch coverage off for some."""
    with pytest.MonkeyPatch.context() as patch, Path(__file__).open("rb") as lock:
        if not is_measured(item):
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        if "PYTEST_XDIST_WORKER" in os.environ:
            from fcntl import LOCK_EX, LOCK_SH, flock  # noqa: PLC0415 - Windows has none

            flock(lock, LOCK_EX if is_alone(item) else LOCK_SH)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Measure no coverage in the hundreds of examples of a property.

    It would double their time, and find no other line.
    """
    coverage = sys.modules.get("coverage")  # imported if coverage is measured at all
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    measurement = None
    if coverage and is_property:
        measurement = coverage.Coverage.current()
    if measurement:
        measurement.stop()
    try:
        return (yield)
    finally:
        if measurement:
            measurement.start()


@pytest.hookimpl(optionalhook=True)  # as above
def pytest_xdist_setupnodes() -> None:
    """Give a process time to write its coverage: 10 seconds are too few on a busy machine."""
    from xdist.workermanage import NodeManager  # noqa: PLC0415 - where there is xdist

    NodeManager.EXIT_TIMEOUT = 120


@pytest.fixture(autouse=True)
def _events_are_new() -> None:
    """Let no event have the NotBefore of one with the same id in an earlier test."""
    FIRST_REPORTED.clear()


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect garbage after the test, so that its warnings do not appear within another test."""
    yield
    gc.collect()


@pytest.fixture
def log_as_before() -> Iterator[None]:
    """Restore the log after a test that calls a command as a function: commands set up the log."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    raising = logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.level = level
    logging.raiseExceptions = raising
