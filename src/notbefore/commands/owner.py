"""``ask_owner``: commands ask the agent that owns a state directory.

If no agent runs, they open the state themselves, under its lock.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import TypeVar, cast

from notbefore.agent.desk import answer
from notbefore.errors import StoreError
from notbefore.process.clock import Clock
from notbefore.process.control_socket import ask_agent, listens
from notbefore.process.operations import OutboxReply, Reply, Request
from notbefore.store.file import FILE_NAME
from notbefore.store.store import WRITE_PATIENCE, Store

R = TypeVar("R", bound=Reply)


def ask_owner(directory: Path, request: Request, reply: type[R]) -> R:
    """Return the reply to a request about a state directory. Raises ``NotBeforeError``."""
    if listens(directory):
        return ask_agent(directory, request, reply)
    path = directory / FILE_NAME
    if not path.exists():
        raise StoreError(
            f"{path} cannot be opened: has `notbefore run` been started here? --state-dir names"
            " another directory"
        )
    _become_owner(path)
    with closing(Store(directory, Clock(), must_read=True)) as store:
        reply_of_store = answer(store, request)
        has_changed = isinstance(reply_of_store, OutboxReply) and reply_of_store.done > 0
        if has_changed and not store.disk.wait_written(WRITE_PATIENCE):
            why = store.disk.degraded or "the disk does not answer"
            raise StoreError(
                f"{store.path} cannot be written ({why}): nothing was changed; try again"
            )
        return cast("R", reply_of_store)


def _become_owner(path: Path) -> None:
    """Let root become the user of the file, so that new files also belong to the agent."""
    status = path.stat()
    if hasattr(os, "geteuid") and os.geteuid() == 0 and status.st_uid != 0:
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)
