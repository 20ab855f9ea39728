"""``asking``: commands ask the agent that owns the state; if none runs, they open the state under its lock."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar, cast

from notbefore.agent.control_socket import ask_agent, listens
from notbefore.agent.operations import Operations, OutboxReply, Reply, Request
from notbefore.errors import StoreError
from notbefore.process.clock import Clock
from notbefore.store.file import FILE_NAME
from notbefore.store.store import Store

WRITE_PATIENCE: Final = 10.0  # seconds until a command's change has to be on disk

R = TypeVar("R", bound=Reply)


@contextmanager
def asking(directory: Path, reply: type[R]) -> Iterator[Callable[[Request], R]]:
    """Yield a function that asks the agent of a state directory, or its state. Raises ``NotBeforeError``."""
    if listens(directory):
        yield lambda request: ask_agent(directory, request, reply)
        return
    with open_store(directory) as store:
        operations = Operations(store)

        def answer(request: Request) -> R:
            reply = operations.answer(request)
            if isinstance(reply, OutboxReply) and reply.done and not store.disk.wait_written(None, WRITE_PATIENCE):
                why = store.disk.degraded or "the disk does not answer"
                raise StoreError(f"{store.path} cannot be written ({why}): nothing was changed")
            return cast("R", reply)

        yield answer


@contextmanager
def open_store(directory: Path) -> Iterator[Store]:
    """Open the state of an agent that does not run, as the agent's user. Raises ``StoreError``."""
    path = directory / FILE_NAME
    try:
        owner = path.stat()
    except OSError as error:
        hint = "run this as root or as the agent's user"
        if isinstance(error, FileNotFoundError):
            hint = "has `notbefore run` been started here?"
        raise StoreError(f"{path} cannot be opened: {hint}") from None
    if hasattr(os, "geteuid") and os.geteuid() == 0 and owner.st_uid != 0:
        os.setegid(owner.st_gid)  # new files have to belong to the agent
        os.seteuid(owner.st_uid)
    with closing(Store(directory, Clock())) as store:
        if store.disk.degraded is not None:
            raise StoreError(f"{path} cannot be opened ({store.disk.degraded})")
        yield store
