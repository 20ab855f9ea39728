"""The agent's page: what the JSON interface says, for people. Imported at the first request for it."""
