"""``Runtime`` and ``Published``: the settings that the parts of an agent read."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from notbefore.agent.runtime import Published, Runtime
from notbefore.config.model import Config, Log
from notbefore.core.approval import Policy

ENDPOINT = "http://169.254.169.254"


def test_replace_changes_neither_other_fields_nor_earlier_values() -> None:
    runtime = Published(Runtime(Config(), ENDPOINT, allow_approval=True))
    before = runtime.current

    runtime.replace(endpoint="http://10.0.0.4")

    assert runtime.current == Runtime(Config(), "http://10.0.0.4", allow_approval=True)
    assert before.endpoint == ENDPOINT


def test_threads_replace_different_fields_without_loss() -> None:
    runtime = Published(Runtime(Config(), ENDPOINT))
    config = Config(log=Log(level="debug"))

    for _ in range(200):
        runtime.replace(config=Config(), endpoint=ENDPOINT)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(runtime.replace, config=config)
            pool.submit(runtime.replace, endpoint="http://10.0.0.4")
        assert runtime.current == Runtime(config, "http://10.0.0.4")


@pytest.mark.parametrize(
    ("policy", "allow_approval", "reason", "dry_run"),
    [
        (Policy(), False, "`notbefore run` was started without --allow-approval", False),
        (
            Policy(enabled=True, dry_run=False),
            False,
            "`notbefore run` was started without --allow-approval",
            False,
        ),
        (Policy(), True, "approval.enabled is not true", False),
        (Policy(enabled=True), True, "approval.dry_run is true", True),
        (Policy(enabled=True, dry_run=False), True, "", False),
    ],
)
def test_runtime_says_why_approval_is_off(
    policy: Policy, allow_approval: bool, reason: str, dry_run: bool
) -> None:
    runtime = Runtime(Config(approval=policy), ENDPOINT, allow_approval)

    assert runtime.approval_off == reason
    assert runtime.approval_dry_run == dry_run
