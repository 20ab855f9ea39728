"""YAML, environment and command line -> ``Config``: frozen, complete, every mistake named with file, line and path.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Struct, field

from notbefore.errors import ConfigError
from notbefore.events.duration import Duration

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"
MAX_FILE: Final = 1024 * 1024  # bytes
ApiVersion = Literal["2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"]


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Imds(_Section, frozen=True):
    """Where the events are asked for, and how often."""

    endpoint: str = "http://169.254.169.254"
    api_version: ApiVersion = "2020-07-01"
    interval: Duration = Duration("1s")  # 0.2 s to 1 h

    def __post_init__(self) -> None:
        if not 0.2 <= self.interval.seconds <= 3600:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("imds.interval: expected 200ms to 1h")


class VmName(_Section, frozen=True):
    """Who this VM is, where IMDS cannot say it."""

    name: str | None = None


class Server(_Section, frozen=True):
    """Where /metrics is served; ``host:port``."""

    listen: str = "127.0.0.1:10169"


def default_state_dir() -> Path:
    """Systemd's ``STATE_DIRECTORY``, else the place of the platform for a service's state."""
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData")) / "notbefore"
    return Path("/var/lib/notbefore")


class State(_Section, frozen=True):
    """Where the state is kept."""

    dir: str = field(default_factory=lambda: str(default_state_dir()))


class Log(_Section, frozen=True):
    """The agent's own log, on stderr. ``auto``: for people on a terminal, JSON elsewhere."""

    format: Literal["auto", "json", "text"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(_Section, frozen=True):
    """All of it."""

    imds: Imds = Imds()
    vm: VmName = VmName()
    server: Server = Server()
    state: State = field(default_factory=State)
    log: Log = Log()


def load(path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, str | None]) -> Config:
    """Read the configuration; raises ``ConfigError``.

    ``overrides`` are the command line's, by dotted path (``imds.endpoint``); ``None`` is "not given".
    """
    values, places = _read(path) if path is not None else ({}, {})
    # the file is read strictly on its own first: only there is 1 no text
    _convert(values, places, strict=True)
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _put(values, keys, text, name)
            places[".".join(keys)] = name
    for dotted, value in overrides.items():
        if value is not None:
            _put(values, dotted.split("."), value, "the command line")
            places[dotted] = "the command line"
    return _convert(values, places, strict=False)


def dump(config: Config) -> str:
    """The configuration in use as YAML, for ``check-config``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    return yaml.safe_dump(msgspec.to_builtins(config, enc_hook=_encode), sort_keys=False)


def _encode(value: object) -> object:
    return str(value)


def _put(values: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    for key in keys[:-1]:
        section = values.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{origin}: {key} is not a section")
        values = section
    values[keys[-1]] = text


def _convert(values: dict[str, Any], places: dict[str, str], *, strict: bool) -> Config:
    """``places`` says where each dotted path was given; "" is for the configuration as a whole."""
    try:
        return msgspec.convert(values, Config, strict=strict, dec_hook=_decode)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        path = where.rstrip("`").removeprefix("$").lstrip(".")
        unknown = re.search(r"unknown field `(\w+)`", message)
        key = ".".join(filter(None, (path, unknown[1] if unknown else "")))
        if message.startswith("Invalid enum value"):
            message += f", expected one of {', '.join(map(str, _choices(key)))}"
        place = places.get(key) or places.get(path) or places.get("", "the configuration")
        raise ConfigError(f"{place}: {key or 'configuration'}: {message}") from None


def _choices(dotted: str) -> tuple[Any, ...]:
    """The values that a ``Literal`` of the configuration allows."""
    kind: Any = Config
    for key in dotted.split("."):
        kind = next(item.type for item in msgspec.structs.fields(kind) if item.name == key)
    return get_args(kind)


def _decode(kind: type, value: object) -> object:
    if kind is Duration:
        return Duration(value)
    raise NotImplementedError(kind)  # a type of ours that nobody taught this function: a bug


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values, and the place (``file:line``) of each dotted path in it."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise ConfigError(f"{path}: more than {MAX_FILE} bytes: is this the right file?")
        node = yaml.compose(text, Loader=loader)
        values = yaml.load(text, Loader=loader)  # noqa: S506 - both loaders above are safe ones
        places = {"": str(path)}
        _note_places(node, path, "", places)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: this is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}, places
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected sections such as `imds:`, got {type(values).__name__}")
    return values, places


def _note_places(node: Any, file: Path, above: str, places: dict[str, str]) -> None:
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        place = f"{file}:{key.start_mark.line + 1}"
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{place}: expected text as the name of a section or key, got {key.value!r}")
        dotted = f"{above}.{key.value}".lstrip(".")
        places[dotted] = place
        _note_places(value, file, dotted, places)
