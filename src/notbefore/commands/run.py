"""``notbefore run``: the agent."""

import argparse
import logging
from pathlib import Path
from typing import get_args

from notbefore.agent.agent import Agent
from notbefore.commands.options import add_configuration, load_configuration
from notbefore.config.model import Log
from notbefore.config.warnings import warnings
from notbefore.errors import StoreError
from notbefore.logs import set_up
from notbefore.store.disk import DiskThread

LEVELS = get_args(Log.__annotations__["level"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and the second key to approvals."""
    add_configuration(parser)
    parser.add_argument("--log-level", choices=LEVELS, help="log.level: from which level up the agent logs")
    parser.add_argument(
        "--allow-approval", action="store_true", help="events may be approved; approval.enabled must be true as well"
    )


def run(options: argparse.Namespace) -> int:
    """Watch until SIGTERM or SIGINT; returns the exit code. Raises ``NotBeforeError`` where it cannot start."""
    config = load_configuration(options)
    _check_permission(Path(config.state.dir))
    set_up(config.log.format, config.log.level)
    for text in warnings(config, options.config):
        logging.getLogger("notbefore.config").warning(text)
    return Agent(config, lambda: load_configuration(options), allow_approval=options.allow_approval).run()


def _check_permission(state_dir: Path) -> None:
    """Raise ``StoreError`` where this user may not make the directory. What else is wrong with it may pass."""
    disk = DiskThread()
    try:
        disk.do(lambda: state_dir.mkdir(mode=0o700, parents=True, exist_ok=True))
    except PermissionError:
        raise StoreError(f"no permission for {state_dir}: use another directory, `--state-dir DIR`") from None
    except OSError:  # a disk that cannot be written, or hangs: the agent keeps its state in memory
        return
    finally:
        disk.end()
