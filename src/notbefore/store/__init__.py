"""What must survive a restart: the state, the outbox, the history. ``Store`` owns them, one SQLite file follows."""

from typing import Final

SCHEMA_VERSION: Final = 4  # of the state file; a courier says it without SQLite
