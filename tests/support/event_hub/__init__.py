"""An Event Hub on loopback: ``python -m support.event_hub``."""
