"""notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."""

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        globals()[name] = found = _installed_version()
        return found
    raise AttributeError(name)


def _installed_version() -> str:
    """Return the version in the name of the first ``.dist-info`` directory.

    ``importlib.metadata`` says the same, and imports ``email``, ``zipfile`` and ``tempfile``: 4 MiB for one string.
    """
    prefix, suffix = "azure_notbefore-", ".dist-info"
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):  # noqa: PTH208 - pathlib is not imported for this
                if name.startswith(prefix) and name.endswith(suffix):
                    return name.removeprefix(prefix).removesuffix(suffix)
    from importlib.metadata import version  # see above

    return version("azure-notbefore")
