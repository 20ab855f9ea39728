"""``ask_owner``: commands ask the agent that owns the state.

If none runs, they open the state under its lock.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import TypeVar, cast

from notbefore.agent.control_socket import ask_agent, listens
from notbefore.agent.operations import OutboxReply, Reply, Request, answer
from notbefore.errors import StoreError
from notbefore.process.clock import Clock
from notbefore.store.file import FILE_NAME
from notbefore.store.store import WRITE_PATIENCE, Store

R = TypeVar("R", bound=Reply)


def ask_owner(directory: Path, request: Request, reply: type[R]) -> R:
    """Return the reply of the agent of a state directory, or of its state.

    Raises ``NotBeforeError``.
    """
    if listens(directory):
        return ask_agent(directory, request, reply)
    path = directory / FILE_NAME
    if not path.exists():
        raise StoreError(f"{path} cannot be opened: has `notbefore run` been started here?")
    owner = path.stat()
    if hasattr(os, "geteuid") and os.geteuid() == 0 and owner.st_uid != 0:
        os.setegid(owner.st_gid)  # new files have to belong to the agent
        os.seteuid(owner.st_uid)
    with closing(Store(directory, Clock())) as store:
        if store.disk.degraded is not None:
            raise StoreError(f"{store.path} cannot be opened ({store.disk.degraded})")
        found = answer(store, request)
        if (
            isinstance(found, OutboxReply)
            and found.done
            and not store.disk.wait_written(WRITE_PATIENCE)
        ):
            why = store.disk.degraded or "the disk does not answer"
            raise StoreError(f"{store.path} cannot be written ({why}): nothing was changed")
        return cast("R", found)
