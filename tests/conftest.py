"""What holds for all tests: hypothesis without a stopwatch, nobody asks Azure, and skips say what
to install.
"""

import gc
import logging
import os
import runpy
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.needs import not_seen

# the machines are noisy: how long one example takes says nothing. The examples are the same each
# time: what chance finds refuses nobody's work. `--hypothesis-profile=random` searches on
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000
)
settings.register_profile(
    "notbefore", settings.get_profile("random"), max_examples=200, derandomize=True
)
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

# of these acceptance tests, what they start is measured too: the others run the same lines, and
# measuring takes two fifths of the CPU time
MEASURED = {
    "test_agent.py",
    "test_commands.py",
    "test_event_hub.py",
    "test_fleet.py",
    "test_fleet_history.py",
    "test_fleet_inventory.py",
}
# these start what was installed, which is not measured; or a courier that is killed if its end
# takes more than a second, and on a busy machine a measurement takes longer to be written down
UNMEASURED = {
    "test_bundle.py",
    "test_deployment.py",
    "test_kubernetes.py",
    "test_package.py",
    "test_supervisor.py",
}

# the acceptance tests for which an everyday loop has time: -m "not long"
QUICK = {"test_agent.py", "test_commands.py"}

# the documents name the paths of Linux, and the generated ones its defaults
collect_ignore = ["unit/test_documents.py"] if sys.platform == "win32" else []

GUARD = Path(__file__).with_name("guard")
runpy.run_path(str(GUARD / "sitecustomize.py"))  # here, and in every Python that a test starts
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(GUARD), os.environ.get("PYTHONPATH"))))


def pytest_make_parametrize_id(val: object) -> str | None:
    """A name for long bytes: pytest puts it in a variable, and one of Windows holds 32,767
    characters.
    """
    return f"{len(val)}-bytes" if isinstance(val, bytes) and len(val) > 1_000 else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where nothing may be missing (``.ci/run`` sets NOTBEFORE_NO_SKIPS) a skip is a failure."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and "needs " in report.longrepr[2]:
        # said once, and not for each place
        report.longrepr = (
            "tests/support/needs.py",
            1,
            report.longrepr[2],
        )
    if report.skipped and os.environ.get("NOTBEFORE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing may be skipped here: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was not seen for want of something, in one line.

    Also in the file that NOT_SEEN names, for the Makefile.
    """
    if skipped := terminalreporter.stats.get("skipped"):
        line = not_seen(report.longrepr[2] for report in skipped)
        terminalreporter.write_line(line)
        if file := os.environ.get("NOT_SEEN"):
            Path(file).write_text(line, encoding="utf-8")


def is_alone(item: pytest.Item) -> bool:
    """Whether nothing else may run beside this test."""
    return item.get_closest_marker("alone") is not None


def is_acceptance(item: pytest.Item) -> bool:
    """Whether it starts the installed command, and mostly waits for it."""
    return item.path.parent.name == "acceptance"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that take long start first: at the end nobody waits for them.

    Those that run alone are the last.
    """
    items.sort(
        key=lambda item: (
            is_alone(item),
            not item.get_closest_marker("long"),
            not is_acceptance(item),
        )
    )
    for item in items:
        if is_acceptance(item) and item.path.name not in QUICK:
            item.add_marker("long")
    if config.pluginmanager.hasplugin("xdist"):  # the unit tests need none
        for item in items:
            group = (
                "alone"
                if is_alone(item)
                else item.path.stem
                if item.path.name in ONE_PROCESS
                else None
            )
            if group:
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time of a test begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """What runs alone waits for the other processes' tests.

    Of some tests, what they start is not measured.
    """
    with pytest.MonkeyPatch.context() as patch, Path(__file__).open("rb") as lock:
        name = item.path.name
        if name not in MEASURED if is_acceptance(item) else name in UNMEASURED:
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        if "PYTEST_XDIST_WORKER" in os.environ:
            from fcntl import LOCK_EX, LOCK_SH, flock  # noqa: PLC0415 - Windows has none

            flock(lock, LOCK_EX if is_alone(item) else LOCK_SH)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """The hundreds of examples of a property are not measured: that would double their time, and
    find no other line.
    """
    coverage = sys.modules.get("coverage")  # it is there where something is measured
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    measurement = coverage.Coverage.current() if coverage and is_property else None
    if measurement:
        measurement.stop()
    try:
        return (yield)
    finally:
        if measurement:
            measurement.start()


@pytest.hookimpl(optionalhook=True)  # as above
def pytest_xdist_setupnodes() -> None:
    """Give a process time to write its coverage down: on a busy machine 10 seconds are
    not enough.
    """
    from xdist.workermanage import NodeManager  # noqa: PLC0415 - where there is xdist

    NodeManager.EXIT_TIMEOUT = 120


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test leaves to the garbage collector is found at its own end, and not within another
    test.
    """
    yield
    gc.collect()


@pytest.fixture
def log_as_before() -> Iterator[None]:
    """For commands that are called as functions: they set up the log of their process, which is
    that of the tests.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    raising = logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.level = level
    logging.raiseExceptions = raising
