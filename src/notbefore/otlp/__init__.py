"""Metrics and records over OTLP."""
