"""``ConfigReading``: reads the configuration again, in a thread of its own."""

import threading
from collections.abc import Callable

from notbefore.config.model import Config
from notbefore.errors import ConfigError


class ConfigReading:
    """One attempt. ``read`` and ``check`` raise ``ConfigError``; ``wake`` is called when the attempt is done."""

    def __init__(self, read: Callable[[], Config], check: Callable[[Config], None], wake: Callable[[], None]) -> None:
        self.done = False
        self._read = read
        self._check = check
        self._wake = wake
        self._config: Config | None = None
        self._error: Exception = ConfigError("the configuration was not read")
        threading.Thread(target=self._run, name="reload", daemon=True).start()

    def result(self) -> Config:
        """Return what was read; raises ``ConfigError``. To be called when ``done``."""
        if self._config is None:
            raise self._error
        return self._config

    def _run(self) -> None:
        try:
            config = self._read()
            self._check(config)
            self._config = config
        except Exception as error:  # noqa: BLE001 - raised again by `result`, in the thread that asks
            self._error = error
        self.done = True
        self._wake()
