"""The agent's page, for people. It is imported at the first request, together with Jinja2."""
