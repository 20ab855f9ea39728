"""How the agent is looked at: Prometheus's formats, the HTTP server, the JSON interface."""
