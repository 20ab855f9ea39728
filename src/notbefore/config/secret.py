"""``Secret``: a password, a token, or a URL that grants access.

It is never printed. Only ``reveal()`` returns its text.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from notbefore.config.regular_file import open_file, status_of
from notbefore.config.shown import VARIABLE_NAME
from notbefore.errors import ConfigError

MAX_SECRET: Final = 64 * 1024  # bytes
# `Path` leaves one slash of https://; C:/ is a drive
ADDRESS: Final = re.compile("[A-Za-z]{2,}:/")
HIDDEN: Final = "***"
# the directory from which systemd loads credentials for the service; only root may read it
INSTALLED: Final = "/etc/notbefore/credentials"
Source = Literal["inline", "file", "env", "credential"]
SOURCES: Final[tuple[Source, ...]] = get_args(Source)[1:]


class Secret:
    """A secret, or a reference to its file, environment variable or systemd credential."""

    __slots__ = ("_reference", "source")

    def __init__(self, reference: str, source: Source = "inline") -> None:
        self.source = source
        self._reference = str(reference)

    @classmethod
    def read(cls, value: object) -> "Secret":
        """Return the secret that a value of the configuration is or refers to.

        The value is a text, ``{file: ...}``, ``{env: ...}`` or ``{credential: ...}``. Raises
        ``ValueError`` for any other.
        """
        if isinstance(value, str) and value:
            return cls(value)
        if isinstance(value, Mapping) and len(value) == 1:
            ((source, reference),) = value.items()
            if source in get_args(Source) and isinstance(reference, str) and reference:
                _check_reference(source, reference)
                return cls(reference, source)
        raise ValueError(
            "expected a text that is not empty, or one of file, env and credential with its value"
        )

    def reveal(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the secret itself, without the line end of a file.

        Raises ``ConfigError`` if it cannot be read.
        """
        if self.source == "inline":
            return self._reference
        if self.source == "env":
            text = environment.get(self._reference, "")
            if not text:
                raise ConfigError(f"{self._named_variable()} is not set, or empty")
            return text
        return _read(self._path(environment))

    def _named_variable(self) -> str:
        """Return words for the environment variable; its name may be the secret, by mistake."""
        if VARIABLE_NAME.fullmatch(self._reference):
            return f"the environment variable {self._reference}"
        return "the environment variable that it names"

    def file(self, environment: Mapping[str, str] = os.environ) -> Path | None:
        """Return the file that holds it, or ``None``."""
        if self.source in ("file", "credential"):
            return self._path(environment)
        return None

    def _path(self, environment: Mapping[str, str]) -> Path:
        directory = ""
        if self.source == "credential":
            directory = environment.get("CREDENTIALS_DIRECTORY") or INSTALLED
        return Path(directory, self._reference)

    def sealed(self, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return the secret in the form in which the courier gets it: a path, or the text.

        The text, because the environment of the courier holds no secrets.
        """
        if self.source == "file":
            return {"file": self._reference}
        return {"inline": self.reveal(environment)}

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __str__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return False
        return self.source == other.source and self._reference == other._reference

    def __hash__(self) -> int:
        return hash((self.source, self._reference))

    @property
    def variable(self) -> str | None:
        """The environment variable that holds it, or ``None``."""
        if self.source == "env":
            return self._reference
        return None


def secrets_in(value: object, path: str = "") -> dict[str, Secret]:
    """Return every secret in a part of the configuration, by the path of its key."""
    if isinstance(value, Secret):
        return {path: value}
    entries = value
    if isinstance(value, msgspec.Struct):
        entries = msgspec.structs.asdict(value)
    if not isinstance(entries, dict):
        return {}

    secrets: dict[str, Secret] = {}
    for key, entry in entries.items():
        entry_path = key
        if path:
            entry_path = f"{path}.{key}"
        secrets |= secrets_in(entry, entry_path)
    return secrets


def _check_reference(source: Source, reference: str) -> None:
    """Raise ``ValueError`` for a reference that cannot be right.

    The error does not contain it: it may be the secret, by mistake.
    """
    if source == "credential" and Path(reference).name != reference:
        raise ValueError("expected the name of a credential, not a path")
    if source == "env" and not reference.isidentifier():
        raise ValueError("expected the name of an environment variable")
    if source == "file" and ADDRESS.search(reference):
        raise ValueError("expected the path of a file, not an address")


def _read(path: Path) -> str:
    try:
        with open_file(path) as file:
            data = file.read(MAX_SECRET + 1)
        # -sig: editors of Windows may begin a file with a mark
        text = data.decode("utf-8-sig").rstrip("\r\n")
    except FileNotFoundError:
        # the name may be the secret, by mistake
        raise ConfigError(f"the secret's file is missing in {_nearest_directory(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    if not text or len(data) > MAX_SECRET:
        raise ConfigError(f"{path}: expected a secret of 1 to {MAX_SECRET} bytes, got {len(data)}")
    return text


def _nearest_directory(path: Path) -> Path:
    """Return the nearest directory above a path that exists: the others may be the secret."""
    for directory in path.parents:
        status = status_of(directory)
        if status is not None and stat.S_ISDIR(status.st_mode):
            return directory
    return path.parents[-1]
