"""The agent's page, for people. Imported at the first request for it, and Jinja2 with it."""
