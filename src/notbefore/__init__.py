"""notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    # asked for on demand: importlib.metadata is a megabyte that most imports do not need
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - see above

        return version("azure-notbefore")
    raise AttributeError(name)
