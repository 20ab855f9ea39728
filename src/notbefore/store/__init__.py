"""The data that must survive a restart: state, outbox, history. ``Store`` owns them; one SQLite file follows them."""

from typing import Final

SCHEMA_VERSION: Final = 4  # of the state file; here, as a courier, which says it to its agent, needs no SQLite
