"""The data that must survive a restart: state, outbox, history.

``Store`` owns them, and one SQLite file follows them.
"""

from typing import Final

# of the state file; it is here because a courier reports it, and does not need SQLite
SCHEMA_VERSION: Final = 4
