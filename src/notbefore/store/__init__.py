"""The data that must survive a restart: state, outbox, history. ``Store`` owns them.

One SQLite file follows them.
"""

from typing import Final

# of the state file; here, as a courier, which says it to its agent, needs no SQLite
SCHEMA_VERSION: Final = 4
